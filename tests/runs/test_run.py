"""A run creates exactly the missing files, and gives the same results however often it is interrupted."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from experiments.small_plan import TEXT
from kit import refused

import kfacpack as kp
from kfacpack.estimation.resume import Interrupted
from kfacpack.experiments.plan_file import parse
from kfacpack.experiments.results import RESULTS, TIMES
from kfacpack.experiments.run import Run, RunContext
from kfacpack.experiments.stage import StageProgress
from kfacpack.merging.merge import merge_and_report


def run_of(root, text=TEXT):
    return Run(parse(text, "plan"), text, root, torch.device("cpu"))


class Record:
    """Records the stages that are executed."""

    def __init__(self, stop_after=None):
        self.executed = []
        self._calls = 0
        self._stop_after = stop_after

    def stopped(self):
        self._calls += 1
        return self._stop_after is not None and self._calls > self._stop_after

    @contextmanager
    def __call__(self, stage, number, total):
        yield lambda done, total, words: None
        self.executed.append(f"{stage.kind}/{stage.name}")


@pytest.mark.parametrize(("option", "digits_keep"), [("", "faces"), (", instead: weaves", "weaves")])
def test_another_control_is_used_when_the_control_is_negated(tmp_path, option, digits_keep):
    three = TEXT.replace("[faces, weaves]", "[faces, weaves, digits]")
    text = three.replace("control: faces", f"control: digits{option}")
    (trial, *_) = run_of(tmp_path, text).graph.arm_runs
    controls = {task: stage.control for task, stage in trial.negated.items()}
    assert controls == {"faces": "digits", "weaves": "digits", "digits": digits_keep}


@pytest.mark.parametrize("penalty", ["kronecker, rule: tak", "kronecker, rule: optimal", "diagonal"])
def test_the_error_of_a_merge_is_reported(tmp_path, penalty):
    text = TEXT.replace("[faces, weaves]", "[faces, weaves, digits]").replace("  spectra: true\n", "")
    run = run_of(tmp_path, text.replace("penalty: kronecker", f"penalty: {penalty}"))
    merge = next(iter(run.graph.merges.values()))
    for stage in (*merge.bundles, merge):
        stage.path.parent.mkdir(exist_ok=True)
        stage.make(StageProgress())
    measured = merge_and_report([bundle.path for bundle in merge.bundles], merge.rule).report.total.frobenius
    assert merge.error() == pytest.approx(measured, rel=1e-5)  # recorded with six digits
    assert (measured > 0) == (penalty != "diagonal")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    run_of(root).execute()
    return root


@pytest.fixture(scope="module")
def results(finished):
    """The content of results.json, before tests run other plans in the same folder."""
    return (finished / RESULTS).read_bytes()


def test_results_are_consistent(finished, results):
    results = json.loads(results)
    assert [line["arm"] for line in results["summary"]] == ["without", "kfac"]
    kfac = results["arms"][1]["seeds"][0]
    assert set(kfac["individual"]) == {"faces", "weaves"}
    assert kfac["sweep"]["alphas"] == [0.0, 1.0]
    at_one = kfac["added"]["sum"]["tasks"]
    assert {task: curve[1] for task, curve in kfac["sweep"]["tasks"].items()} == {
        task: score["accuracy"] for task, score in at_one.items()
    }
    base = {task: score["accuracy"] for task, score in results["base"]["tasks"].items()}
    assert {task: curve[0] for task, curve in kfac["sweep"]["tasks"].items()} == base
    assert {merge["without"] for merge in results["merges"]} == {"faces", "weaves"}
    for bundle in results["bundles"]:
        assert (finished / bundle["file"]).stat().st_size == bundle["bytes"]


def test_a_second_run_executes_nothing(finished, results):
    record = Record()
    run_of(finished).execute(record)
    assert record.executed == []
    assert (finished / RESULTS).read_bytes() == results
    assert all(stage["reused"] for stage in json.loads((finished / TIMES).read_bytes())["stages"])


def test_only_changed_stages_are_executed_again(finished):
    record = Record()
    run_of(finished, TEXT.replace("strength: 3", "strength: 5")).execute(record)
    assert record.executed
    assert all("kfac" in name for name in record.executed)
    assert not any(name.startswith(("bundles/", "merged/")) for name in record.executed)


def test_a_renamed_arm_is_not_trained_again(finished):
    record = Record()
    run_of(finished, TEXT.replace("kfac:", "curvature:")).execute(record)
    assert record.executed == []


def test_interrupted_runs_give_the_same_results(results, tmp_path):
    record = Record(stop_after=0)
    for stop_after in (0, 1, 3, 5, 9, 14):
        record = Record(stop_after)
        with pytest.raises(Interrupted):
            run_of(tmp_path).execute(record, record.stopped)
    run_of(tmp_path).execute()
    assert (tmp_path / RESULTS).read_bytes() == results


def test_stages_can_be_interrupted(tmp_path):
    """Each run continues the one before, and is interrupted in its first stage of another kind."""
    text = TEXT.replace("examples: 8, batch_size: 8", "examples: 8, batch_size: 4")
    partial = {"bundles": "*.partial", "vectors": "*.partial"}
    for kind in ("scores", "bundles", "merged", "vectors", "sums"):
        active = []

        @contextmanager
        def show(stage, number, total, active=active):
            yield lambda done, total, words: active.append(stage.kind) if done else None

        run = run_of(tmp_path, text)
        with pytest.raises(Interrupted):
            run.execute(show, lambda kind=kind, active=active: active[-1:] == [kind])
        assert active[-1] == kind
        assert len([stage for stage in run.stages if stage.kind == kind and stage.done]) == 0
        assert kind not in partial or list((tmp_path / kind).glob(partial[kind]))


def test_two_runs_in_one_folder_are_refused(tmp_path):
    from kfacpack.experiments.run import _exclusive_lock

    with _exclusive_lock(tmp_path), refused(kp.KfacpackError, tmp_path, "another run"):
        run_of(tmp_path).execute()


def test_the_forecast_covers_the_pending_stages(finished, tmp_path):
    fresh = run_of(tmp_path)
    seconds = fresh.forecast()
    assert set(seconds) == {stage.key for stage in fresh.stages}
    assert all(value > 0 for value in seconds.values())
    assert run_of(finished).forecast() == {}
    assert not any(tmp_path.iterdir())


def test_files_of_another_torch_or_device_are_not_reused(tmp_path, monkeypatch):
    stage = run_of(tmp_path).stages[0]
    context = stage.context
    before = dict(context.environment)

    def key():
        vars(context).pop("environment", None)
        return replace(stage).key

    assert key() == stage.key
    context.device = torch.device("meta")
    assert key() != stage.key
    context.device = torch.device("cpu")
    with monkeypatch.context() as other:
        other.setattr(torch, "__version__", "2.0.0")
        assert key() != stage.key
    assert key() == stage.key
    assert before == context.environment


def test_devices_of_the_same_kind_are_equal(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    first, second = (RunContext(parse(TEXT, "plan"), torch.device(f"cuda:{k}")).environment for k in (0, 1))
    assert first == second
    assert first["device"] == "cuda, Some GPU"


def test_long_names_are_truncated_in_file_names(tmp_path):
    long = "ä" * 150
    stages = run_of(tmp_path, TEXT.replace("kfac:", f"{long}:")).stages
    assert any(long in stage.name for stage in stages)
    assert all(len(f".{stage.path.name}.partial".encode()) < 255 for stage in stages)


def test_the_data_key_depends_on_names_and_images(tmp_path):
    """Also for examples that the fingerprint does not cover, with files of the same size."""
    from PIL import Image

    def key(name, first, changed=None):
        for number in range(80):
            file = tmp_path / name / "train" / (first if number < 40 else "dog") / f"{number:02}.bmp"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (number, 0 if number != changed else 1, 0)).save(file)
        data = TEXT.replace("weaves]", f"{{name: mine, data: {tmp_path / name}}}]")
        return RunContext(parse(data, "plan"), torch.device("cpu")).data_key("mine", "train")

    before = key("one", "cat")
    assert key("two", "cat") == before
    assert key("three", "cow") != before
    assert all(key(f"changed {number}", "cat", number) != before for number in (1, 2, 3))


@pytest.mark.parametrize("kind", ["scores", "bundles", "vectors"])
def test_damaged_files_are_created_again(finished, kind):
    stage = next(candidate for candidate in run_of(finished).stages if candidate.kind == kind)
    content = stage.path.read_bytes()
    for damaged in (b"", b"[]", b'{"values": {}, "sha256": ""}', content[: len(content) // 2]):
        stage.path.write_bytes(damaged)
        record = Record()
        run_of(finished).execute(record)
        assert record.executed == [f"{stage.kind}/{stage.name}"]
        assert stage.path.read_bytes() == content
