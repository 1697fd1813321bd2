"""`linear`: the linearised model f + J τ, in which vectors add up as they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kfacpack.function.precision import widened
from kfacpack.linear.linearize import Linearized
from kfacpack.training.regimes.base import Moved, Regime

if TYPE_CHECKING:
    from torch import Tensor

    from kfacpack.linear.linearize import Point
    from kfacpack.models.base import Batch, Model
    from kfacpack.training.regimes.base import Tau


class Along(Moved):
    def __init__(self, point: Point):
        self._point = point
        self.f = widened(point.f) + widened(point.change)

    def add_gradient(self, u: Tensor, gradients: dict[str, Tensor]) -> None:
        self._point.gradient(u.to(self._point.f), into=gradients)


class Linear(Regime):
    name = "linear"
    reach = 1.0

    def __init__(self, model: Model, params: Iterable[str] | str | None = None):
        super().__init__(model, params)
        self._linearized = Linearized(model.module, model.forward, self.wanted)

    def moved(self, batch: Batch, tau: Tau) -> Along:
        return Along(self._linearized.at(batch, tau))

    def drift(self, batch: Batch, tau: Tau) -> tuple[Tensor, Along]:
        point = self._linearized.at(batch, tau)
        return widened(point.change), Along(point)
