"""The base class of merge methods for task vectors, and the sum.

A method merges T vectors, each multiplied by its α, into a vector on the scale of their sum, to be used at α = 1. No
method averages unless its setting `mean` is true. A method is odd and homogeneous: multiplying every α by c
multiplies the result by c.

Task arithmetic (Ilharco et al., 2023) is the sum Σ α_t τ_t.
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
    """Returns the merged change of the parameter of a given name."""


class MethodInput(NamedTuple):
    """A task vector to be merged."""

    alpha: float
    tensors: Mapping[str, Tensor]
    digest: str

    def read(self, name: str) -> Tensor:
        """Returns α τ of one parameter in float64."""
        return self.alpha * self.tensors[name].double()


@dataclass(frozen=True)
class MergeMethod(ABC):
    """A merge method. Its dataclass fields are its settings."""

    name: ClassVar[str]
    scale: ClassVar[str]
    """The meaning of α, and the constant that the publication uses for it."""
    is_sum: ClassVar[bool] = False
    """Whether the method is the plain sum."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> MergeMethod:
        """Creates the method from settings.

        Raises:
            KfacpackError: If a setting is unknown or invalid.
        """
        names = [field.name for field in fields(cls)]
        if unknown := [setting for setting in settings if setting not in names]:
            expected = f"its settings are {', '.join(names)}" if names else "it has no settings"
            raise KfacpackError(f"the method {cls.name!r} has no setting {printable(unknown[0])!r}; {expected}")
        return cls(**settings)

    @property
    def settings(self) -> dict[str, Any]:
        """All settings with their values."""
        return asdict(self)

    def begin(self, inputs: Sequence[MethodInput]) -> MergedParameter:
        """Precomputes quantities that depend on all parameters, and returns a function that merges one parameter."""
        return partial(self.parameter, inputs)

    @abstractmethod
    def parameter(self, inputs: Sequence[MethodInput], name: str) -> Tensor:
        """Merges one parameter.

        Args:
            inputs: The task vectors.
            name: The parameter.

        Returns:
            The merged change in float64.
        """

    def require_fraction(self, setting: str, *, zero: bool, one: bool) -> None:
        """Checks that a setting is a number between 0 and 1.

        Args:
            setting: Name of the setting.
            zero: Whether 0 is allowed.
            one: Whether 1 is allowed.

        Raises:
            KfacpackError: If it is not.
        """
        value = getattr(self, setting)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and ((0 < value < 1) or (zero and value == 0) or (one and value == 1))):
            interval = f"{'[' if zero else '('}0, 1{']' if one else ')'}"
            raise KfacpackError(f"{self.name}: {setting} is {value!r}, expected a number in {interval}")

    def require_bool(self, setting: str) -> None:
        """Checks that a setting is a boolean.

        Raises:
            KfacpackError: If it is not.
        """
        if not isinstance(value := getattr(self, setting), bool):
            raise KfacpackError(f"{self.name}: {setting} is {value!r}, expected true or false")


def weighted_sum(inputs: Sequence[MethodInput], name: str, *, mean: bool = False) -> Tensor:
    """Sums one parameter over the vectors, holding two tensors at a time.

    Args:
        inputs: T task vectors.
        name: The parameter.
        mean: Whether to divide the sum by T.

    Returns:
        Σ α τ, or Σ α τ / T, in float64.
    """
    total = inputs[0].read(name)
    for vector in inputs[1:]:
        total += vector.read(name).to(total.device)
    return total / len(inputs) if mean else total


@dataclass(frozen=True)
class SumMethod(MergeMethod):
    """Task arithmetic: Σ α τ."""

    name = "sum"
    scale = "α is the paper's scaling coefficient λ, which is chosen on validation data"
    is_sum = True

    def parameter(self, inputs: Sequence[MethodInput], name: str) -> Tensor:
        """Sums one parameter."""
        return weighted_sum(inputs, name)
