"""The summary of a run when values are missing: no margin over chance, no accuracy to divide by."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kfacpack.experiments.results import RunRecord, open_events, summary
from kfacpack.experiments.results_schema import read_times


def arm(name: str, *, added: float, removed: float | None, control_before: float):
    negated = {"removed": removed, "control": 0.4, "control_before": control_before}
    seed = {
        "individual": {"a": 0.0, "b": 0.8},
        "added": {"sum": {"mean": {"accuracy": added, "normalized": None}}},
        "best": {"alpha": 1.0, "test": added},
        "negation": {"tasks": {"a": negated}},
        "localisation": None,
    }
    return {"name": name, "seeds": [seed]}


def test_missing_values_are_none():
    arms = [arm("without", added=0.3, removed=None, control_before=0.0)]
    (line,) = summary(arms)
    assert line["individual"] == 0.4
    unknown = ("normalized", "removed", "control_kept", "auroc", "recovered")
    assert [line[key] for key in unknown] == [None] * len(unknown)


def test_recovered_is_a_share_of_the_loss_by_adding():
    arms = [
        arm("without", added=0.3, removed=0.5, control_before=0.5),
        arm("kfac", added=0.35, removed=1.0, control_before=0.5),
    ]
    without, kfac = summary(arms)
    assert without["recovered"] is None
    assert kfac["recovered"] == pytest.approx(0.5)
    assert (kfac["removed"], kfac["control_kept"]) == (1.0, 0.8)


def test_nothing_is_recovered_if_the_baseline_loses_only_rounding_errors():
    arms = [
        arm("without", added=0.4 - 1e-16, removed=0.5, control_before=0.5),
        arm("kfac", added=0.5, removed=0.5, control_before=0.5),
    ]
    assert [line["recovered"] for line in summary(arms)] == [None, None]


def test_times_of_other_plans_in_the_folder_are_kept(tmp_path):
    stages = {name: SimpleNamespace(kind="train", name=name, key=f"key of {name}") for name in "abc"}

    def run(names, finished):
        with open_events(tmp_path) as events:
            record = RunRecord(tmp_path, [stages[name] for name in names], events, lambda event: None, lambda: 0)
            for name, seconds in finished.items():
                record.finished(stages[name], seconds, {})
            record.write_times()
        times = read_times(tmp_path)
        return [{stage.name: stage.seconds for stage in part} for part in (times.stages, times.others)]

    assert run("ab", {"a": 1.0, "b": 2.0}) == [{"train/a": 1.0, "train/b": 2.0}, {}]
    assert run("bc", {"c": 3.0}) == [{"train/b": 2.0, "train/c": 3.0}, {"train/a": 1.0}]
    assert run("a", {}) == [{"train/a": 1.0}, {"train/b": 2.0, "train/c": 3.0}]
