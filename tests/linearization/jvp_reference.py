"""Reference implementation: f + J τ by `torch.func.jvp`, and the gradient by backpropagating through it."""

from __future__ import annotations

import os
import warnings

import torch
from torch import nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

import kfacpack as kp


class Called(nn.Module):
    """A module whose forward pass is f."""

    def __init__(self, module, forward):
        super().__init__()
        self.module = module
        self.f = [forward]  # in a list, because f may be the module, and functional_call must not see it twice

    def forward(self, *args, **kwargs):
        return self.f[0](*args, **kwargs)


def random_tau(lin, size=0.1, seed=1):
    """Returns a random τ that requires gradients."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(zero.shape, generator=generator, dtype=zero.dtype) for name, zero in lin.zeros().items()}
    return {name: (size * value).requires_grad_() for name, value in drawn.items()}


def cost(f):
    """Returns a scalar that is not linear in f."""
    weights = torch.linspace(-1, 1, f.numel(), dtype=f.dtype).reshape(f.shape)
    return (f * f).mean() + (weights * f).sin().sum()


def jvp_and_gradient(module, forward, batch, tau):
    """Returns f, J τ and the gradient of the cost at τ. The module must be in evaluation mode."""
    called = Called(module, forward)
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch if isinstance(batch, tuple) else (batch,), {})
    state = dict(module.named_parameters())
    base = {f"module.{name}": state[name].detach() for name in tau}
    moving = {name: value.detach().requires_grad_() for name, value in tau.items()}
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            tangents = {f"module.{name}": value.to(state[name].dtype) for name, value in moving.items()}
            f, change = jvp(lambda at: functional_call(called, at, args, kwargs), (base,), (tangents,))
            gradients = torch.autograd.grad(cost(f + change), list(moving.values()), allow_unused=True)
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
    return f.detach(), change.detach(), dict(zip(tau, gradients, strict=True))


def assert_near(actual, expected, tolerance, what):
    """Asserts equality up to a fraction of the largest number."""
    scale = max(float(expected.abs().amax()), 1e-3)
    assert float((actual - expected).abs().amax()) <= tolerance * scale, what


def step_of(lin, batch, tau):
    """Returns the linearisation at τ, and the gradient of the cost."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.compile
        point = lin.at(batch, tau)
        return point, point.gradient(torch.func.grad(cost)(point.f + point.change))


def other_modes(model, params):
    """Yields the fallback and, if KFACPACK_TEST_COMPILE is set and the model is float32, a compiled step."""
    lin = kp.linearize(model, params)
    lin._fast = lin._traces = False
    yield lin
    if os.environ.get("KFACPACK_TEST_COMPILE") and next(iter(lin.zeros().values())).dtype is torch.float32:
        yield (compiled := kp.linearize(model, params, compile=True))
        assert compiled.untraced == ()


def assert_exact(model, batch, tolerance=1e-9, params=None, all_modes=False):
    """Asserts that f, J τ and gradients equal those of `torch.func.jvp`: by autograd, by hand, and without a graph.

    All of them have the same bytes when they are untraced, recorded, verified and replayed. `all_modes` also compares
    those of a torch version without the private parts that the fast path needs and, if KFACPACK_TEST_COMPILE is set,
    those of a compiled float32 step, which takes up to a minute.
    """
    lin = kp.linearize(model, params)
    module, forward = (model, model) if isinstance(model, nn.Module) else (model.module, model.forward)
    tau = random_tau(lin)
    out = lin(batch, tau)
    cost(out).backward()
    point = lin.at(batch, tau)
    f0, change = lin.outputs(batch, tau)
    by_hand = point.gradient(torch.func.grad(cost)(point.f + point.change))
    for _ in range(3):
        again = lin.at(batch, tau)
        gradients = again.gradient(torch.func.grad(cost)(again.f + again.change))
        assert torch.equal(again.f, point.f)
        assert torch.equal(again.change, point.change)
        assert gradients.keys() == by_hand.keys()
        assert all(torch.equal(gradient, by_hand[name]) for name, gradient in gradients.items())
        assert all(map(torch.equal, lin.outputs(batch, tau), (f0, change)))
    assert lin.programs == 2 or lin.untraced
    training = {submodule: submodule.training for submodule in module.modules()}
    module.eval()
    f, expected, gradients = jvp_and_gradient(module, forward, batch, tau)
    others = [step_of(other, batch, tau) for other in other_modes(model, params)] if all_modes else []
    for submodule, flag in training.items():
        submodule.training = flag
    assert float(expected.abs().amax()) > 1e-6
    for actual in (f0, point.f, *(other.f for other, _ in others)):
        assert_near(actual, f, tolerance, "f")
    for actual in (change, point.change, out.detach() - f0, *(other.change for other, _ in others)):
        assert_near(actual, expected, tolerance, "change")
    largest = max(float(gradient.abs().amax()) for gradient in gradients.values() if gradient is not None)
    for name, value in tau.items():
        # For a parameter that f does not depend on, jvp gives None or zero.
        expected = torch.zeros_like(value) if gradients[name] is None else gradients[name]
        for actual in (value.grad, by_hand.get(name), *(gradients.get(name) for _, gradients in others)):
            actual = torch.zeros_like(value) if actual is None else actual
            assert float((actual - expected).abs().amax()) <= tolerance * largest, name
    return lin
