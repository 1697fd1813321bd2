"""A codec turns a matrix into a smaller one that stands for nearly the same.

Shapes: a matrix has the side n, its triangle t = n (n + 1) / 2 numbers.

`block:K`: K diagonal blocks of each matrix, nothing between them. The diagonal stays, and so does the trace of G.

`prune:P%`: the entries of largest magnitude, by coordinates. Each costs three numbers, so a third is no saving.

`svd:R`, `svd:P%`: the R largest eigenvalues of each matrix and their vectors, the best there is of that rank.

Two bytes a number: what `fp16` and `bf16` share.

`fp16`: 11 bits of precision for numbers from 6e-5 to 65504.

Gradients, and with them B, are often smaller than that. A matrix that float16 cannot hold, or holds worse than bfloat16
does in the same two bytes, is held in bfloat16.

`bf16`: float32's range, 8 bits of precision.

`int8`: whole numbers from -127 to 127, times one factor for each stored row.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, ClassVar

import torch

from kfacpack.curvature.matrices.components import FILE_TYPES
from kfacpack.curvature.matrices.matrix import width_for
from kfacpack.curvature.matrices.sparse import Sparse
from kfacpack.curvature.matrices.structured import BlockDiagonal, LowRank
from kfacpack.errors import KfacpackError
from kfacpack.format.schema import LAYOUTS, triangle_length, widest_block

if TYPE_CHECKING:
    from typing_extensions import Self

    from kfacpack.curvature.matrices.matrix import Matrix
    from kfacpack.format.container import Spec


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


@dataclass(frozen=True)
class BlockCodec(Codec):
    count: int

    name = "block"
    usage = "block:K"
    structural = True

    @classmethod
    def parse(cls, argument: str | None) -> BlockCodec:
        if (count := whole_number(argument)) is None:
            raise cls.refusal(argument, "K the number of diagonal blocks, such as block:8")
        return cls(count)

    def __str__(self) -> str:
        return f"block:{self.count}"

    def specs(self, matrix: Matrix) -> Specs | None:
        if self.count > matrix.side:
            return None
        shape = (self.count, triangle_length(widest_block(matrix.side, self.count)))
        return {"data": (FILE_TYPES[float_type(matrix)], shape)}

    def encode(self, matrix: Matrix) -> Matrix:
        full = matrix.dense(float_type(matrix))
        return with_counts_of(BlockDiagonal.from_dense(full, self.count, psd=matrix.psd), matrix)


@dataclass(frozen=True)
class PruneCodec(Codec):
    fraction: float

    name = "prune"
    usage = "prune:P%"
    structural = True

    @classmethod
    def parse(cls, argument: str | None) -> PruneCodec:
        if (fraction := share(argument)) is None:
            raise cls.refusal(argument, "the share of entries to keep, such as prune:15%")
        return cls(fraction)

    def __str__(self) -> str:
        return f"prune:{100 * self.fraction:.8g}%"

    def specs(self, matrix: Matrix) -> Specs | None:
        count = round(self.fraction * triangle_length(matrix.side))
        if not count:
            return None  # a matrix of zeros would be no smaller version of it
        return {
            "data": (FILE_TYPES[float_type(matrix)], (count,)),
            "rows": ("I32", (count,)),
            "columns": ("I32", (count,)),
        }

    def encode(self, matrix: Matrix) -> Matrix:
        return with_counts_of(Sparse.from_dense(matrix.dense(float_type(matrix)), self.fraction), matrix)


@dataclass(frozen=True)
class SvdCodec(Codec):
    asked: int | float
    """The rank, or as a float the rank's share of the side."""

    name = "svd"
    usage = "svd:R or svd:P%"
    structural = True

    @classmethod
    def parse(cls, argument: str | None) -> SvdCodec:
        asked = whole_number(argument) or share(argument)
        if asked is None:
            raise cls.refusal(argument, "a rank or its share of the side, such as svd:32 or svd:25%")
        return cls(asked)

    def __str__(self) -> str:
        return f"svd:{self.asked}" if isinstance(self.asked, int) else f"svd:{100 * self.asked:.8g}%"

    def rank(self, side: int) -> int:
        return self.asked if isinstance(self.asked, int) else ceil(self.asked * side)

    def specs(self, matrix: Matrix) -> Specs | None:
        rank = self.rank(matrix.side)
        if rank > matrix.side:
            return None
        dtype = FILE_TYPES[_type(matrix)]
        return {"data": (dtype, (matrix.side, rank)), "weights": (dtype, (rank,))}

    def encode(self, matrix: Matrix) -> Matrix:
        rank = self.rank(matrix.side)
        values, vectors = matrix.leading(width_for(matrix.side, rank))
        return with_counts_of(LowRank.from_spectrum(values, vectors, rank, _type(matrix), psd=matrix.psd), matrix)


def _type(matrix: Matrix) -> torch.dtype:
    """Vectors are computed, not picked: in float32 at least."""
    return torch.float64 if matrix.dtype is torch.float64 else torch.float32


class HalfCodec(Codec):
    structural = False
    file_type: str

    @classmethod
    def parse(cls, argument: str | None) -> Self:
        return cls.without_argument(argument)

    def __str__(self) -> str:
        return self.name

    def specs(self, matrix: Matrix) -> Specs | None:
        kept = {name: spec for name, spec in matrix.components.specs.items() if name != "scale"}
        return {**kept, "data": (self.file_type, kept["data"][1])}


@dataclass(frozen=True)
class Fp16Codec(HalfCodec):
    name = "fp16"
    usage = "fp16"
    file_type = "F16"

    def encode(self, matrix: Matrix) -> Matrix:
        stored = matrix.for_storage()
        numbers = stored.numbers(torch.float32)
        largest = torch.finfo(torch.float16).max
        if numbers.numel() and float(numbers.abs().amax()) <= largest:
            lost, otherwise = (
                float((numbers - numbers.to(dtype).float()).norm()) for dtype in (torch.float16, torch.bfloat16)
            )
            if lost <= otherwise:
                return stored.rounded(torch.float16)
        return stored.rounded(torch.bfloat16)


@dataclass(frozen=True)
class Bf16Codec(HalfCodec):
    name = "bf16"
    usage = "bf16"
    file_type = "BF16"

    def encode(self, matrix: Matrix) -> Matrix:
        return matrix.for_storage().rounded(torch.bfloat16)


@dataclass(frozen=True)
class Int8Codec(Codec):
    name = "int8"
    usage = "int8"
    structural = False

    @classmethod
    def parse(cls, argument: str | None) -> Int8Codec:
        return cls.without_argument(argument)

    def __str__(self) -> str:
        return "int8"

    def specs(self, matrix: Matrix) -> Specs | None:
        if not matrix.may_be_int8:
            return None
        shape = matrix.components.specs["data"][1]
        scale = LAYOUTS[matrix.form].shapes(matrix.side, shape)["scale"]
        return {**matrix.components.specs, "data": ("I8", shape), "scale": ("F32", scale)}

    def encode(self, matrix: Matrix) -> Matrix:
        return matrix.for_storage().quantized()
