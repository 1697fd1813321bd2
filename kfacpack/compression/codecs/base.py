"""A codec turns a matrix into a smaller one that stands for nearly the same.

Shapes: a matrix has the side n, its triangle t = n (n + 1) / 2 numbers.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch

from kfacpack.errors import KfacpackError

if TYPE_CHECKING:
    from typing_extensions import Self

    from kfacpack.bundle.container import Spec
    from kfacpack.curvature.matrices import Matrix

Specs = dict[str, "Spec"]
"""Dtype and shape of each component that a matrix will have."""


class Codec(ABC):
    name: ClassVar[str]
    usage: ClassVar[str]
    """How it is asked for, for people: block:K."""
    structural: ClassVar[bool]
    """Whether it chooses which numbers are kept, or only how each of them is held."""

    @classmethod
    @abstractmethod
    def parse(cls, argument: str | None) -> Self:
        """From what stands behind the colon, None where there is no colon."""

    @abstractmethod
    def specs(self, matrix: Matrix) -> Specs | None:
        """What its components would be, from shapes alone; None where the codec can do nothing with it.

        The matrix is as it would be stored.
        """

    @abstractmethod
    def encode(self, matrix: Matrix) -> Matrix:
        """The smaller matrix. Asked for only where there are `specs`."""

    @classmethod
    def refusal(cls, argument: str | None, expected: str) -> KfacpackError:
        found = cls.name if argument is None else f"{cls.name}:{argument}"
        return KfacpackError(f"codec {found!r}: expected {cls.usage}, {expected}")

    @classmethod
    def without_argument(cls, argument: str | None) -> Self:
        if argument is not None:
            raise cls.refusal(argument, "which takes no number")
        return cls()


def whole_number(argument: str | None) -> int | None:
    """A number of at least 1, in plain digits; else None."""
    return int(argument) if argument and re.fullmatch(r"[1-9][0-9]{0,6}", argument) else None


def share(argument: str | None) -> float | None:
    """'12.5%' -> 0.125: above 0 and at most 1; else None."""
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)%", argument or "")
    found = float(match[1]) / 100 if match else 0.0
    return found if 0 < found <= 1 else None


def float_type(matrix: Matrix) -> torch.dtype:
    """The type to take a matrix's numbers in: its own, where that is one of floats."""
    return matrix.dtype if matrix.dtype.is_floating_point else torch.float32


def with_counts_of(made: Matrix, source: Matrix) -> Matrix:
    made.examples, made.positions = source.examples, source.positions
    return made
