"""The penalty in every form, and training in every regime, on a device as on the CPU."""

from __future__ import annotations

import pytest
import torch
from devices.conftest import assert_same, model_on
from kit import MATRIX_FORMS, of_task, random_psd, random_tau, small_curvature
from toys import ToyTask

import kfacpack as kp

STEPS = {"steps": 3, "batch_size": 8, "lr": 0.01}


def change_of_outputs(vector):
    """Returns J τ on examples of the task, which leaves out directions without influence on f, such as key biases."""
    model = model_on("cpu")
    return kp.linearize(model).outputs(ToyTask().split("test").x.float(), dict(vector))[1]


def moved(tensors, device):
    return {name: tensor.to(device) for name, tensor in tensors.items()}


@pytest.mark.parametrize("stored_as", MATRIX_FORMS)
@pytest.mark.parametrize("offload", [False, True])
def test_the_penalty_in_every_form(device, stored_as, offload):
    """The curvature has Kronecker blocks with one and with several terms, dense and diagonal blocks."""
    curvature = small_curvature(stored_as)
    tau = random_tau(curvature)
    expected_grads: dict[str, torch.Tensor] = {}
    expected = kp.Regularizer(curvature, 3.0).add_grad(tau, expected_grads)
    regularizer, grads = kp.Regularizer(curvature, 3.0, offload=offload), {}
    for _ in range(2):
        grads = {}
        value = regularizer.add_grad(moved(tau, device), grads)
    assert_same(value, expected, 1e-4)
    for name, gradient in expected_grads.items():
        assert grads[name].device.type == device.type
        assert_same(grads[name], gradient, 1e-4)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in moved(tau, device).items()}
    regularizer.loss(leaves).backward()
    for name, gradient in expected_grads.items():
        assert_same(leaves[name].grad, gradient, 1e-4)


@pytest.mark.parametrize("matrix", [
    kp.BlockDiagonal.from_dense(random_psd(41, 5), 8), kp.Sparse.from_dense(random_psd(41, 5), 0.01),
], ids=["uneven blocks", "few entries"])  # fmt: skip
def test_the_penalty_with_large_matrices(device, matrix):
    state = {"w": torch.randn(41, 41, generator=torch.Generator().manual_seed(0))}
    about = kp.About(
        base=kp.identify(state, ["w"], family="test", name="one"),
        function=kp.Function(output="other", normalized=True, width=41),
    )
    join = kp.Join(rows=41, columns=41, pieces=(kp.Piece(parameter="w"),))
    block = kp.CurvatureBlock("w", "linear", join, kp.Kronecker.of(matrix, kp.Dense.of(random_psd(41, 6))))
    curvature = kp.Curvature([block], about)
    for offload in (False, True):
        regularizer = kp.Regularizer(curvature, 1.0, offload=offload)
        assert_same(regularizer.value(moved(state, device)), kp.Regularizer(curvature, 1.0).value(state))


def test_the_penalty_of_several_bundles_and_a_merged_one(device):
    curvatures = [of_task("one", seed=1), of_task("two", seed=2, stored_as="block"), of_task("three", seed=3)]
    tau = random_tau(curvatures[0])
    for bundles in (curvatures, [kp.merge(curvatures)]):
        assert_same(kp.Regularizer(bundles, 2.0).value(moved(tau, device)), kp.Regularizer(bundles, 2.0).value(tau))


def test_a_curvature_on_the_device_applies_to_vectors_there(device):
    curvature = small_curvature("packed")
    tau = random_tau(curvature)
    resident = curvature.to(device)
    assert_same(resident.quadratic(moved(tau, device)), curvature.quadratic(tau))
    applied = resident.apply(moved(tau, device))
    for name, expected in curvature.apply(tau).items():
        assert_same(applied[name], expected)


@pytest.mark.parametrize("regime", ["linear", "full", "attention"])
@pytest.mark.parametrize(
    "settings", [{}, {"micro_batch_size": 3}, {"offload": True}], ids=["plain", "parts", "offload"]
)
def test_training_in_every_regime(pair, curvature_of_other, regime, settings):
    expected, actual = (
        kp.train(model, ToyTask(), reg=curvature_of_other, strength=2.0, regime=regime, **STEPS, **settings)
        for model in pair
    )
    assert_same(change_of_outputs(actual), change_of_outputs(expected), 1e-3)
    assert all(tensor.device.type == "cpu" for tensor in map(actual.__getitem__, actual))


@pytest.mark.parametrize("regime", ["linear", "full"])
def test_training_with_a_penalty_on_data(pair, regime):
    expected, actual = (
        kp.train(model, ToyTask(), reg_data=ToyTask("other", seed=5), regime=regime, **STEPS) for model in pair
    )
    assert_same(change_of_outputs(actual), change_of_outputs(expected), 1e-3)


@pytest.mark.parametrize("regime", ["linear", "full", "attention"])
def test_training_under_autocast(pair, curvature_of_other, regime):
    """bfloat16 rounds to 1/256, and AdamW enlarges the error of small gradients. τ stays float32."""
    expected, actual = (
        kp.train(model, ToyTask(), reg=curvature_of_other, regime=regime, autocast=autocast, **STEPS)
        for model, autocast in zip(pair, (False, True), strict=True)
    )
    assert all(actual[name].dtype == torch.float32 for name in actual)
    assert_same(change_of_outputs(actual), change_of_outputs(expected), 0.1)


def test_the_default_learning_rate_and_head(pair):
    """Both are derived from the model's outputs."""
    rates = []
    for model in pair:
        kp.train(model, ToyTask(), steps=1, batch_size=8, on_progress=lambda metrics, _: rates.append(metrics.lr))
    assert rates[0] == pytest.approx(rates[1], rel=1e-3)


def test_training_resumes(device, tmp_path, curvature_of_other):
    settings = {"reg": curvature_of_other, "output": tmp_path / "toy.safetensors", **STEPS}
    with pytest.raises(kp.Interrupted):
        kp.train(model_on(device), ToyTask(), stopped=lambda: True, **settings)
    resumed = kp.train(model_on(device), ToyTask(), resume=True, **settings)
    whole = kp.train(model_on(device), ToyTask(), reg=curvature_of_other, **STEPS)
    assert resumed.digest == whole.digest


def test_a_float64_model_is_trained(device, float64):
    expected, actual = (kp.train(model_on(where, torch.float64), ToyTask(), **STEPS) for where in ("cpu", device))
    assert_same(change_of_outputs(actual), change_of_outputs(expected), 1e-4)
