"""What a method is given, and what it gives.

T vectors, each with its α. A method gives a vector on the scale of their sum: at α = 1 it is used as it is, and no
method averages unless it is told to (`mean`). It is odd and homogeneous: all α times c is the result times c.

Task arithmetic (Ilharco et al., 2023): Σ α_t τ_t.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kfacpack.errors import KfacpackError, printable

if TYPE_CHECKING:
    from torch import Tensor

    MergedParameter = Callable[[str], Tensor]

    """The merged change of the parameter of this name."""


class MethodInput(NamedTuple):
    alpha: float
    tensors: Mapping[str, Tensor]
    digest: str

    def read(self, name: str) -> Tensor:
        """α τ of one parameter, float64."""
        return self.alpha * self.tensors[name].double()


@dataclass(frozen=True)
class MergeMethod(ABC):
    """Its fields are its settings."""

    name: ClassVar[str]
    scale: ClassVar[str]
    """What α means, and what constant the publication has in its place."""
    is_sum: ClassVar[bool] = False
    """Whether it is what `+` does to vectors."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> MergeMethod:
        known = [field.name for field in fields(cls)]
        if unknown := [each for each in settings if each not in known]:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise KfacpackError(f"the method {cls.name!r} has no setting {printable(unknown[0])!r}; {has}")
        return cls(**settings)

    @property
    def settings(self) -> dict[str, Any]:
        return asdict(self)

    def begin(self, inputs: Sequence[MethodInput]) -> MergedParameter:
        """What gives the merged parameters, one at a time, after whatever has to be known of all of them."""
        return partial(self.parameter, inputs)

    @abstractmethod
    def parameter(self, inputs: Sequence[MethodInput], name: str) -> Tensor:
        """The merged change of one parameter, float64."""

    def require_share(self, setting: str, *, zero: bool, one: bool) -> None:
        """Refuse a setting that is no number between 0 and 1. `zero`, `one`: whether these will do."""
        found = getattr(self, setting)
        number = isinstance(found, int | float) and not isinstance(found, bool)
        if not (number and ((0 < found < 1) or (zero and found == 0) or (one and found == 1))):
            ends = f"{'from' if zero else 'above'} 0 {'to' if one else 'and below'} 1"
            raise KfacpackError(f"{self.name}: {setting} is {found!r}, expected a number {ends}")

    def require_switch(self, setting: str) -> None:
        if not isinstance(found := getattr(self, setting), bool):
            raise KfacpackError(f"{self.name}: {setting} is {found!r}, expected true or false")


def weighted_sum(inputs: Sequence[MethodInput], name: str, *, mean: bool = False) -> Tensor:
    """Σ α τ of one parameter, or that over T: two tensors at a time, however many vectors."""
    total = inputs[0].read(name)
    for each in inputs[1:]:
        total += each.read(name).to(total.device)
    return total / len(inputs) if mean else total


@dataclass(frozen=True)
class SumMethod(MergeMethod):
    name = "sum"
    scale = "α is the paper's scaling coefficient λ, which it chooses on validation data"
    is_sum = True

    def parameter(self, inputs: Sequence[MethodInput], name: str) -> Tensor:
        return weighted_sum(inputs, name)
