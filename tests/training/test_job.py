"""Training runs: results do not depend on batching or interruptions, and failures are reported."""

from __future__ import annotations

import json
import os
import random
from contextlib import nullcontext
from dataclasses import dataclass, replace
from hashlib import sha256

import pytest
import torch
from kit import refused, warned
from safetensors.torch import save_file
from toys import CLASSES, NoFloat64, ToyTask, on_device, toy_model

import kfacpack as kp
from kfacpack.estimation.resume import Interrupted
from kfacpack.training import trainer as trainer_module
from kfacpack.training.data_penalty import DataPenalty
from kfacpack.training.metrics import Metrics, MetricsWarning, metrics_path, open_metrics_log, read_metrics
from kfacpack.training.optimizer import TrainingSettings
from kfacpack.training.regimes import REGIMES, calibrated_masks
from kfacpack.training.trainer import Trainer

# Toy penalties are strong on purpose; test_output_scale.py tests the warning.
pytestmark = pytest.mark.filterwarnings("ignore::kfacpack.training.metrics.PenaltyWarning")
SETTINGS = TrainingSettings(steps=12, batch_size=10, lr=0.02)


def job(regime="linear", settings=SETTINGS, task=None, model=None, head=None, **more):
    model, task = model or toy_model(), task or ToyTask()
    head = head or kp.head_for(model, task)
    trained = REGIMES[regime](model)
    if regime == "sparse":
        more["masks"] = calibrated_masks(trained, head, task, keep=0.5)
    return Trainer(trained, task, head, settings, **more)


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
def test_training_reduces_the_loss_and_records_its_settings(regime, tmp_path):
    trained = job(regime).run(tmp_path / "t.safetensors")
    lines = [json.loads(line) for line in (tmp_path / "t.metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[-1]["loss"] < lines[0]["loss"] / 2
    assert all(line["penalty"] is None for line in lines)
    vector = kp.TaskVector.load(tmp_path / "t.safetensors")
    assert vector.digest == trained.digest
    assert (vector.regime, vector.tasks) == (regime, ("toy",))
    (entry,) = vector.about.tasks
    assert entry.training.seed == 0
    assert entry.training.settings["steps"] == 12
    assert entry.training.settings["lr"] == 0.02
    assert vector.heads["toy"].classes == CLASSES
    assert not list(tmp_path.glob("*.partial"))
    model = toy_model()
    before = kp.evaluate(model, ToyTask(), head=vector.heads["toy"]).accuracy
    assert kp.evaluate(model, ToyTask(), vector=vector).accuracy >= before
    if regime == "attention":
        assert all(name.startswith("attn.") for name in vector)


@pytest.mark.parametrize("regime", list(REGIMES))
@pytest.mark.parametrize("micro_batch_size", [1, 3, 7])
def test_gradient_accumulation_gives_the_same_vector(regime, micro_batch_size, tmp_path):
    whole = job(regime).run(tmp_path / "whole.safetensors")
    parts = job(regime, replace(SETTINGS, micro_batch_size=micro_batch_size)).run(tmp_path / "parts.safetensors")
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-5, atol=1e-7)


def test_a_penalty_reduces_the_drift_on_the_other_task(other, tmp_path):
    plain = job().run(tmp_path / "plain.safetensors")
    penalised = job(regularizer=kp.Regularizer(other, 1000.0)).run(tmp_path / "held.safetensors")
    assert float(other.quadratic(dict(penalised))) < 0.2 * float(other.quadratic(dict(plain)))
    lines = [json.loads(line) for line in (tmp_path / "held.metrics.jsonl").read_text().splitlines()]
    assert lines[0]["penalty"] == 0
    assert lines[-1]["penalty"] > 0
    penalty = DataPenalty([ToyTask("other", seed=5)], 1000.0, 10, 0)
    by_data = job(data_penalty=penalty).run(tmp_path / "data.safetensors")
    assert float(other.quadratic(dict(by_data))) < 0.3 * float(other.quadratic(dict(plain)))
    (entry,) = kp.TaskVector.load(tmp_path / "data.safetensors").about.tasks
    assert entry.training.settings["reg_data"] == "other (30)"


def test_bundles_and_penalty_settings_are_recorded(other, tmp_path):
    other.save(tmp_path / "other.kfac")
    regularizer = kp.Regularizer(tmp_path / "other.kfac", 3.0, every=2, weights={"norm": 2.0})
    job(regularizer=regularizer).run(tmp_path / "t.safetensors")
    (entry,) = kp.TaskVector.load(tmp_path / "t.safetensors").about.tasks
    assert entry.training.bundles == (kp.Bundle(tmp_path / "other.kfac").digest,)
    settings = entry.training.settings
    assert (settings["strength"], settings["reg_every"], settings["weights"]) == (3.0, 2, "norm=2.0")
    lines = [json.loads(line) for line in (tmp_path / "t.metrics.jsonl").read_text().splitlines()]
    assert [line["penalty"] is None for line in lines] == [False, True] * 6


@pytest.mark.parametrize(
    ("seed", "regime", "penalty"),
    [
        *((seed, "linear", "bundles") for seed in range(3)),
        (3, "linear", "data"),
        (4, "attention", "bundles"),
        (5, "attention", "data"),
        (6, "full", None),
        (7, "sparse", "bundles"),
    ],
)
def test_an_interrupted_and_resumed_run_gives_the_same_bytes(other, seed, regime, penalty, tmp_path):
    def run(name, stop=None, **more):
        steps = []
        kinds = {
            "bundles": lambda: {"regularizer": kp.Regularizer(other, 3.0)},
            "data": lambda: {
                "data_penalty": DataPenalty([ToyTask("other", seed=5), ToyTask("third", seed=6)], 3.0, 10, 0)
            },
            None: dict,
        }
        trainer = job(regime, **kinds[penalty]())
        trainer.run(
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


def test_a_run_with_another_penalty_is_not_resumed(other, tmp_path):
    with pytest.raises(Interrupted):
        job(regularizer=kp.Regularizer(other, 3.0)).run(tmp_path / "t.safetensors", stopped=lambda: True)
    for wrong, words in (
        ({}, "bundles"),
        ({"regularizer": kp.Regularizer(other, 4.0)}, "strength = 3.0.*4.0"),
        ({"regularizer": kp.Regularizer(bundle_of(toy_model(), ToyTask("third", seed=6)), 3.0)}, "bundles"),
        ({"regularizer": kp.Regularizer(other, 3.0, every=2)}, "reg_every"),
    ):
        with pytest.raises(kp.KfacpackError, match=words):
            job(**wrong).run(tmp_path / "t.safetensors", resume=True)


def test_a_run_with_other_settings_is_not_resumed(tmp_path):
    with pytest.raises(Interrupted):
        job().run(tmp_path / "t.safetensors", stopped=lambda: True)
    with refused(kp.KfacpackError, "t.safetensors.partial: the file exists", "--resume"):
        job().run(tmp_path / "t.safetensors")
    with refused(kp.KfacpackError, "lr = 0.02", "got 0.03"):
        job(settings=replace(SETTINGS, lr=0.03)).run(tmp_path / "t.safetensors", resume=True)
    (tmp_path / "t.safetensors.partial").write_bytes(b"cut off")
    with refused(kp.KfacpackError, "t.safetensors.partial: the file is damaged", "Remove the file"):
        job().run(tmp_path / "t.safetensors", resume=True)
    for content in ("[]", '{"request": [], "batches": 1}', "[" * 100_000):
        save_file({"a": torch.ones(1)}, tmp_path / "t.safetensors.partial", {"kfacpack_partial": content})
        with refused(kp.KfacpackError, "t.safetensors.partial: the file is damaged", "Remove the file"):
            job().run(tmp_path / "t.safetensors", resume=True)


@dataclass
class Relabelled(ToyTask):
    """The same examples, one of them with another label."""

    changed: int = 17

    def split(self, name):
        examples = super().split(name)
        examples.labels[self.changed] = (examples.labels[self.changed] + 1) % len(self.classes)
        return examples


def test_a_run_on_other_data_of_the_same_name_and_size_is_not_resumed(tmp_path):
    head = kp.head_for(toy_model(), ToyTask())  # does not depend on the data, like a text head
    with pytest.raises(Interrupted):
        job(head=head).run(tmp_path / "t.safetensors", stopped=lambda: True)
    for wrong in (ToyTask(seed=1), Relabelled()):
        with refused(kp.KfacpackError, "t.safetensors.partial", "data_content = "):
            job(head=head, task=wrong).run(tmp_path / "t.safetensors", resume=True)
    penalty, other = (DataPenalty([ToyTask("other", seed=seed)], 3.0, 10, 0) for seed in (5, 6))
    with pytest.raises(Interrupted):
        job(data_penalty=penalty).run(tmp_path / "held.safetensors", stopped=lambda: True)
    with refused(kp.KfacpackError, "held.safetensors.partial", "reg_data_content = {'other'"):
        job(data_penalty=other).run(tmp_path / "held.safetensors", resume=True)
    job(data_penalty=penalty).run(tmp_path / "held.safetensors", resume=True)


@pytest.fixture(params=["cpu", "asynchronous"])
def reading(request, monkeypatch):
    """Results are read at once, as on a CPU, or when the next step has been started, as on a GPU."""
    if request.param == "asynchronous":
        monkeypatch.setattr(trainer_module, "SYNCHRONOUS_DEVICES", ())
    return request.param


@pytest.mark.parametrize("poison", ["loss", "gradient", "f"])
def test_nan_or_inf_stops_training_and_keeps_the_last_stored_state(tmp_path, poison, reading):
    settings, calls, steps = replace(SETTINGS, steps=9), [], []
    trainer = job("full", settings)
    learn = trainer._add_loss_gradient
    words = {"loss": "the loss is nan", "gradient": "the gradient contains NaN", "f": "f contains NaN"}

    def fail(batch, labels, state):
        calls.append(None)
        if len(calls) == 6 and poison == "f":
            next(iter(state.tau.values())).fill_(float("nan"))
        sums = learn(batch, labels, state)
        if len(calls) == 6 and poison == "gradient":
            next(iter(state.gradients.values()))[0] = float("inf")
        if len(calls) == 6 and poison == "loss":
            sums[0] = float("nan")
        return sums

    trainer._add_loss_gradient = fail
    with refused(kp.KfacpackError, "step 6: ", words[poison], "smaller --lr"):
        trainer.run(
            tmp_path / "t.safetensors", every=0.0, on_progress=lambda metrics, total: steps.append(metrics.step)
        )
    assert steps == [1, 2, 3, 4, 5]
    assert len((tmp_path / "t.metrics.jsonl").read_text().splitlines()) == 5
    assert not (tmp_path / "t.safetensors").exists()
    again = job("full", settings).run(tmp_path / "t.safetensors", resume=True)
    assert again.digest == job("full", settings).run(tmp_path / "whole.safetensors").digest


def test_steps_are_recorded_if_the_next_one_fails(tmp_path, reading):
    """The data of step 5 cannot be read; an interval of 0 stores the state of step 4."""
    model, calls = toy_model(), []
    head = kp.head_for(model, ToyTask())

    def fail(examples, task):
        calls.append(None)
        if len(calls) == 6:  # the first call computes the fingerprint of the data
            raise kp.KfacpackError("cannot be read")
        return model.prepare(examples, task)

    with refused(kp.KfacpackError, "cannot be read"):
        job(model=replace(model, prepare=fail), head=head).run(tmp_path / "t.safetensors", every=0.0)
    lines = [json.loads(line) for line in (tmp_path / "t.metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert job().run(tmp_path / "t.safetensors", resume=True).digest == job().run(tmp_path / "whole.safetensors").digest
    assert (tmp_path / "t.metrics.jsonl").read_text() == (tmp_path / "whole.metrics.jsonl").read_text()


@pytest.mark.parametrize("micro_batch_size", [None, 3])
def test_results_that_are_read_late_give_the_same_files(other, tmp_path, monkeypatch, micro_batch_size):
    """Also after an interruption; a state is stored at a step whose results have been read."""
    settings = replace(SETTINGS, micro_batch_size=micro_batch_size)
    job(settings=settings, regularizer=kp.Regularizer(other, 3.0)).run(tmp_path / "whole.safetensors")
    monkeypatch.setattr(trainer_module, "SYNCHRONOUS_DEVICES", ())
    seen: list[int] = []
    for stop in (4, 5, None):
        late = job(settings=settings, regularizer=kp.Regularizer(other, 3.0))
        arguments = {"on_progress": lambda metrics, total: seen.append(metrics.step), "resume": stop != 4}
        with nullcontext() if stop is None else pytest.raises(Interrupted):
            late.run(tmp_path / "late.safetensors", stopped=lambda stop=stop: stop in seen, **arguments)
        assert seen == list(range(1, len(seen) + 1))
    for name in ("safetensors", "metrics.jsonl"):
        assert (tmp_path / f"late.{name}").read_bytes() == (tmp_path / f"whole.{name}").read_bytes()


def test_a_vector_that_overflows_at_its_last_step_is_not_written(tmp_path):
    settings, steps = replace(SETTINGS, steps=5), []
    trainer = job("full", settings)

    def note(metrics, total):
        steps.append(metrics.step)
        if metrics.step == 4:
            trainer.lr = 1e300  # still too large after the cosine decay, at the last step

    with refused(kp.KfacpackError, "step 5: τ contains NaN", "kept", "smaller --lr"):
        trainer.run(tmp_path / "t.safetensors", every=0.0, on_progress=note)
    assert steps == [1, 2, 3, 4]
    assert not (tmp_path / "t.safetensors").exists()
    again = job("full", settings).run(tmp_path / "t.safetensors", resume=True)
    assert again.digest == job("full", settings).run(tmp_path / "whole.safetensors").digest


@pytest.mark.parametrize("where", ["weights", "data"])
def test_the_learning_rate_is_not_blamed_for_nan_in_weights_or_data(where, tmp_path):
    model, task = toy_model(), ToyTask()
    head = kp.head_for(model, task)
    if where == "weights":
        with torch.no_grad():
            model.module.mlp.bias[0] = float("nan")
    trainer = job(model=model, task=task, head=head)
    if where == "data":
        trainer.split.x.fill_(float("nan"))
    with refused(kp.KfacpackError, "step 1: f contains NaN") as caught:
        trainer.run(tmp_path / "t.safetensors")
    assert ("'mlp.bias'" if where == "weights" else "check the data") in str(caught.value)
    assert "--lr" not in str(caught.value)


@pytest.mark.parametrize("lr", [None, 0.1])
@pytest.mark.parametrize("regime", ["linear", "full"])
def test_parameters_that_f_does_not_depend_on_are_reported(regime, lr, tmp_path):
    model = toy_model()
    model.module.unused = torch.nn.Linear(2, 2).double()
    chosen = REGIMES[regime](model, ["unused.*"])
    task = ToyTask()
    trainer = Trainer(chosen, task, kp.head_for(model, task), replace(SETTINGS, lr=lr))
    with refused(kp.KfacpackError, "does not depend", "(unused.weight, unused.bias)"):
        trainer.run(tmp_path / "t.safetensors")
    assert not (tmp_path / "t.safetensors").exists()
    some = Trainer(REGIMES[regime](model, ["unused.*", "mlp.bias"]), task, trainer.head, replace(SETTINGS, lr=lr))
    assert not some.run(tmp_path / "some.safetensors")["unused.weight"].any()


def test_every_vector_has_its_own_metrics_file(tmp_path):
    names = ["v1", "v1.0", "v1.1", "v1.safetensors", "v1.0.safetensors", "v1.metrics", "v1-metrics.safetensors", ".v1"]
    paths = [metrics_path(tmp_path / name) for name in names]
    assert len(set(paths)) == len(names)
    assert metrics_path(tmp_path / "v1.0.safetensors") == tmp_path / "v1.0.metrics.jsonl"
    metrics_path(tmp_path / "v1.1").mkdir()
    with refused(kp.KfacpackError, "v1.1-metrics.jsonl: is a folder", "Move the folder"):
        job().run(tmp_path / "v1.1")


def test_the_metrics_of_two_runs_with_one_output_are_not_mixed(tmp_path):
    path = tmp_path / "t.metrics.jsonl"
    with open_metrics_log(path, 0) as one, open_metrics_log(path, 0) as two:
        for log, loss in ((one, 1.0), (two, 2.0), (one, 3.0)):
            log.add(Metrics(1, loss, 0.5, None, 0.1))
    assert [metrics.loss for metrics in read_metrics(path)] == [2.0]


def test_missing_metrics_of_a_resumed_run_are_reported(tmp_path):
    output, metrics = tmp_path / "t.safetensors", tmp_path / "t.metrics.jsonl"
    steps = []

    def run(stop=None, **more):
        trainer = job(settings=replace(SETTINGS, steps=6))
        trainer.run(
            output,
            on_progress=lambda metrics, total: steps.append(metrics.step),
            stopped=lambda: steps[-1:] == [stop],
            **more,
        )

    with pytest.raises(Interrupted):
        run(3)
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(Interrupted), warned(MetricsWarning, "t.metrics.jsonl", "2 of 3"):
        run(5, resume=True)
    metrics.unlink()
    with warned(MetricsWarning, "t.metrics.jsonl", "step 6"):
        run(resume=True)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [6]


def test_parameters_are_hashed_once(other, tmp_path, monkeypatch):
    """Checking two bundles, identifying the base model and writing the vector hash each parameter once in total."""
    from kfacpack.format import identity
    from kfacpack.training.trainer import identify_base

    third = bundle_of(toy_model(), ToyTask("third", seed=6))
    model, hashed = toy_model(), []
    regularizer, regime = kp.Regularizer([other, third]), REGIMES["linear"](model)
    head = kp.head_for(model, ToyTask())

    def counting(data):
        hashed.append(len(data))
        return sha256(data)

    monkeypatch.setattr(identity, "sha256", counting)
    sizes = sorted(parameter.nbytes for parameter in model.module.parameters())
    vector = Trainer(regime, ToyTask(), head, SETTINGS, regularizer).run(tmp_path / "t.safetensors")
    assert sorted(hashed) == sizes
    assert vector.about.base == model.base(regime.parameters)
    # A caller that checks the bundles before it creates the head reuses the result.
    hashed.clear()
    base = identify_base(regime, regularizer)
    Trainer(regime, ToyTask(), head, SETTINGS, regularizer, base=base).run(tmp_path / "again.safetensors")
    assert sorted(hashed) == sizes
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "t.safetensors").read_bytes()


def test_a_vector_records_only_the_parameters_it_was_trained_on(other, tmp_path):
    """The penalty covers more parameters than the regime trains; only the trained ones identify its base model."""
    vector = job("attention", regularizer=kp.Regularizer(other)).run(tmp_path / "t.safetensors")
    assert [parameter.name for parameter in vector.about.base.parameters] == list(vector)
    assert vector.about.base == toy_model().base(list(vector))


def test_a_bundle_of_a_parameter_that_the_model_lacks_is_refused(other):
    model = toy_model()
    del model.module.norm
    chosen = REGIMES["linear"](model, ["mlp.*"])
    with refused(kp.KfacpackError, "norm.weight"):
        Trainer(chosen, ToyTask(), kp.head_for(toy_model(), ToyTask()), SETTINGS, kp.Regularizer(other))


def test_parameters_that_no_bundle_covers_are_named(other):
    model = toy_model()
    model.module.more = torch.nn.Linear(2, 2).double()
    assert job(model=model, regularizer=kp.Regularizer(other)).unpenalised == ("more.weight", "more.bias")
    assert job(regularizer=kp.Regularizer(other)).unpenalised == ()
    assert job(model=model).unpenalised == ()


@pytest.mark.parametrize("regime", ["linear", "full"])
def test_in_bfloat16_a_small_step_is_not_lost(regime, tmp_path):
    model = toy_model(dtype=torch.float32)
    cast = job(regime, model=model, autocast=torch.bfloat16).run(tmp_path / "cast.safetensors")
    plain = job(regime, model=model).run(tmp_path / "plain.safetensors")
    difference = sum(float((cast[name] - plain[name]).square().sum()) for name in plain)
    assert 0 < difference < 0.1 * sum(float(plain[name].square().sum()) for name in plain)
    assert cast.about.tasks[0].training.settings["autocast"] == "bfloat16"


def test_a_device_without_float64_gives_the_same_vector(tmp_path):
    model = toy_model(dtype=torch.float32)
    device = replace(model, forward=lambda x: on_device(model.forward(x))[0])
    with pytest.raises(TypeError):
        device.forward(torch.ones(1, 5, 4)).double()
    head = kp.head_for(model, ToyTask())
    device_head = kp.head_for(device, ToyTask())
    assert type(device_head.weight) is NoFloat64
    assert torch.equal(device_head.weight.cpu(), head.weight)
    vectors = [
        job("full", model=choice, head=head, data_penalty=DataPenalty([ToyTask("other", seed=5)], None, 10, 0)).run(
            tmp_path / f"{name}.safetensors"
        )
        for name, choice in (("plain", model), ("device", device))
    ]
    assert vectors[0].digest == vectors[1].digest
    accuracies = [kp.sweep(choice, ToyTask(), vectors[0], [0.0, 0.5, 1.0], head=head) for choice in (model, device)]
    assert accuracies[0] == accuracies[1]


@pytest.mark.parametrize("normalized", [False, True])
def test_the_default_learning_rate_moves_f_by_its_own_size(normalized):
    """The size is the norm of a normalised f, otherwise the deviation from the mean."""
    model = toy_model()
    function = model.function.model_copy(update={"normalized": normalized})
    trainer = job(settings=replace(SETTINGS, lr=None), model=replace(model, function=function))
    model, numbers = trainer.regime.model, trainer._order.batch(0)
    x = trainer._batch(numbers)
    lin = kp.linearize(model)
    tau = {name: value.requires_grad_() for name, value in lin.zeros().items()}
    torch.nn.functional.cross_entropy(trainer.head.logits(lin(x, tau)), trainer._labels(numbers)).backward()
    f, change = lin.outputs(x, {name: value.grad.sign() for name, value in tau.items() if value.grad is not None})
    size = f.norm() if normalized else (f - f.mean(0)).norm()
    assert trainer.lr * float(change.norm() / size) == pytest.approx(1.0, rel=0.05)


def test_invalid_training_runs_are_refused(other, tmp_path):
    with refused(kp.KfacpackError, "only one class, 'all'"):
        job(task=ToyTask(classes=("all",)))
    with refused(kp.KfacpackError, "bundles", "data", "both"):
        job(regularizer=kp.Regularizer(other), data_penalty=DataPenalty([ToyTask("other", seed=5)], 3.0, 10, 0))
    with refused(kp.KfacpackError, "input 1", "attentive", "'attn.in_proj_weight' has sha256"):
        job(model=toy_model(seed=1), regularizer=kp.Regularizer(other))
    with refused(kp.KfacpackError, tmp_path / "nowhere" / "t.safetensors", "no writable folder"):
        job().run(tmp_path / "nowhere" / "t.safetensors")
    wide = toy_model()
    function = wide.function.model_copy(update={"normalized": True})
    with refused(kp.KfacpackError, "input 1", "different f", "embedding of width 6; normalised embedding of width 6"):
        job(model=replace(wide, function=function), regularizer=kp.Regularizer(other))


def test_a_full_disk_keeps_the_stored_state(tmp_path, monkeypatch):
    with pytest.raises(Interrupted):
        job().run(tmp_path / "t.safetensors", stopped=lambda: True)
    before = (tmp_path / "t.safetensors.partial").read_bytes()

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with refused(kp.KfacpackError, "t.safetensors.partial: cannot save", "No space left"):
        job().run(tmp_path / "t.safetensors", resume=True, every=0.0)
    assert (tmp_path / "t.safetensors.partial").read_bytes() == before
    monkeypatch.undo()
    job().run(tmp_path / "t.safetensors", resume=True)
    assert kp.TaskVector.load(tmp_path / "t.safetensors").tasks == ("toy",)
