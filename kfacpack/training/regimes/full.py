"""`full`: the model itself at θ0 + τ, non-linear."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kfacpack.function.batch import run
from kfacpack.function.borrowed import borrowed
from kfacpack.function.precision import widened
from kfacpack.training.regimes.base import Moved, Regime

if TYPE_CHECKING:
    from kfacpack.models.base import Batch, Model
    from kfacpack.training.regimes.base import Tau
    from kfacpack.vectors.manifest import Regime as Name


class There(Moved):
    def __init__(self, with_graph: Tensor, weights: Mapping[str, Tensor]):
        self._with_graph = with_graph
        self._weights = weights
        self.f = widened(with_graph.detach())

    def add_gradient(self, u: Tensor, gradients: dict[str, Tensor]) -> None:
        if self._with_graph.grad_fn is None:
            return  # f depends on none of them
        leaves = list(self._weights.values())
        found = torch.autograd.grad(self._with_graph, leaves, u.to(self._with_graph.dtype), allow_unused=True)
        for name, gradient in zip(self._weights, found, strict=True):
            if gradient is not None:
                gradients[name].add_(gradient)


class Full(Regime):
    name: ClassVar[Name] = "full"
    reach = 0.1

    def __init__(self, model: Model, params: Iterable[str] | str | None = None):
        super().__init__(model, params)
        self._function = _Function(model)

    def moved(self, batch: Batch, tau: Tau) -> There:
        weights = {
            name: (parameter.detach() + tau[name].detach()).to(parameter.dtype).requires_grad_()
            for name, parameter in self.wanted.items()
        }
        inside = {f"module.{name}": weight for name, weight in weights.items()}
        with borrowed(self.model.module, {}):
            return There(functional_call(self._function, inside, (batch,)), weights)

    def drift(self, batch: Batch, tau: Tau) -> tuple[Tensor, There]:
        with torch.no_grad(), borrowed(self.model.module, {}):
            before = widened(run(self.model.forward, batch).detach())
        there = self.moved(batch, tau)
        return there.f - before, there


class _Function(nn.Module):
    """f as a module, so that torch can call it with other weights than the model's own."""

    def __init__(self, model: Model):
        super().__init__()
        self.module = model.module
        self._forward = model.forward

    def forward(self, batch: Batch) -> Tensor:
        return run(self._forward, batch)
