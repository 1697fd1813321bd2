"""`kp.linearize`: the model that is linear in τ, f(x) + J(x) τ.

It is linear, so the gradient of a cost c at τ is Jᵀ u with u = ∂c/∂f_lin: one ordinary backward pass of the base model,
seeded with u. And J τ needs no graph at all. So a step is a forward pass with its graph, a tangent computed beside it
without one, and a backward pass; its memory is that of fine-tuning.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from kfacpack.curvature.curvature import check_task_vector
from kfacpack.errors import KfacpackError
from kfacpack.linearization.jvp_mode import JvpMode, TangentMap, require_tracked
from kfacpack.models.functional import call_model, eval_mode, map_tensors, select_parameters, zeros_like_parameters
from kfacpack.models.model import Model

if TYPE_CHECKING:
    from kfacpack.models.functional import Forward, ModelInput


_LOCK = threading.RLock()
"""A module's flags are changed for the time of a call: a second thread would find or leave them as the first needs."""


def linearize(
    model: nn.Module | Model, params: Iterable[str] | str | None = None, *, forward: Forward | None = None
) -> Linearized:
    """The model's output f as a linear function of a change τ of its parameters: `lin(batch, tau)`, f + J τ.

    `model(*batch)`, or `forward(*batch)` if given, is f, of shape (N, C); batches and `params` are as for
    `kp.estimate`. Of a kfacpack model, f is its own, and by default what its family freezes stays.
    """
    if isinstance(model, Model):
        module, f, frozen = model.module, model.forward, model.frozen
    elif isinstance(model, nn.Module):
        module, f, frozen = model, model, ()
    else:
        raise KfacpackError(f"expected a module or a model of kp.load_model, found {type(model).__name__}")
    return Linearized(module, f if forward is None else forward, select_parameters(module, params, frozen))


class Linearized:
    """f(x) + J(x) τ, of a module that is used in evaluation mode and is after every call as it was before.

    τ is {state-dict name: tensor of its shape}; names that it leaves out count as zero. It may have another dtype than
    the parameters.
    """

    def __init__(self, module: nn.Module, forward: Forward, wanted: Mapping[str, Tensor]) -> None:
        self._module = module
        self._forward = forward
        self._wanted = dict(wanted)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in wanted.items()}

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names that τ may have, in the order of the state dict."""
        return tuple(self._wanted)

    def zeros(self) -> dict[str, Tensor]:
        """τ = 0, in float32 at least: where training starts."""
        return zeros_like_parameters(self._wanted)

    def __call__(self, batch: ModelInput, tau: Mapping[str, Tensor]) -> Tensor:
        """(N, C), differentiable in τ, once."""
        check_task_vector(tau, self._shapes, "lin")
        if torch.is_grad_enabled() and any(value.requires_grad for value in tau.values()):
            found: Tensor = _LinearizedFunction.apply(self, batch, tuple(tau), *tau.values())  # type: ignore[no-untyped-call]
            return found
        f, change = self.outputs(batch, tau)
        return f + change

    def outputs(self, batch: ModelInput, tau: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """f and J τ, both (N, C), without graph and without the memory of one: f + α J τ is then cheap for any α."""
        with saved_tensors_hooks(_save_nothing, _load_nothing):
            point = self._follow(batch, tau)
        return point.f, point.change

    def at(self, batch: ModelInput, tau: Mapping[str, Tensor]) -> Linearization:
        """f and J τ, and the way back: for loops that need no autograd of their own."""
        with saved_tensors_hooks(_save_tensor, _load_tensor):
            return self._follow(batch, tau)

    def _follow(self, batch: ModelInput, tau: Mapping[str, Tensor]) -> Linearization:
        check_task_vector(tau, self._shapes, "lin")
        chosen = {name: self._wanted[name] for name in tau}
        with _LOCK, torch.inference_mode(False), eval_mode(self._module, chosen), _no_autocast_cache():
            edges = {name: get_gradient_edge(parameter) for name, parameter in chosen.items()}
            tangents = TangentMap({parameter: _plain(tau[name]).to(parameter) for name, parameter in chosen.items()})
            device = next(iter(chosen.values())).device
            arguments = map_tensors(batch, lambda tensor: _plain(tensor).to(device, non_blocking=True))
            with _eagerly(), JvpMode(tangents):
                f = call_model(self._forward, arguments)
            if (change := tangents.get(f)) is None:
                require_tracked(f)
            return Linearization(f, change, edges, {name: value.dtype for name, value in tau.items()})


class Linearization:
    """f at one batch, its change along τ, and the gradients that go back from it."""

    def __init__(
        self, f: Tensor, change: Tensor | None, edges: Mapping[str, GradientEdge], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        self._with_graph = f
        self._edges = edges
        self._dtypes = dtypes
        self.f = f.detach()
        """(N, C)."""
        self.change = torch.zeros_like(self.f) if change is None else change
        """J τ, (N, C)."""

    def gradient(
        self,
        u: Tensor,
        names: Iterable[str] | None = None,
        *,
        into: dict[str, Tensor] | None = None,
        again: bool = False,
    ) -> dict[str, Tensor]:
        """Jᵀ u, u (N, C), by parameter; those that f does not depend on are left out.

        It is added to what `into` already has, in place, and `into` is given back. Memory that it needs is let go
        on the way, unless it will be asked for `again`.
        """
        found = {} if into is None else into
        wanted = list(self._edges if names is None else names)
        if self._with_graph.grad_fn is None or not wanted:
            return found
        edges = [self._edges[name] for name in wanted]
        gradients = torch.autograd.grad(self._with_graph, edges, u, retain_graph=again, allow_unused=True)
        with torch.no_grad():
            for name, gradient in zip(wanted, gradients, strict=True):
                if gradient is None:
                    continue
                if name in found:
                    found[name].add_(gradient)
                else:
                    # Of its own, since two parameters may have one gradient, and it will be added to.
                    found[name] = gradient.to(self._dtypes[name], copy=into is not None)
        return found


class _LinearizedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lin: Linearized, batch: ModelInput, names: tuple[str, ...], *values: Tensor) -> Tensor:
        ctx.names = names
        ctx.point = lin.at(batch, dict(zip(names, values, strict=True)))
        found: Tensor = ctx.point.f + ctx.point.change
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
        asked = [name for name, needed in zip(ctx.names, ctx.needs_input_grad[3:], strict=True) if needed]
        # Whether the caller said retain_graph, which no public function tells.
        again = torch._C._autograd._get_current_graph_task_keep_graph()
        found = ctx.point.gradient(u, asked, again=again)
        return None, None, None, *(found.get(name) for name in ctx.names)


def _plain(tensor: Tensor) -> Tensor:
    """Without a graph of its own; a tensor of inference mode, which can have none, is copied."""
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def _eagerly() -> AbstractContextManager[Any]:
    """What torch.compile has made of a model cannot be followed, the model itself can."""
    compiler = sys.modules.get("torch._dynamo")
    if compiler is None or not hasattr(torch.compiler, "set_stance"):
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Autocast keeps the casts of parameters for the next call, whose tangents would be another τ's."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


# Autograd would keep the very tensors that the model works with, and with them their tangents: hence others of the same
# memory. Tangents then live no longer than the model itself needs them.


def _save_tensor(tensor: Tensor) -> tuple[Tensor, int]:
    same = tensor.detach()
    return same, same._version


def _load_tensor(kept: tuple[Tensor, int]) -> Tensor:
    tensor, version = kept
    if tensor._version != version:
        problem = "a tensor that the gradient needs was overwritten after it was used"
        raise KfacpackError(f"{problem}: the model cannot be trained as it is, or its weights have changed since")
    return tensor


def _save_nothing(tensor: Tensor) -> None:
    return None


def _load_nothing(nothing: None) -> Tensor:
    raise AssertionError("there is no way back from an evaluation")
