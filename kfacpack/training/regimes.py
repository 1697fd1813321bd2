"""What a regime is. Shapes: N examples, C the width of f; τ and its gradient have the shapes of the parameters.

`linear`: the linearised model f + J τ, in which vectors add up as they are.

`full`: the model itself at θ0 + τ, non-linear.

`attention`: the model itself, but of its parameters only those of attention layers move.

That keeps a non-linear model nearer to its linearisation than moving all of them does.

What is trained, and through which model: the regimes, one file each.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kfacpack.errors import KfacpackError
from kfacpack.linearization.linearize import Linearized
from kfacpack.models.functional import at_least_float32, call_model, eval_mode, select_parameters

if TYPE_CHECKING:
    from kfacpack.format.vector_manifest import RegimeName as Name
    from kfacpack.linearization.linearize import Linearization
    from kfacpack.models.model import Batch, Model

    Tau = Mapping[str, Tensor]


class ForwardResult(ABC):
    """f of one batch at θ0 + τ, and the way back to τ."""

    f: Tensor
    """(N, C), without a graph."""

    @abstractmethod
    def add_gradient(self, u: Tensor, gradients: dict[str, Tensor]) -> None:
        """Add ∂<u, f>/∂τ in place, u (N, C). To be called once."""


class Regime(ABC):
    name: ClassVar[Name]
    reach: ClassVar[float]
    """By what share of its length a step at the full learning rate may move f, where no rate is given."""

    def __init__(self, model: Model, params: Iterable[str] | str | None = None):
        self.model = model
        self.wanted = self.choose(model, params)

    def choose(self, model: Model, params: Iterable[str] | str | None) -> dict[str, Tensor]:
        """What is trained: what was asked for, else all that the family does not freeze."""
        return select_parameters(model.module, params, model.frozen)

    @abstractmethod
    def moved(self, batch: Batch, tau: Tau) -> ForwardResult:
        """For training."""

    @abstractmethod
    def drift(self, batch: Batch, tau: Tau) -> tuple[Tensor, ForwardResult]:
        """How far τ moves f from where it was, (N, C), for a penalty on data; and the way back."""


def require_parameters(wanted: Mapping[str, Tensor], regime: str, model: Model) -> None:
    if not wanted:
        raise KfacpackError(f"regime {regime!r}: {model.name} has no such parameters; choose some with --params")


class LinearForward(ForwardResult):
    def __init__(self, point: Linearization):
        self._point = point
        self.f = at_least_float32(point.f) + at_least_float32(point.change)

    def add_gradient(self, u: Tensor, gradients: dict[str, Tensor]) -> None:
        self._point.gradient(u.to(self._point.f), into=gradients)


class LinearRegime(Regime):
    name = "linear"
    reach = 1.0

    def __init__(self, model: Model, params: Iterable[str] | str | None = None):
        super().__init__(model, params)
        self._linearized = Linearized(model.module, model.forward, self.wanted)

    def moved(self, batch: Batch, tau: Tau) -> LinearForward:
        return LinearForward(self._linearized.at(batch, tau))

    def drift(self, batch: Batch, tau: Tau) -> tuple[Tensor, LinearForward]:
        point = self._linearized.at(batch, tau)
        return at_least_float32(point.change), LinearForward(point)


class FullForward(ForwardResult):
    def __init__(self, with_graph: Tensor, weights: Mapping[str, Tensor]):
        self._with_graph = with_graph
        self._weights = weights
        self.f = at_least_float32(with_graph.detach())

    def add_gradient(self, u: Tensor, gradients: dict[str, Tensor]) -> None:
        if self._with_graph.grad_fn is None:
            return  # f depends on none of them
        leaves = list(self._weights.values())
        found = torch.autograd.grad(self._with_graph, leaves, u.to(self._with_graph.dtype), allow_unused=True)
        for name, gradient in zip(self._weights, found, strict=True):
            if gradient is not None:
                gradients[name].add_(gradient)


class FullRegime(Regime):
    name: ClassVar[Name] = "full"
    reach = 0.1

    def __init__(self, model: Model, params: Iterable[str] | str | None = None):
        super().__init__(model, params)
        self._function = _FunctionalModule(model)

    def moved(self, batch: Batch, tau: Tau) -> FullForward:
        weights = {
            name: (parameter.detach() + tau[name].detach()).to(parameter.dtype).requires_grad_()
            for name, parameter in self.wanted.items()
        }
        inside = {f"module.{name}": weight for name, weight in weights.items()}
        with eval_mode(self.model.module, {}):
            return FullForward(functional_call(self._function, inside, (batch,)), weights)

    def drift(self, batch: Batch, tau: Tau) -> tuple[Tensor, FullForward]:
        with torch.no_grad(), eval_mode(self.model.module, {}):
            before = at_least_float32(call_model(self.model.forward, batch).detach())
        there = self.moved(batch, tau)
        return there.f - before, there


class _FunctionalModule(nn.Module):
    """f as a module, so that torch can call it with other weights than the model's own."""

    def __init__(self, model: Model):
        super().__init__()
        self.module = model.module
        self._forward = model.forward

    def forward(self, batch: Batch) -> Tensor:
        return call_model(self._forward, batch)


ATTENTION = re.compile(r"(^|\.|_)(self_?|encdec|cross_?)?(attn|attention)(\.|_|$)", re.IGNORECASE)
"""What families call an attention layer: attn, attention, SelfAttention, EncDecAttention."""
NORM = re.compile("norm", re.IGNORECASE)


class AttentionRegime(FullRegime):
    name = "attention"

    def choose(self, model: Model, params: Iterable[str] | str | None) -> dict[str, Tensor]:
        wanted = super().choose(model, params)
        if params is None:
            wanted = {k: v for k, v in wanted.items() if ATTENTION.search(k) and not NORM.search(k)}
        require_parameters(wanted, self.name, model)
        return wanted


REGIMES: dict[str, type[Regime]] = {
    each.name: each
    for each in (
        LinearRegime,
        FullRegime,
        AttentionRegime,
    )
}
