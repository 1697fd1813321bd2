"""Task vectors: arithmetic equals that of tensors, sums record their addends, other models are rejected."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from kit import refused
from torch import nn
from vectors.small_vectors import head, network, vector

import kfacpack as kp


def test_arithmetic_is_that_of_tensors():
    one, two = vector("one", 1), vector("two", 2)
    mixed = 0.5 * (one - two) + two * 2 - (-one)
    for name in one:
        torch.testing.assert_close(mixed[name], 1.5 * one[name] + 1.5 * two[name])
    torch.testing.assert_close(sum([one, two])["0.weight"], one["0.weight"] + two["0.weight"])
    assert mixed.parameters == tuple(name for name, _ in network().named_parameters())
    assert mixed.tasks == ("one", "two")
    assert set(mixed.heads) == {"one", "two"}
    assert "nothing" not in mixed
    with pytest.raises(KeyError):
        mixed["nothing"]
    with refused(kp.TaskVectorError, "multiplied by inf"):
        float("inf") * one
    with pytest.raises(TypeError):
        one + 3


@pytest.mark.parametrize("half", [0.5, np.float64(0.5), np.float32(0.5), np.float16(0.5), Fraction(1, 2)], ids=repr)
def test_real_numbers_of_any_type_can_be_factors(half):
    one = vector("one", 1)
    for halved in (half * one, one * half, one / 2, one / np.int64(2), one / (1 / half)):
        assert isinstance(halved, kp.TaskVector)
        assert torch.equal(halved["0.weight"], 0.5 * one["0.weight"])
        assert [type(addend.coefficient) for addend in halved.about.addends] == [float]
    for wrong in (np.ones(2), True, "2", 1j, np.bool_(True)):
        with pytest.raises(TypeError):
            wrong * one
        with pytest.raises(TypeError):
            one / wrong


def test_coefficients_that_are_too_large_are_rejected(tmp_path):
    one = vector("one", 1)
    for wrong, *facts in (
        (lambda: 10**400 * one, "multiplied", "too large"),
        (lambda: 1e30 * (1e30 * one), "coefficient would be 1e+60", "3.4e+38"),
        (lambda: 3e38 * one + 3e38 * one, "coefficient would be 6e+38"),
        (lambda: one / 0, "divided by 0"),
        (lambda: one / 1e-320, "coefficient would be inf"),
        (lambda: one / float("nan"), "divided by nan"),
    ):
        with refused(kp.TaskVectorError, *facts):
            wrong()
    base = one.about.model_copy(update={"addends": ({"sha256": "b" * 64, "coefficient": 1e30},)})
    with refused(kp.TaskVectorError, "coefficient would be 1e+60"):
        (1e30 * kp.TaskVector(dict(one), base)).save(tmp_path / "t.safetensors")
    assert not list(tmp_path.iterdir())


def test_sums_record_their_addends(tmp_path):
    one, two = vector("one", 1), vector("two", 2)
    (0.3 * one + 2 * two).save(tmp_path / "sum.safetensors")
    read = kp.TaskVector.load(tmp_path / "sum.safetensors")
    assert {a.sha256: a.coefficient for a in read.about.addends} == {one.digest: 0.3, two.digest: 2.0}
    again = -read + one
    addends = {a.sha256: (a.coefficient, a.tasks) for a in again.about.addends}
    assert addends == {one.digest: (0.7, ("one",)), two.digest: (-2.0, ("two",))}
    assert [task.training.seed for task in again.about.tasks] == [1, 2]
    assert one.about.addends == ()
    twice = vector("one", 1) + vector("one", 5)
    assert twice.about.tasks[0].training is None, "trained twice, not in one way"
    assert len(twice.about.addends) == 2


def test_a_curvature_accepts_a_vector():
    model = network()
    curvature = kp.estimate(model, [torch.randn(6, 4)])
    tau = vector()
    plain = {name: tau[name] for name in tau}
    assert torch.equal(curvature.quadratic(tau), curvature.quadratic(plain))
    assert torch.equal(kp.Regularizer(curvature).value(tau), kp.Regularizer(curvature).value(plain))


def test_apply():
    model, tau = network(), vector()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    edited = tau.apply(model)
    for name, value in edited.state_dict().items():
        torch.testing.assert_close(value, before[name] + tau[name])
        assert torch.equal(model.state_dict()[name], before[name]), "a copy was edited"
    state = tau.apply(dict(before))
    assert torch.equal(state["0.weight"], edited.state_dict()["0.weight"])
    with (-0.5 * tau).applied(model) as inside:
        assert inside is model
        torch.testing.assert_close(model[0].weight.detach(), before["0.weight"] - 0.5 * tau["0.weight"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert tau.apply(model, in_place=True) is model
    assert torch.equal(model[0].weight, edited[0].weight)
    with refused(kp.TaskVectorError, "'0.weight' has sha256", "first add them"):
        tau.apply(model)


def test_tied_weights_stay_tied():
    """Otherwise the old weight would be loaded over the new one under its second name."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    names = [name for name, _ in model.named_parameters()]
    base = kp.identify(model, names, family="test", name="tied")
    tensors = {name: torch.ones_like(model.state_dict()[name]) for name in names}
    tau = kp.TaskVector(tensors, vector().about.model_copy(update={"base": base}))
    before = model[0].weight.detach().clone()
    state = tau.apply(model.state_dict())
    assert torch.equal(model[0].weight, before), "a copy was edited"
    model.load_state_dict(state)
    assert torch.equal(model[1].weight, before + 1)
    assert state["1.weight"] is state["0.weight"]


def test_half_precision_is_rounded_once():
    model = network().bfloat16()
    base = kp.identify(model, list(model.state_dict()), family="test", name="half")
    tau = vector(base=0)
    small = kp.TaskVector({name: 1e-3 * tau[name] for name in tau}, tau.about.model_copy(update={"base": base}))
    edited = small.apply(model)
    expected = (model[0].weight.float() + small["0.weight"]).bfloat16()
    assert torch.equal(edited[0].weight, expected)


def test_models_with_other_weights_are_rejected():
    other = network()
    with torch.no_grad():
        other[1].bias[2] += 1
    with refused(kp.TaskVectorError, "trained from network 0", "parameter '1.bias'"):
        vector().apply(other)
    with refused(kp.TaskVectorError, "parameter '0.weight' is missing"):
        vector().apply(nn.Linear(2, 2))


def test_incompatible_vectors_cannot_be_added():
    one = vector("one")
    for other, *facts in (
        (vector("two", base=1), "base models (network 0 and network 1)", "'0.weight'"),
        (vector("two", regime="full"), "regimes: 'linear' and 'full'"),
        (vector("two", width=4), "normalised embedding of width 3; normalised embedding of width 4"),
    ):
        with refused(kp.TaskVectorError, *facts):
            one + other
    tensors = {name: value for name, value in one.items() if name != "2.bias"}
    base = kp.identify(network(), list(tensors), family="test", name="network 0")
    fewer = kp.TaskVector(tensors, one.about.model_copy(update={"base": base}))
    with refused(kp.TaskVectorError, "cover different parameters", "'2.bias'"):
        one + fewer


def test_heads_of_one_task_must_be_the_same():
    one = vector("toy")
    tensors = dict(one)
    for other, words in ((head(9), "weight tensors differ"), (head(3, classes=3), "2 and 3 classes")):
        with refused(kp.TaskVectorError, "toy", words):
            one + kp.TaskVector(tensors, one.about, {"toy": other})
    assert set((one + kp.TaskVector(tensors, one.about)).heads) == {"toy"}


def test_tensors_and_heads_must_match_the_base_model():
    one = vector()
    tensors = dict(one)
    with refused(kp.TaskVectorError, "'0.bias' is missing from both tensors"):
        kp.TaskVector({n: t for n, t in tensors.items() if n != "0.bias"}, one.about)
    with refused(kp.TaskVectorError, "'more' is missing from the base model's parameters"):
        kp.TaskVector({**tensors, "more": torch.ones(1)}, one.about)
    with refused(kp.TaskVectorError, "'0.bias': expected a floating-point tensor of shape [5]"):
        kp.TaskVector({**tensors, "0.bias": torch.ones(4)}, one.about)
    with refused(kp.TaskVectorError, "a head for 'other'", "toy"):
        kp.TaskVector(tensors, one.about, {"other": head(1)})
    wide = kp.Head(torch.ones(2, 9), torch.zeros(2), ("a", "b"), "text")
    with refused(kp.TaskVectorError, "head for 'toy'", "[2, 3] and [2]", "[2, 9]"):
        kp.TaskVector(tensors, one.about, {"toy": wide})
