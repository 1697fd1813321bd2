"""The summary of a run when values are missing: no margin over chance, no accuracy to divide by."""

from __future__ import annotations

import pytest

from kfacpack.experiments.results import summary


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
