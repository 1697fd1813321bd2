"""The penalty is relative to the scale of f: multiplying f by a constant does not change the trained vector."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import pytest
import torch
from kit import of_task, random_tau, refused, small_curvature
from toys import ToyTask, toy_model

import kfacpack as kp
from kfacpack.format.manifest import OutputScale
from kfacpack.training.data_penalty import DataPenalty
from kfacpack.training.metrics import Metrics, PenaltyWarning, metrics_path, penalty_problem
from kfacpack.training.optimizer import TrainingSettings
from kfacpack.training.regimes import REGIMES
from kfacpack.training.regularizer import OutputScaleWarning
from kfacpack.training.trainer import Trainer

SETTINGS = TrainingSettings(steps=12, batch_size=10)
CONSTANTS = [1e-3, 37.0, 1e4]


def scaled_model(constant):
    model = toy_model()
    return replace(model, forward=lambda x: constant * model.forward(x))


def bundle_of(model, task, **more):
    split = task.split("train")
    batch = model.prepare([split[n] for n in range(len(split))], task.name)
    source = kp.Source(task=task.name, dataset_size=len(split))
    return kp.estimate(model, [batch], source=source, **more)


def trained(model, path, penalty, regime="linear"):
    task, others = ToyTask(), [ToyTask("other", seed=5), ToyTask("third", seed=7)]
    more = {}
    if penalty == "bundles":
        more["regularizer"] = kp.Regularizer([bundle_of(model, other) for other in others])
    elif penalty == "data":
        more["data_penalty"] = DataPenalty(others, None, SETTINGS.batch_size, 0)
    job = Trainer(REGIMES[regime](model), task, kp.head_for(model, task), SETTINGS, **more)
    return job.run(path), job


@pytest.mark.filterwarnings("ignore::kfacpack.training.metrics.PenaltyWarning")
@pytest.mark.parametrize("penalty", ["none", "bundles", "data"])
@pytest.mark.parametrize("regime", ["linear", "full"])
@pytest.mark.parametrize("constant", CONSTANTS)
def test_a_constant_times_f_gives_the_same_vector(constant, penalty, regime, tmp_path):
    """With defaults for λ, the learning rate and the head."""
    plain, plain_job = trained(toy_model(), tmp_path / "plain.safetensors", penalty, regime)
    scaled, scaled_job = trained(scaled_model(constant), tmp_path / "scaled.safetensors", penalty, regime)
    assert scaled_job.lr == plain_job.lr
    for name in plain:
        torch.testing.assert_close(scaled[name], plain[name], rtol=1e-4, atol=1e-7)


def test_an_estimate_records_the_scale_of_f():
    model = toy_model()
    split = ToyTask().split("train")
    x = model.prepare([split[n] for n in range(len(split))], "toy")
    f = model.forward(x).detach()
    expected = {
        "mean_square": float(f.square().sum(1).mean()),
        "variance": float(f.var(0).sum()),
    }
    for parts in (1, 4, len(x)):
        scale = kp.estimate(model, list(x.chunk(parts))).about.output_scale
        assert scale.model_dump() == pytest.approx(expected, rel=1e-5)
    single = kp.estimate(model, [x[:1]]).about.output_scale
    assert single.variance == 0
    assert single.mean_square == pytest.approx(float(f[0].square().sum()), rel=1e-5)


def with_scale(curvature, scale, normalized=False):
    function = curvature.about.function.model_copy(update={"normalized": normalized})
    about = curvature.about.model_copy(update={"output_scale": scale, "function": function})
    return kp.Curvature(curvature.blocks, about)


def task_with(name, seed, mean_square, variance):
    return with_scale(of_task(name, seed=seed), OutputScale(mean_square=mean_square, variance=variance))


@pytest.mark.parametrize("rule", ["tak", "optimal", "stack"])
def test_merging_and_subtracting_carry_the_record(rule, tmp_path):
    one, two = task_with("one", 1, 600.0, 20.0), task_with("two", 2, 300.0, 5.0)
    sizes = [curvature.about.source.dataset_size for curvature in (one, two)]
    merged = kp.merge([one, two], rule, weights=[1, 3])
    assert merged.about.output_scale.mean_square == pytest.approx((600 + 3 * 300) / 4)
    assert merged.about.output_scale.variance == pytest.approx((20 + 3 * 5) / 4)
    by_size = kp.merge([one, two], rule).about.output_scale
    assert by_size.variance == pytest.approx((20 * sizes[0] + 5 * sizes[1]) / sum(sizes))
    merged.save(tmp_path / "merged.kfac")
    assert kp.load(tmp_path / "merged.kfac").about.output_scale == merged.about.output_scale
    if rule == "tak":
        rest = kp.merge([kp.load(tmp_path / "merged.kfac"), one], without="one")
        assert rest.about.output_scale.variance == pytest.approx(5.0)
        assert rest.about.output_scale.mean_square == pytest.approx(300.0)
    assert kp.compress(merged, "block:2+int8").about.output_scale == merged.about.output_scale
    unknown = with_scale(of_task("three", seed=3), None)
    assert kp.merge([one, unknown], rule).about.output_scale is None


def test_shards_have_the_scale_of_the_whole():
    model, task = toy_model(), ToyTask()
    split = task.split("train")
    x = model.prepare([split[n] for n in range(len(split))], task.name)
    source = kp.Source(task="toy", dataset_size=len(x))
    whole = kp.estimate(model, [x], source=source, fisher="exact").about.output_scale
    shards = [kp.estimate(model, [part], source=source, fisher="exact") for part in (x[:12], x[12:])]
    joined = kp.merge(shards, "shards").about.output_scale
    assert joined.mean_square == pytest.approx(whole.mean_square, rel=1e-5)
    assert joined.variance == pytest.approx(whole.variance, rel=0.1)


def test_several_bundles_have_the_scale_of_their_merge():
    one, two = task_with("one", 1, 600.0, 20.0), task_with("two", 2, 300.0, 5.0)
    tau = random_tau(one, dtype=torch.float64)
    separate = kp.Regularizer([one, two], 2.0)
    together = kp.Regularizer(kp.merge([one, two], "stack", weights=[1, 1]), 2.0)
    assert separate.output_scale == together.output_scale == 12.5
    torch.testing.assert_close(separate.value(tau), together.value(tau))
    expected = 2.0 / 12.5 * (one.quadratic(tau) + two.quadratic(tau))
    torch.testing.assert_close(separate.value(tau), expected)
    assert separate.settings["output_scale"] == 12.5


def test_an_almost_constant_f_has_a_reference():
    """The variance has a lower limit, relative to the mean square."""
    assert OutputScale(mean_square=600.0, variance=20.0).reference == 20.0
    assert OutputScale(mean_square=600.0, variance=0.0).reference == pytest.approx(0.6)
    assert kp.Regularizer(task_with("one", 1, 600.0, 0.0), 2.0).output_scale == pytest.approx(0.6)


def test_without_a_record_the_penalty_is_not_scaled():
    plain = small_curvature("packed")
    tau = random_tau(plain, dtype=torch.float64)
    with pytest.warns(OutputScaleWarning):
        regularizer = kp.Regularizer(with_scale(plain, None), 2.0)
    torch.testing.assert_close(regularizer.value(tau), 2.0 * plain.quadratic(tau))
    with pytest.warns(OutputScaleWarning):
        mixed = kp.Regularizer([task_with("one", 1, 600.0, 20.0), with_scale(of_task("two", seed=2), None)], 2.0)
    assert mixed.output_scale == 20.0


def test_a_normalised_f_and_presets_are_not_scaled():
    plain = small_curvature("packed")
    tau = random_tau(plain, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scale = OutputScale(mean_square=0.9999, variance=0.4)
        for curvature in (plain, with_scale(plain, scale, normalized=True)):
            regularizer = kp.Regularizer(curvature, 2.0)
            assert regularizer.output_scale == 1.0
            assert "output_scale" not in regularizer.settings
            torch.testing.assert_close(regularizer.value(tau), 2.0 * plain.quadratic(tau))
    model = toy_model()
    curvature = bundle_of(model, ToyTask())
    assert kp.Regularizer(curvature, 2.0, preset="tak").output_scale == 1.0


def steps(losses, penalties):
    return [
        Metrics(k + 1, loss, 0.5, penalty, 0.1) for k, (loss, penalty) in enumerate(zip(losses, penalties, strict=True))
    ]


def test_a_penalty_that_is_too_strong_is_detected():
    """The message contains the λ at which penalty and loss of the first steps would be equal."""
    falling = [1.0 - 0.02 * k for k in range(40)]
    assert penalty_problem(steps(falling, [0.0] + 39 * [0.1]), 80.0) is None
    problem = penalty_problem(steps([1.0] * 40, [0.0] + 39 * [20.0]), 80.0)
    assert "λ = 4" in problem
    assert penalty_problem(steps([1.0] * 40, [0.0] + 39 * [0.1]), 80.0) is not None
    assert penalty_problem(steps([1.0] * 40, [0.0] * 40), 80.0) is None
    assert penalty_problem(steps([0.07] + [0.1] * 39, [0.0] + 39 * [0.05]), 80.0) is None  # solved from the start
    assert penalty_problem(steps([1.0] * 40, [None] * 40), 80.0) is None
    assert penalty_problem(steps([1.0] * 5, [9.0] * 5), 80.0) is None


@pytest.mark.parametrize("stop", [None, 6])
def test_a_penalty_that_is_too_strong_is_reported_after_the_run(stop, tmp_path):
    """Steps before an interruption count as well."""
    from kfacpack.estimation.resume import Interrupted

    model, output = toy_model(), tmp_path / "t.safetensors"
    regularizer = kp.Regularizer(bundle_of(model, ToyTask("other", seed=5)), 1e6)
    job = Trainer(REGIMES["linear"](model), ToyTask(), kp.head_for(model, ToyTask()), SETTINGS, regularizer)
    if stop:
        with pytest.raises(Interrupted), warnings.catch_warnings():
            warnings.simplefilter("error")
            job.run(output, stopped=lambda: len(metrics_path(output).read_text().splitlines()) >= stop)
    with pytest.warns(PenaltyWarning):
        job.run(output, resume=bool(stop))


def test_a_negative_penalty_stops_training(tmp_path):
    """A factor with a negative eigenvalue, as rounding may cause: the penalty has no minimum."""
    model, output = toy_model(), tmp_path / "t.safetensors"
    curvature = bundle_of(model, ToyTask("other", seed=5))
    blocks = list(curvature.blocks)
    position, block = next((k, block) for k, block in enumerate(blocks) if isinstance(block.structure, kp.Kronecker))
    ((B, A, _),) = block.structure.terms
    indefinite = kp.Packed.from_dense(-B.dense(torch.float32), psd=False)
    blocks[position] = replace(block, structure=kp.Kronecker.of(indefinite, A))
    regularizer = kp.Regularizer(kp.Curvature(blocks, curvature.about), 1e4)
    job = Trainer(REGIMES["linear"](model), ToyTask(), kp.head_for(model, ToyTask()), SETTINGS, regularizer)
    with refused(kp.KfacpackError, "the penalty is negative", "int8", "svd:R"):
        job.run(output)
    assert not output.exists()
    assert all(json.loads(line)["penalty"] >= -0.01 for line in metrics_path(output).read_text().splitlines())
