"""Using `kp.linearize`: flags, precisions, subsets of parameters, gradients by hand, and errors."""

from __future__ import annotations

import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from estimation.nets import TextEncoder, Transformer, images, mlp, seeded, sentences, vectors
from kit import refused, warned
from linearization.jvp_reference import assert_exact, assert_near, cost, jvp_and_gradient, random_tau
from torch import nn

import kfacpack as kp
from kfacpack.linearization.jvp_mode import TangentMap
from kfacpack.linearization.linearize import SlowLinearizationWarning


def flags(model):
    return [(m.training) for m in model.modules()], [p.requires_grad for p in model.parameters()]


def test_the_model_is_restored():
    model = seeded(TextEncoder)
    model.head.bias.requires_grad_(False)
    model.layer.eval()
    before = flags(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    fast = torch.backends.mha.get_fastpath_enabled()
    lin = kp.linearize(model)
    tau = random_tau(lin)
    cost(lin(sentences(), tau)).backward()
    assert flags(model) == before
    assert all(parameter.grad is None for parameter in model.parameters())
    with refused(kp.KfacpackError, "cannot be called", "'attention_mask'"):
        lin({"input_ids": sentences()["input_ids"]}, tau)
    with pytest.raises(IndexError):
        lin({**sentences(), "input_ids": torch.full((7, 6), 99)}, tau)
    assert flags(model) == before
    assert torch.backends.mha.get_fastpath_enabled() == fast
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.is_grad_enabled()
    cost(lin(sentences(), tau)).backward()


def test_dropout_is_off():
    model = seeded(TextEncoder).train()
    lin = kp.linearize(model)
    tau = random_tau(lin)
    assert torch.equal(lin(sentences(), tau), lin(sentences(), tau))


def test_threads_may_share_a_model():
    """Dropout stays off until the last thread has finished, and is restored then."""

    class Slow(nn.Module):
        def forward(self, x):
            time.sleep(0.02)
            return x

    model = nn.Sequential(nn.Linear(5, 6), Slow(), nn.Dropout(), nn.Linear(6, 3)).double().train()
    lin = kp.linearize(model)
    tau = random_tau(lin)
    expected = lin(vectors(5), tau).detach()
    with ThreadPoolExecutor(3) as pool:
        for output in pool.map(lambda _: sum(lin.outputs(vectors(5), tau)), range(6)):
            assert torch.equal(output, expected)
    assert all(module.training for module in model.modules())


def test_params_are_chosen_as_in_an_estimate():
    model = seeded(Transformer)
    x = images(3)
    assert kp.linearize(model).parameters == kp.estimate(model, [x]).parameters
    some = kp.linearize(model, ["attn.*", "proj"])
    assert some.parameters == kp.estimate(model, [x], params=["attn.*", "proj"]).parameters
    assert_exact(model, x, params=["attn.*", "proj"])
    with refused(kp.KfacpackError, "no parameter", "'nothing'"):
        kp.linearize(model, "nothing")


def test_parameters_missing_from_tau_count_as_zero():
    model = seeded(Transformer)
    lin, x = kp.linearize(model), images(3)
    tau = random_tau(lin)
    few = {name: value for name, value in tau.items() if name.startswith("up.")}
    padded = {name: value if name in few else torch.zeros_like(value) for name, value in tau.items()}
    out = lin(x, few)
    torch.testing.assert_close(out, lin(x, padded), rtol=1e-9, atol=1e-9)
    assert set(lin.at(x, few).gradient(torch.ones_like(out))) == set(few)


def test_tensors_tuples_and_dicts_are_batches():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(5, 3).double(), nn.Linear(5, 3).double()

        def forward(self, a, b):
            return self.one(a) * self.two(b)

    model, x = seeded(Two), vectors(5)
    assert_exact(model, (x, x + 1))
    lin = kp.linearize(model)
    tau = random_tau(lin)
    assert torch.equal(lin((x, x + 1), tau), lin({"b": x + 1, "a": x}, tau))
    twice = kp.linearize(model, forward=lambda a: 2 * model(a, a))
    torch.testing.assert_close(twice(x, tau), 2 * lin((x, x), tau))


def test_gradients_are_accumulated_into_the_callers_tensors():
    model, x = seeded(mlp), vectors(5)
    lin = kp.linearize(model)
    tau = random_tau(lin)
    whole = lin.at(x, tau).gradient(torch.ones(7, 3, dtype=torch.float64))
    sums = {name: torch.zeros_like(value) for name, value in whole.items()}
    places = {name: value.data_ptr() for name, value in sums.items()}
    for part in x.split(3):
        assert lin.at(part, tau).gradient(torch.ones(len(part), 3, dtype=torch.float64), into=sums) is sums
    for name, value in whole.items():
        torch.testing.assert_close(sums[name], value)
        assert sums[name].data_ptr() == places[name]


def test_a_second_backward_pass_needs_retain_graph():
    lin, x = kp.linearize(seeded(mlp)), vectors(5)
    tau = random_tau(lin)
    value = cost(lin(x, tau))
    first = torch.autograd.grad(value, list(tau.values()), retain_graph=True)
    second = torch.autograd.grad(value, list(tau.values()))
    assert all(map(torch.equal, first, second))
    with refused(RuntimeError, "second time"):
        torch.autograd.grad(value, list(tau.values()))
    point = lin.at(x, tau)
    u = torch.ones_like(point.f)
    first, second = point.gradient(u, retain_graph=True), point.gradient(u)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_gradients_are_computed_only_where_required():
    lin, x = kp.linearize(seeded(mlp)), vectors(5)
    tau = random_tau(lin)
    tau["0.weight"].requires_grad_(False)
    cost(lin(x, tau)).backward()
    assert tau["0.weight"].grad is None
    assert tau["2.weight"].grad is not None
    with torch.no_grad():
        assert not lin(x, tau).requires_grad


@pytest.mark.parametrize("inside", [torch.no_grad, torch.inference_mode])
def test_no_grad_and_inference_mode(inside):
    lin = kp.linearize(seeded(TextEncoder))
    tau = random_tau(lin)
    expected = lin(sentences(), tau).detach()
    with inside():
        batch = {name: value.clone() for name, value in sentences().items()}
        torch.testing.assert_close(lin(batch, tau), expected, rtol=1e-9, atol=1e-9)
        f, change = lin.outputs(batch, tau)
    torch.testing.assert_close(f + change, expected, rtol=1e-9, atol=1e-9)


def test_the_input_may_have_its_own_graph():
    model, x = seeded(mlp), vectors(5)
    lin = kp.linearize(model)
    tau = random_tau(lin)
    inputs = x.clone().requires_grad_()
    torch.testing.assert_close(lin(2 * inputs / 2, tau), lin(x, tau))
    cost(lin(2 * inputs / 2, tau)).backward()
    assert inputs.grad is None


def test_a_compiled_model():
    model, x = seeded(mlp), vectors(5)
    tau = random_tau(kp.linearize(model))
    compiled = kp.linearize(model, forward=torch.compile(model, backend="eager"))
    torch.testing.assert_close(compiled(x, tau), kp.linearize(model)(x, tau))


def test_autocast():
    """Twice in one context, where casts of parameters are kept for the next call."""
    model = seeded(Transformer).float()
    lin, x = kp.linearize(model), images(4).float()
    taus = [random_tau(lin, seed=seed) for seed in (1, 2)]
    expected = [lin.outputs(x, tau)[1] for tau in taus]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x)
        for tau, exact in zip(taus, expected, strict=True):
            assert_near(lin.outputs(x, tau)[1].float(), exact, 0.1, "change")
            out = lin(x, tau)
            cost(out.float()).backward()
            assert all(value.grad.dtype == torch.float32 and value.grad.isfinite().all() for value in tau.values())
    reference = random_tau(lin, seed=2)
    cost(lin(x, reference)).backward()
    for name, value in reference.items():
        assert_near(taus[1][name].grad, value.grad, 0.3, name)


def test_half_precision_parameters_take_a_float32_tau():
    model = seeded(mlp).bfloat16()
    lin, x = kp.linearize(model), vectors(5).bfloat16()
    assert {value.dtype for value in lin.zeros().values()} == {torch.float32}
    tau = random_tau(lin)
    cost(lin(x, tau).float()).backward()
    assert {value.grad.dtype for value in tau.values()} == {torch.float32}
    _, change, gradients = jvp_and_gradient(model, model, x, tau)
    assert_near(lin.outputs(x, tau)[1], change, 0.03, "change")
    for name, value in tau.items():
        assert_near(value.grad, gradients[name], 0.1, name)


def test_tangents_are_freed_with_their_tensors():
    """Autograd keeps activations for the backward pass. Keeping their tangents as well would double the memory."""
    tangents = []

    class Watched(TangentMap):
        def put(self, tensor, tangent):
            tangents.append(weakref.ref(tangent))
            super().put(tensor, tangent)

    model = nn.Sequential(*[layer for _ in range(10) for layer in (nn.Linear(5, 5), nn.Tanh())]).double()
    lin = kp.linearize(model)
    tau = random_tau(lin)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kfacpack.linearization.linearize.TangentMap", Watched)
        point = lin.at(vectors(5), tau)
    gc.collect()
    assert len(tangents) >= 30
    assert [reference() for reference in tangents if reference() is not None] == [point.change]


@pytest.mark.parametrize(
    ("tau", "message"),
    [
        ({"0.wieght": torch.zeros(6, 5)}, "did you mean '0.weight'"),
        ({"0.weight": torch.zeros(5, 6)}, r"expected a floating-point tensor of shape \[6, 5\]"),
        ({"0.weight": torch.zeros(6, 5).int()}, "expected a floating-point tensor"),
        ({}, "empty"),
        ([], "mapping"),
    ],
)
def test_a_tau_that_does_not_fit_is_refused(tau, message):
    lin = kp.linearize(seeded(mlp))
    for call in (lin, lin.at, lin.outputs):
        with pytest.raises(kp.TaskVectorError, match=message):
            call(vectors(5), tau)


class Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(np.tanh(x.numpy(force=True)))

    @staticmethod
    def backward(ctx, u):
        return u


class Using(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 4, dtype=torch.float64))
        self.function = function

    def forward(self, x):
        return self.function(x @ self.w)


def bag(h):
    return nn.functional.embedding_bag(torch.zeros(3, 2, dtype=torch.long), h[:, :4])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda h: 2 * Cut.apply(h), "custom autograd function 'Cut'"),
        (Cut.apply, "custom autograd function 'Cut'"),
        (lambda h: 2 * Cut.apply(h).flatten().view_as(h), "custom autograd function 'Cut'"),
        (bag, "no forward-mode derivative of aten._embedding_bag"),
        (lambda h: torch.complex(h, h).abs() + torch.view_as_real(torch.complex(h, h))[..., 0], "complex"),
    ],
)
def test_unsupported_operations_are_named(function, message):
    model = Using(function)
    lin = kp.linearize(model)
    with pytest.raises(kp.KfacpackError, match=message):
        lin(vectors(5), random_tau(lin))


def test_weights_changed_before_the_backward_pass_are_detected():
    model = seeded(mlp)
    lin = kp.linearize(model)
    out = lin(vectors(5), random_tau(lin))
    with torch.no_grad():
        model[2].weight.mul_(2)
    with refused(kp.KfacpackError, "modified in place"):
        out.sum().backward()


def test_an_empty_batch_is_refused():
    lin, encoder = kp.linearize(seeded(mlp)), kp.linearize(seeded(TextEncoder))
    for one, batch in ((lin, vectors(5)[:0]), (encoder, {name: value[:0] for name, value in sentences().items()})):
        with refused(kp.KfacpackError, "batch is empty"):
            one(batch, one.zeros())


@pytest.fixture
def without_private_parts(monkeypatch):
    """Emulates a torch without the private parts that the fast path needs; using the fast path is an error."""

    def fail(*args):
        raise AssertionError("the fast path was used")

    monkeypatch.setattr("kfacpack._torch.missing_jvp_parts", lambda: ("torch._C._DisableAutocast",))
    monkeypatch.setattr("kfacpack.linearization.linearize.JvpMode", fail)


FALLBACKS = {
    "mlp": (mlp, vectors(5)),
    "attention": (Transformer, images(3)),
    "masked text, as a dict": (TextEncoder, sentences()),
}


@pytest.mark.parametrize("case", FALLBACKS)
def test_jvp_without_torchs_private_parts_gives_the_same(case, request):
    make, batch = FALLBACKS[case]
    model = seeded(make)
    before = flags(model)
    fast = kp.linearize(model)
    tau = random_tau(fast)
    expected = fast.outputs(batch, tau)
    gradients = torch.autograd.grad(cost(fast(batch, tau)), list(tau.values()))
    request.getfixturevalue("without_private_parts")
    with warned(SlowLinearizationWarning, "torch._C._DisableAutocast", torch.__version__):
        slow = kp.linearize(model)
    for output, value in zip(slow.outputs(batch, tau), expected, strict=True):
        torch.testing.assert_close(output, value, rtol=1e-9, atol=1e-9)
        assert not output.requires_grad
    out = slow(batch, tau)
    for again in (True, False):
        gradients_at_tau = torch.autograd.grad(cost(out), list(tau.values()), retain_graph=again)
        for gradient, value in zip(gradients_at_tau, gradients, strict=True):
            torch.testing.assert_close(gradient, value, rtol=1e-9, atol=1e-9)
    point = slow.at(batch, tau)
    assert not point.change.requires_grad
    by_hand = point.gradient(torch.func.grad(cost)(point.f + point.change), into={})
    for name, value in zip(tau, gradients, strict=True):
        torch.testing.assert_close(by_hand[name], value, rtol=1e-9, atol=1e-9)
    assert flags(model) == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_subsets_and_tied_weights_without_torchs_private_parts(without_private_parts):
    tied = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)).double()
    tied[2].weight = tied[0].weight
    with warned(SlowLinearizationWarning, "torch._C._DisableAutocast"):
        lin = kp.linearize(tied, ["0.*"])
    with torch.no_grad():
        tau = {name: value.double() for name, value in random_tau(lin).items()}
    x = vectors(5)
    step = 1e-6
    moved = {name: value.detach().clone() for name, value in tied.state_dict().items()}
    moved["0.weight"] = moved["2.weight"] = moved["0.weight"] + step * tau["0.weight"]
    moved["0.bias"] += step * tau["0.bias"]
    f, change = lin.outputs(x, tau)
    expected = (torch.func.functional_call(tied, moved, (x,)) - f).detach() / step
    torch.testing.assert_close(change, expected, rtol=1e-4, atol=1e-5)
