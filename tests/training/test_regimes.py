"""Outputs and gradients of each regime equal those of plain torch."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call, jvp
from toys import ToyTask, toy_model

import kfacpack as kp
from kfacpack.training.data_penalty import DataPenalty
from kfacpack.training.regimes import REGIMES


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.fixture(scope="module")
def batch(model):
    split = ToyTask().split("train")
    return model.prepare([split[n] for n in range(7)], "toy")


def plain(model, name, batch, tau):
    """Returns f at τ, computed by plain torch, with a graph to τ."""
    theta = {key: model.module.state_dict()[key] for key in tau}

    def at(moved):
        return functional_call(model.module, moved, (batch,))

    if name == "linear":
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                f, change = jvp(at, (theta,), (tau,))
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        return f + change
    return at({key: theta[key] + tau[key] for key in tau})


@pytest.mark.parametrize("name", list(REGIMES))
def test_f_and_its_gradient_are_those_of_autograd(model, batch, name):
    regime = REGIMES[name](model)
    generator = torch.Generator().manual_seed(3)
    tau = {
        key: 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        for key, parameter in regime.parameters.items()
    }
    moved = regime.forward(batch, tau)
    leaves = {key: value.clone().requires_grad_() for key, value in tau.items()}
    expected = plain(model, name, batch, leaves)
    torch.testing.assert_close(moved.f, expected.detach(), rtol=1e-9, atol=1e-12)
    u = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    wanted = torch.autograd.grad(expected, list(leaves.values()), u)
    start = {key: torch.ones_like(value) for key, value in tau.items()}
    moved.add_gradient(u, start)
    for actual, gradient in zip(start.values(), wanted, strict=True):
        torch.testing.assert_close(actual, 1 + gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", list(REGIMES))
def test_the_model_is_not_modified(model, batch, name):
    before = {key: value.clone() for key, value in model.module.state_dict().items()}
    flags = [parameter.requires_grad for parameter in model.module.parameters()]
    regime = REGIMES[name](model)
    regime.forward(batch, {key: torch.ones_like(parameter) for key, parameter in regime.parameters.items()})
    assert all(torch.equal(before[key], value) for key, value in model.module.state_dict().items())
    assert flags == [parameter.requires_grad for parameter in model.module.parameters()]


def test_attention_trains_attention_layers_only(model):
    assert list(REGIMES["attention"](model).parameters) == [
        "attn.in_proj_weight",
        "attn.in_proj_bias",
        "attn.out_proj.weight",
        "attn.out_proj.bias",
    ]
    assert len(REGIMES["attention"](kp.load_model("tiny")).parameters) == 16
    assert list(REGIMES["attention"](model, ["mlp.*"]).parameters) == ["mlp.weight", "mlp.bias"]


@pytest.mark.parametrize(
    ("name", "moves"),
    [
        ("blocks.0.attn.qkv.weight", True),
        ("encoder.block.0.layer.0.SelfAttention.q.weight", True),
        ("decoder.block.0.layer.1.EncDecAttention.v.weight", True),
        ("encoder.layer.0.attention.self.query.weight", True),
        ("encoder.layer.0.attention.output.LayerNorm.weight", False),
        ("encoder.block.0.layer.0.layer_norm.weight", False),
        ("blocks.0.mlp.fc1.weight", False),
        ("attn_pool.probe", True),
    ],
)
def test_names_of_attention_parameters(name, moves):
    from kfacpack.training.regimes import ATTENTION, NORM

    assert bool(ATTENTION.search(name) and not NORM.search(name)) == moves


@pytest.mark.parametrize("name", ["linear", "full"])
def test_the_data_penalty_is_the_squared_change_of_f(model, name):
    """Over one epoch: λ Σ w ‖Δf‖², and its gradient by autograd."""
    regime = REGIMES[name](model)
    generator = torch.Generator().manual_seed(5)
    tau = {
        key: 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        for key, parameter in regime.parameters.items()
    }
    task = ToyTask("other", seed=1, size=8)
    drift = DataPenalty([task], 2.0, batch_size=8, seed=0)
    gradients = {key: torch.zeros_like(value) for key, value in tau.items()}
    value = drift.add_grad(0, regime, tau, gradients)
    split = task.split("train")
    batch = model.prepare([split[n] for n in range(8)], "other")
    leaves = {key: value.clone().requires_grad_() for key, value in tau.items()}
    change = plain(model, name, batch, leaves) - model.module(batch).detach()
    expected = 2.0 * change.square().sum() / 8
    torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-6, atol=0)
    for gradient, wanted in zip(gradients.values(), torch.autograd.grad(expected, list(leaves.values())), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-9)


def test_the_data_penalty_weights_tasks_by_their_sizes(model):
    regime = REGIMES["linear"](model)
    tau = {key: 0.1 * torch.ones_like(parameter) for key, parameter in regime.parameters.items()}
    tasks = [ToyTask("large", seed=1, size=24), ToyTask("small", seed=2, size=8)]
    many = DataPenalty(tasks, 1.0, batch_size=8, seed=0)
    single_penalties = [DataPenalty([task], 1.0, batch_size=task.size, seed=0) for task in tasks]
    nothing = {key: torch.zeros_like(value) for key, value in tau.items()}
    mean = sum(float(many.add_grad(step, regime, tau, dict(nothing))) for step in range(400)) / 400
    large, small = (float(one.add_grad(0, regime, tau, dict(nothing))) for one in single_penalties)
    # w = T λ: 1.5 and 0.5.
    assert mean == pytest.approx(1.5 * large + 0.5 * small, rel=0.1)
