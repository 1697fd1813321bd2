"""What a regime is. Shapes: N examples, C the width of f; τ and its gradient have the shapes of the parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from kfacpack.errors import KfacpackError
from kfacpack.function.parameters import choose

if TYPE_CHECKING:
    from kfacpack.models.base import Batch, Model
    from kfacpack.vectors.manifest import Regime as Name

    Tau = Mapping[str, Tensor]


class Moved(ABC):
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
        return choose(model.module, params, model.frozen)

    @abstractmethod
    def moved(self, batch: Batch, tau: Tau) -> Moved:
        """For training."""

    @abstractmethod
    def drift(self, batch: Batch, tau: Tau) -> tuple[Tensor, Moved]:
        """How far τ moves f from where it was, (N, C), for a penalty on data; and the way back."""


def require_some(wanted: Mapping[str, Tensor], regime: str, model: Model) -> None:
    if not wanted:
        raise KfacpackError(f"regime {regime!r}: {model.name} has no such parameters; choose some with --params")
