"""Training loops in `examples`: the penalty lowers the drift on the other task, and the trained task is learnt."""

from __future__ import annotations

import importlib

import pytest
import torch
from kit import dense_block

import kfacpack as kp
from kfacpack.curvature.blocks import gather


@pytest.mark.parametrize(
    ("name", "most"), [("loop_pytorch", 0.5), ("loop_accelerate", 0.5), ("loop_trainer", 0.7), ("loop_peft", 0.7)]
)
def test_the_penalty_lowers_the_drift(name, most, capsys):
    results = importlib.import_module(name).main()
    printed = capsys.readouterr().out
    for free in (key for key in results if "without" in key):
        penalised = free.replace("without", "with the penalty")
        assert results[penalised]["drift"] < most * results[free]["drift"]
        assert results[penalised]["loss"] < 1.5
        assert free in printed
        assert penalised in printed


def test_a_lora_has_the_gradient_of_the_dense_form():
    """Compares with autograd of the form that is built from dense Kronecker products of random factors."""
    example = importlib.import_module("loop_peft")
    model = example.classifier()
    weather = example.encoded(example.WEATHER[:6])
    bundle = kp.estimate(
        model,
        [weather],
        params=["bert.encoder.layer.1.attention.*.weight"],
        forward=lambda **batch: example.embedding(model, batch),
    )
    config = example.LoraConfig(r=3, lora_alpha=5, target_modules=["query", "value", "attention.output.dense"])
    lora = example.get_peft_model(model, config)
    factors = {name: parameter for name, parameter in lora.named_parameters() if parameter.requires_grad}
    generator = torch.Generator().manual_seed(0)
    for parameter in factors.values():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    tau = example.changes(lora)
    assert {name for name in tau if "layer.1" in name} == {
        f"bert.encoder.layer.1.attention.{part}.weight" for part in ("self.query", "self.value", "output.dense")
    }

    regularizer = kp.Regularizer(bundle, strength=0.7)
    value = regularizer.loss(tau)
    gradients = torch.autograd.grad(value, list(factors.values()), allow_unused=True)

    shapes = {p.name: p.shape for p in bundle.about.base.parameters}
    exact = torch.zeros((), dtype=torch.float64)
    for block in bundle.blocks:
        if any(name in tau for name in block.parameters):
            # s B A by hand, not with the code of peft.
            delta = {name: scaled(lora, name) for name in block.parameters if name in tau}
            x = gather(delta, block.join, shapes).reshape(-1)
            exact = exact + 0.7 / regularizer.output_scale * (x @ dense_block(block) @ x)
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=0)
    expected = torch.autograd.grad(exact, list(factors.values()), allow_unused=True)
    for name, ours, true in zip(factors, gradients, expected, strict=True):
        assert (ours is not None and bool(ours.any())) == ("layer.1.attention" in name)
        if true is not None:
            torch.testing.assert_close(ours, true, rtol=1e-5, atol=1e-5 * float(true.abs().max()))


def scaled(lora, name):
    layer = lora.get_base_model().get_submodule(name.removesuffix(".weight"))
    return 5 / 3 * (layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double())
