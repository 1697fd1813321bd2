"""A training run: the same whatever its batches are cut into, whenever it is stopped, and honest when it fails."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from toys import CLASSES, ToyTask, toy_model

import kfacpack as kp
from kfacpack.running.partial import Interrupted
from kfacpack.training.drift import Drift
from kfacpack.training.job import Job
from kfacpack.training.regimes import REGIMES
from kfacpack.training.settings import Settings

SETTINGS = Settings(steps=12, batch_size=10, lr=0.02)


def job(regime="linear", settings=SETTINGS, task=None, model=None, **more):
    model, task = model or toy_model(), task or ToyTask()
    head = kp.head_for(model, task)
    return Job(REGIMES[regime](model), task, head, settings, **more)


def bundle_of(model, task):
    split = task.split("train")
    batch = model.prepare([split[n] for n in range(len(split))], task.name)
    source = kp.Source(task=task.name, dataset_size=len(split))
    about = {"name": model.name, "function": model.function, "source": source}
    return kp.estimate(model.module, [batch], fisher="exact", forward=model.forward, **about)


@pytest.fixture(scope="module")
def other():
    return bundle_of(toy_model(), ToyTask("other", seed=5))


@pytest.mark.parametrize("regime", list(REGIMES))
def test_it_learns_and_the_file_says_how(regime, tmp_path):
    made = job(regime).run(tmp_path / "t.safetensors")
    lines = [json.loads(line) for line in (tmp_path / "t.metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[-1]["loss"] < lines[0]["loss"] / 2
    assert all(line["penalty"] is None for line in lines)
    vector = kp.TaskVector.load(tmp_path / "t.safetensors")
    assert vector.digest == made.digest
    assert (vector.regime, vector.tasks) == (regime, ("toy",))
    (entry,) = vector.about.tasks
    assert entry.training.seed == 0
    assert entry.training.settings["steps"] == 12
    assert entry.training.settings["lr"] == 0.02
    assert vector.heads["toy"].classes == CLASSES
    assert not list(tmp_path.glob("*.partial"))
    model = toy_model()
    before = kp.evaluate(model, ToyTask(), vector.heads["toy"]).accuracy
    assert kp.evaluate(model, ToyTask(), vector=vector).accuracy >= before
    if regime == "attention":
        assert all(name.startswith("attn.") for name in vector)


@pytest.mark.parametrize("regime", list(REGIMES))
@pytest.mark.parametrize("at_once", [1, 3, 7])
def test_a_batch_may_be_computed_in_parts(regime, at_once, tmp_path):
    whole = job(regime).run(tmp_path / "whole.safetensors")
    parts = job(regime, replace(SETTINGS, at_once=at_once)).run(tmp_path / "parts.safetensors")
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-5, atol=1e-7)


def test_a_penalty_keeps_the_other_task_where_it_is(other, tmp_path):
    plain = job().run(tmp_path / "plain.safetensors")
    held = job(regularizer=kp.Regularizer(other, 1000.0)).run(tmp_path / "held.safetensors")
    assert float(other.quadratic(dict(held))) < 0.2 * float(other.quadratic(dict(plain)))
    lines = [json.loads(line) for line in (tmp_path / "held.metrics.jsonl").read_text().splitlines()]
    assert lines[0]["penalty"] == 0
    assert lines[-1]["penalty"] > 0
    by_data = job(drift=Drift([ToyTask("other", seed=5)], 1000.0, 10, 0)).run(tmp_path / "data.safetensors")
    assert float(other.quadratic(dict(by_data))) < 0.3 * float(other.quadratic(dict(plain)))
    (entry,) = kp.TaskVector.load(tmp_path / "data.safetensors").about.tasks
    assert entry.training.settings["reg_data"] == "other"


def test_the_bundles_are_named_in_the_file(other, tmp_path):
    other.save(tmp_path / "other.kfac")
    regularizer = kp.Regularizer(tmp_path / "other.kfac", 3.0, every=2, weights={"norm": 2.0})
    job(regularizer=regularizer).run(tmp_path / "t.safetensors")
    (entry,) = kp.TaskVector.load(tmp_path / "t.safetensors").about.tasks
    assert entry.training.bundles == (kp.Bundle(tmp_path / "other.kfac").digest,)
    settings = entry.training.settings
    assert (settings["strength"], settings["reg_every"], settings["weights"]) == (3.0, 2, "norm=2")
    lines = [json.loads(line) for line in (tmp_path / "t.metrics.jsonl").read_text().splitlines()]
    assert [line["penalty"] is None for line in lines] == [False, True] * 6


@pytest.mark.parametrize("seed", range(3))
def test_stopped_anywhere_and_resumed_it_has_the_same_bytes(other, seed, tmp_path):
    def run(name, stop=None, **more):
        steps = []
        made = job(regularizer=kp.Regularizer(other, 3.0))
        made.run(
            tmp_path / name,
            on_progress=lambda metrics, total: steps.append(metrics.step),
            stopped=lambda: steps[-1:] == [stop],
            **more,
        )

    run("whole.safetensors")
    first, second = sorted(random.Random(seed).sample(range(1, 12), 2))
    for stop, resume in ((first, False), (second, True)):
        with pytest.raises(Interrupted):
            run("parts.safetensors", stop, resume=resume)
        assert (tmp_path / "parts.safetensors.partial").exists()
        assert not (tmp_path / "parts.safetensors").exists()
    run("parts.safetensors", resume=True)
    assert (tmp_path / "parts.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert (tmp_path / "parts.metrics.jsonl").read_text() == (tmp_path / "whole.metrics.jsonl").read_text()
    assert not (tmp_path / "parts.safetensors.partial").exists()


def test_another_run_is_not_taken_up(tmp_path):
    with pytest.raises(Interrupted):
        job().run(tmp_path / "t.safetensors", stopped=lambda: True)
    with pytest.raises(kp.KfacpackError, match="a training run from before that was interrupted"):
        job().run(tmp_path / "t.safetensors")
    with pytest.raises(kp.KfacpackError, match=r"was begun with lr = 0.02, now it is 0.03"):
        job(settings=replace(SETTINGS, lr=0.03)).run(tmp_path / "t.safetensors", resume=True)
    (tmp_path / "t.safetensors.partial").write_bytes(b"cut off")
    with pytest.raises(kp.KfacpackError, match="or it is damaged"):
        job().run(tmp_path / "t.safetensors", resume=True)


def test_a_loss_that_is_no_number_stops_it_and_the_last_good_state_is_kept(tmp_path):
    steps = []
    wild = job("full", replace(SETTINGS, steps=40, lr=0.02))
    learn = wild._learn

    def fail(chosen, underway):
        found = learn(chosen, underway)
        return found * float("nan") if len(steps) == 5 else found

    wild._learn = fail
    with pytest.raises(kp.KfacpackError, match=r"step 6: the loss is nan.*smaller --lr"):
        wild.run(tmp_path / "t.safetensors", every=0.0, on_progress=lambda metrics, total: steps.append(metrics.step))
    assert not (tmp_path / "t.safetensors").exists()
    assert (tmp_path / "t.safetensors.partial").exists()
    again = job("full", replace(SETTINGS, steps=40, lr=0.02)).run(tmp_path / "t.safetensors", resume=True)
    whole = job("full", replace(SETTINGS, steps=40, lr=0.02)).run(tmp_path / "whole.safetensors")
    assert again.digest == whole.digest


def test_what_cannot_be_trained_is_refused(other, tmp_path):
    with pytest.raises(kp.KfacpackError, match="has one class, 'all': there is nothing to learn"):
        job(task=ToyTask(classes=("all",)))
    with pytest.raises(kp.KfacpackError, match="which the model is not: parameter"):
        job(model=toy_model(seed=1), regularizer=kp.Regularizer(other))
    with pytest.raises(kp.KfacpackError, match="no writable folder"):
        job().run(tmp_path / "nowhere" / "t.safetensors")
    wide = toy_model()
    function = wide.function.model_copy(update={"normalized": True})
    with pytest.raises(kp.KfacpackError, match="is of another f"):
        job(model=replace(wide, function=function), regularizer=kp.Regularizer(other))


def test_a_full_disk_loses_nothing_that_was_stored(tmp_path, monkeypatch):
    from kfacpack.running import partial

    with pytest.raises(Interrupted):
        job().run(tmp_path / "t.safetensors", stopped=lambda: True)
    before = (tmp_path / "t.safetensors.partial").read_bytes()

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(partial, "save_file", full)
    with pytest.raises(kp.KfacpackError, match=r"cannot be stored: .*No space left"):
        job().run(tmp_path / "t.safetensors", resume=True, every=0.0)
    assert (tmp_path / "t.safetensors.partial").read_bytes() == before
    monkeypatch.undo()
    job().run(tmp_path / "t.safetensors", resume=True)
    assert kp.TaskVector.load(tmp_path / "t.safetensors").tasks == ("toy",)
