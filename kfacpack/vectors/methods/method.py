"""The base class of merge methods for task vectors, the declaration of their settings, and the `sum` method.

A method merges T vectors, each multiplied by its α. By default, the result has the scale of the sum of the vectors
rather than of their mean, so it is applied with α = 1. For every method, multiplying all α by any number c, which may
be negative, multiplies the result by c.

A method is a dataclass whose fields are its settings. Each field is declared with `setting`. The command line, plans
and the documentation take the settings' names, defaults, ranges and help texts from these fields. The modules that
define methods import torch only when a method runs, because `kfacpack --help` imports these modules.

Task arithmetic (Ilharco et al., 2023) is the sum Σ α_t τ_t.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kfacpack.errors import KfacpackError, printable

if TYPE_CHECKING:
    from torch import Tensor

    from kfacpack.format.units import OnProgress
    from kfacpack.format.vector_manifest import SolvedBlock
    from kfacpack.vectors.bundle_matching import MatchedBundle
    from kfacpack.vectors.task_vector import TaskVector

    MergedParameter = Callable[[str], Tensor]
    """Function that returns the merged change to the parameter with a given name."""


class MethodInput(NamedTuple):
    """A task vector to be merged."""

    alpha: float
    tensors: TaskVector
    digest: str

    def read(self, name: str) -> Tensor:
        """Returns α τ for one parameter, in float64."""
        return self.alpha * self.tensors[name].double()

    def factors(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Returns factors U (m, r) and V (r, n) of α τ for one parameter, or None if τ is not stored as factors."""
        pair = self.tensors.factors(name)
        if pair is None:
            return None
        U, V = pair
        return (self.alpha * U.double(), V.double()) if self.alpha else (U[:, :0].double(), V[:0].double())

    def squared_norm(self) -> float:
        """Returns ‖τ‖² over all parameters, without α. The product of stored factors is not computed."""
        total = 0.0
        for name in self.tensors:
            pair = self.tensors.factors(name)
            if pair is None:
                total += float(self.tensors[name].double().square().sum())
            else:
                U, V = (factor.double() for factor in pair)
                total += float(((U.T @ U) * (V @ V.T)).sum())
        return total


class SolvedParameters(NamedTuple):
    """The result of a method that merges all parameters at once."""

    tensors: dict[str, Tensor]
    """The merged change to each parameter in float32, except for those in `factors`."""
    factors: dict[str, tuple[Tensor, Tensor]]
    """U (m, r) and V (r, n) for each parameter whose change remains factored."""
    blocks: tuple[SolvedBlock, ...]
    """A report on each block."""


class DeclaredSetting(NamedTuple):
    """The declaration of a setting of a merge method."""

    name: str
    default: Any
    help: str
    """Description for the command line and the documentation, in one sentence."""
    interval: str
    """Interval of valid numbers, such as "(0, 1]"; empty if the setting is not a number."""
    choices: tuple[str, ...]
    """Valid strings; empty if the setting is not a string."""

    def problem(self, value: Any) -> str | None:
        """Returns a description of the values that the setting accepts, or None if the value is valid."""
        if isinstance(self.default, bool):
            return None if isinstance(value, bool) else "true or false"
        if self.choices:
            return None if value in self.choices else f"one of {', '.join(self.choices)}"
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        is_number = is_integer or (isinstance(value, float) and not isinstance(self.default, int))
        if is_number and isfinite(value) and self._contains(value):
            return None
        return f"{'an integer' if isinstance(self.default, int) else 'a number'} in {self.interval}"

    def _contains(self, value: float) -> bool:
        low, high = (inf if end == "∞" else int(end) for end in self.interval[1:-1].split(", "))
        above = value > low or (value == low and self.interval[0] == "[")
        return above and (value < high or (value == high and self.interval[-1] == "]"))


def setting(default: Any, help: str, *, interval: str = "", choices: Sequence[str] = ()) -> Any:
    """Declares a setting of a merge method as a field of its dataclass.

    Args:
        default: Default value, which also defines the type: bool, int, float or str.
        help: Description for the command line and the documentation, in one sentence.
        interval: Interval of valid numbers, such as "(0, 1]" or "[1, ∞)". Required if the default is a number.
        choices: Valid strings. Required if the default is a string.
    """
    return field(default=default, metadata={"help": help, "interval": interval, "choices": tuple(choices)})


@dataclass(frozen=True)
class MergeMethod(ABC):
    """Base class of merge methods for task vectors. The dataclass fields of a method are its settings."""

    name: ClassVar[str]
    help: ClassVar[str]
    """One-line description of the method."""
    scale: ClassVar[str]
    """Meaning of α, and the value that the paper uses."""
    is_sum: ClassVar[bool] = False
    """Whether the method is the plain sum."""
    needs_bundles: ClassVar[bool] = False
    """Whether the method needs bundles for the vectors' tasks."""

    def __post_init__(self) -> None:
        for declared in self.declared_settings():
            value = getattr(self, declared.name)
            if expected := declared.problem(value):
                raise KfacpackError(f"{self.name}: {declared.name} is {value!r}, expected {expected}")

    @classmethod
    def declared_settings(cls) -> Iterator[DeclaredSetting]:
        """Yields the declaration of each setting."""
        for entry in fields(cls):
            yield DeclaredSetting(entry.name, entry.default, **entry.metadata)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> MergeMethod:
        """Creates the method from a mapping of settings.

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
        """Values of all settings by name."""
        return asdict(self)

    def begin(self, inputs: Sequence[MethodInput]) -> MergedParameter:
        """Precomputes quantities that depend on all parameters, and returns a function that merges one parameter."""
        return partial(self.parameter, inputs)

    @abstractmethod
    def parameter(self, inputs: Sequence[MethodInput], name: str) -> Tensor:
        """Merges the changes to one parameter.

        Args:
            inputs: The task vectors.
            name: Name of the parameter.

        Returns:
            The merged change in float64.
        """

    def solve(
        self, inputs: Sequence[MethodInput], bundles: Sequence[MatchedBundle], on_progress: OnProgress
    ) -> SolvedParameters | None:
        """Merges all parameters at once. Implemented by methods that work on blocks of parameters.

        Args:
            inputs: The task vectors.
            bundles: The bundles and the vectors to which they are assigned; empty unless the method needs bundles.
            on_progress: Called with the number of blocks done and the total number.

        Returns:
            The merged parameters, or None if the method merges one parameter at a time.
        """
        return None


def weighted_sum(inputs: Sequence[MethodInput], name: str, *, mean: bool = False) -> Tensor:
    """Sums the changes to one parameter over the vectors, with at most two tensors in memory.

    Args:
        inputs: T task vectors.
        name: Name of the parameter.
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
    """Task arithmetic: the sum of the vectors, each multiplied by its α."""

    name = "sum"
    help = "Adds the vectors, each multiplied by its α (task arithmetic)."
    scale = "α is the paper's scaling coefficient λ, which is chosen on validation data"
    is_sum = True

    def parameter(self, inputs: Sequence[MethodInput], name: str) -> Tensor:
        """Sums the changes to one parameter."""
        return weighted_sum(inputs, name)
