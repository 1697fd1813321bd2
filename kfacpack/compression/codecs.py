"""Codecs, which replace a matrix with a smaller approximation, and chains of codecs such as "block:8+int8".

A structural codec chooses which values are kept:

- `block:K`: K diagonal blocks of the matrix. The diagonal, and therefore the trace, does not change.
- `svd:R`, `svd:P%`: the R eigenvalues of largest magnitude and their eigenvectors. R may be given as a percentage P of
  the side length. The result is the best approximation of rank R.
- `prune:P%`: the P % of the entries that have the largest magnitudes. Each of these entries is stored as three numbers:
  its value and two coordinates. Keeping a third of the entries therefore saves no space.

A number codec chooses how each value is stored:

- `int8`: integers from -127 to 127, which are multiplied by one scale factor per stored row.
- `fp16`: float16, with 11 bits of precision for magnitudes from 6e-5 to 65504. The entries of B are often below this
  range, because gradients are small. A matrix that exceeds the range of float16, or that is more accurate in bfloat16,
  is stored in bfloat16.
- `bf16`: bfloat16, with 8 bits of precision and the range of float32.

To add a codec, define a class and list it in `CODECS`.

Shapes: the lower triangle of an (n, n) matrix has n (n + 1) / 2 values.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, ClassVar

import torch

from kfacpack.curvature.matrices.components import FILE_TYPES, SpecTensors, nbytes_of
from kfacpack.curvature.matrices.matrix import width_for
from kfacpack.curvature.matrices.structured import BlockDiagonal, LowRank, Sparse
from kfacpack.errors import KfacpackError
from kfacpack.format.schema import LAYOUTS, triangle_length, widest_block

if TYPE_CHECKING:
    from typing_extensions import Self

    from kfacpack.curvature.matrices.matrix import Matrix
    from kfacpack.format.container import Spec


Specs = dict[str, "Spec"]
"""Dtype and shape of each component of a matrix."""


class Codec(ABC):
    """A lossy compression step for one matrix."""

    name: ClassVar[str]
    """Name of the codec in a spec such as "block:8"."""
    usage: ClassVar[str]
    """Syntax for help and error messages, such as block:K."""
    structural: ClassVar[bool]
    """Whether the codec chooses which values are kept, rather than how they are stored."""
    form: ClassVar[type[Matrix] | None] = None
    """Form of the compressed matrix, or None if the codec does not change the form."""

    @classmethod
    @abstractmethod
    def parse(cls, argument: str | None) -> Self:
        """Builds the codec from its argument in a spec, such as "8" in "block:8".

        Args:
            argument: The text after the colon, or None if the spec has no colon.

        Raises:
            KfacpackError: If the argument is not valid.
        """

    @abstractmethod
    def specs(self, matrix: Matrix) -> Specs | None:
        """Returns the dtype and shape of each component of the compressed matrix, without compressing the matrix.

        Args:
            matrix: The matrix, in the form in which it is saved. Its values are not read.

        Returns:
            Dtype and shape by component name, or None if the codec cannot be applied to the matrix.
        """

    @abstractmethod
    def encode(self, matrix: Matrix) -> Matrix:
        """Returns the compressed matrix. The codec must be applicable: `specs` must not return None for the matrix."""

    @classmethod
    def argument_error(cls, argument: str | None, expected: str) -> KfacpackError:
        """Returns the error to raise if the argument of the codec is not valid. Its message ends with `expected`."""
        spec = cls.name if argument is None else f"{cls.name}:{argument}"
        return KfacpackError(f"invalid codec {spec!r}; expected {cls.usage}, {expected}")


def parse_count(argument: str | None) -> int | None:
    """Parses an integer from 1 to 9,999,999. Returns None if the text is not such an integer."""
    return int(argument) if argument and re.fullmatch(r"[1-9][0-9]{0,6}", argument) else None


def parse_percentage(argument: str | None) -> float | None:
    """Parses a percentage above 0% and at most 100%.

    Returns a fraction, such as 0.125 for "12.5%", or None if the text is not such a percentage.
    """
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)%", argument or "")
    fraction = float(match[1]) / 100 if match else 0.0
    return fraction if 0 < fraction <= 1 else None


def float_type(matrix: Matrix) -> torch.dtype:
    """Returns the dtype of a matrix if it is a floating-point dtype, and otherwise float32."""
    return matrix.dtype if matrix.dtype.is_floating_point else torch.float32


def copy_counts(matrix: Matrix, source: Matrix) -> Matrix:
    """Copies the recorded numbers of examples and positions from `source` to `matrix`, and returns `matrix`."""
    matrix.examples, matrix.positions = source.examples, source.positions
    return matrix


@dataclass(frozen=True)
class BlockCodec(Codec):
    """`block:K`: keeps K diagonal blocks."""

    count: int
    """Number of blocks."""

    name = "block"
    usage = "block:K"
    structural = True
    form = BlockDiagonal

    @classmethod
    def parse(cls, argument: str | None) -> BlockCodec:
        """Builds the codec from the number of blocks, such as "8"."""
        if (count := parse_count(argument)) is None:
            raise cls.argument_error(argument, "where K is the number of diagonal blocks; for example, block:8")
        return cls(count)

    def __str__(self) -> str:
        return f"block:{self.count}"

    def specs(self, matrix: Matrix) -> Specs | None:
        """Returns the dtype and shape of each component, or None if the matrix has fewer than `count` rows."""
        if self.count > matrix.side:
            return None
        shape = (self.count, triangle_length(widest_block(matrix.side, self.count)))
        return {"data": (FILE_TYPES[float_type(matrix)], shape)}

    def encode(self, matrix: Matrix) -> Matrix:
        """Returns a `BlockDiagonal` matrix with the diagonal blocks of the matrix."""
        full = matrix.dense(float_type(matrix))
        return copy_counts(BlockDiagonal.from_dense(full, self.count, psd=matrix.psd), matrix)


@dataclass(frozen=True)
class PruneCodec(Codec):
    """`prune:P%`: keeps the entries of largest magnitude."""

    fraction: float
    """Fraction of the entries of the lower triangle to keep."""

    name = "prune"
    usage = "prune:P%"
    structural = True
    form = Sparse

    @classmethod
    def parse(cls, argument: str | None) -> PruneCodec:
        """Builds the codec from the percentage of entries to keep, such as "15%"."""
        if (fraction := parse_percentage(argument)) is None:
            raise cls.argument_error(argument, "where P is the percentage of entries to keep; for example, prune:15%")
        return cls(fraction)

    def __str__(self) -> str:
        return f"prune:{100 * self.fraction:.8g}%"

    def specs(self, matrix: Matrix) -> Specs | None:
        """Returns the dtype and shape of each component, or None if no entry would be kept."""
        count = round(self.fraction * triangle_length(matrix.side))
        if not count:
            return None
        return {
            "data": (FILE_TYPES[float_type(matrix)], (count,)),
            "rows": ("I32", (count,)),
            "columns": ("I32", (count,)),
        }

    def encode(self, matrix: Matrix) -> Matrix:
        """Returns a `Sparse` matrix with the entries of largest magnitude."""
        return copy_counts(Sparse.from_dense(matrix.dense(float_type(matrix)), self.fraction), matrix)


@dataclass(frozen=True)
class SvdCodec(Codec):
    """`svd:R` or `svd:P%`: keeps the eigenvalues of largest magnitude and their eigenvectors."""

    size: int | float
    """An int is the rank. A float is the rank as a fraction of the side length of the matrix."""

    name = "svd"
    usage = "svd:R or svd:P%"
    structural = True
    form = LowRank

    @classmethod
    def parse(cls, argument: str | None) -> SvdCodec:
        """Builds the codec from a rank, such as "32", or from a percentage of the side length, such as "25%"."""
        size = parse_count(argument) or parse_percentage(argument)
        if size is None:
            raise cls.argument_error(
                argument,
                "where R is the rank and P is the rank as a percentage of the side length of the matrix; for example, "
                "svd:32 or svd:25%",
            )
        return cls(size)

    def __str__(self) -> str:
        return f"svd:{self.size}" if isinstance(self.size, int) else f"svd:{100 * self.size:.8g}%"

    def rank(self, side: int) -> int:
        """Returns the rank of the approximation of a (side, side) matrix."""
        return self.size if isinstance(self.size, int) else ceil(self.size * side)

    def specs(self, matrix: Matrix) -> Specs | None:
        """Returns the dtype and shape of each component, or None if the rank exceeds the side length of the matrix."""
        rank = self.rank(matrix.side)
        if rank > matrix.side:
            return None
        dtype = FILE_TYPES[_vector_type(matrix)]
        return {"data": (dtype, (matrix.side, rank)), "weights": (dtype, (rank,))}

    def encode(self, matrix: Matrix) -> Matrix:
        """Returns a `LowRank` matrix with the eigenvalues of largest magnitude and their eigenvectors."""
        rank = self.rank(matrix.side)
        values, vectors = matrix.leading_eigenpairs(width_for(matrix.side, rank))
        low_rank = LowRank.from_spectrum(values, vectors, rank, _vector_type(matrix), psd=matrix.psd)
        return copy_counts(low_rank, matrix)


def _vector_type(matrix: Matrix) -> torch.dtype:
    """Returns the dtype in which eigenvectors are stored: float64 for a float64 matrix, and otherwise float32."""
    return torch.float64 if matrix.dtype is torch.float64 else torch.float32


class NumberCodec(Codec):
    """Base class of codecs that choose how values are stored. They take no argument."""

    structural = False

    @classmethod
    def parse(cls, argument: str | None) -> Self:
        """Builds the codec.

        Args:
            argument: None, because the codec takes no argument.

        Raises:
            KfacpackError: If `argument` is not None.
        """
        if argument is not None:
            raise cls.argument_error(argument, "which takes no argument")
        return cls()

    def __str__(self) -> str:
        return self.name


class HalfCodec(NumberCodec):
    """Base class of codecs that store each value in two bytes."""

    file_type: str
    """Name of the dtype of the values in safetensors files."""

    def specs(self, matrix: Matrix) -> Specs | None:
        """Returns the dtype and shape of each component: `data` takes two bytes per value, and `scale` is omitted."""
        specs = {name: spec for name, spec in matrix.components.specs.items() if name != "scale"}
        return {**specs, "data": (self.file_type, specs["data"][1])}


@dataclass(frozen=True)
class Fp16Codec(HalfCodec):
    """`fp16`: stores the values of a matrix in float16, or in bfloat16 if this is more accurate."""

    name = "fp16"
    usage = "fp16"
    file_type = "F16"

    def encode(self, matrix: Matrix) -> Matrix:
        """Returns the matrix in float16, or in bfloat16 if a value is out of range or float16 is less accurate."""
        stored = matrix.for_storage()
        values = stored.float_values(torch.float32)
        if values.numel() and float(values.abs().amax()) <= torch.finfo(torch.float16).max:
            fp16_error, bf16_error = (
                float((values - values.to(dtype).float()).norm()) for dtype in (torch.float16, torch.bfloat16)
            )
            if fp16_error <= bf16_error:
                return stored.rounded(torch.float16)
        return stored.rounded(torch.bfloat16)


@dataclass(frozen=True)
class Bf16Codec(HalfCodec):
    """`bf16`: stores values in bfloat16."""

    name = "bf16"
    usage = "bf16"
    file_type = "BF16"

    def encode(self, matrix: Matrix) -> Matrix:
        """Returns the matrix in bfloat16."""
        return matrix.for_storage().rounded(torch.bfloat16)


@dataclass(frozen=True)
class Int8Codec(NumberCodec):
    """`int8`: stores values in int8 with one scale factor per stored row."""

    name = "int8"
    usage = "int8"

    def specs(self, matrix: Matrix) -> Specs | None:
        """Returns the dtype and shape of each component, or None if the form of the matrix has no int8 variant."""
        if not matrix.may_be_int8:
            return None
        shape = matrix.components.specs["data"][1]
        scale = LAYOUTS[matrix.form].shapes(matrix.side, shape)["scale"]
        return {**matrix.components.specs, "data": ("I8", shape), "scale": ("F32", scale)}

    def encode(self, matrix: Matrix) -> Matrix:
        """Returns the matrix with its values in int8 and one scale factor per stored row."""
        return matrix.for_storage().quantized()


CODECS: dict[str, type[Codec]] = {
    codec.name: codec for codec in (BlockCodec, SvdCodec, PruneCodec, Int8Codec, Fp16Codec, Bf16Codec)
}
"""Codec classes by name."""

EXAMPLES = "block:8+int8, svd:32+fp16, prune:15% or int8"
"""Examples of specs for help and error messages."""


@dataclass(frozen=True)
class CodecChain:
    """A chain of at most one structural codec, followed by at most one number codec.

    An empty chain leaves every matrix unchanged.
    """

    steps: tuple[Codec, ...] = ()
    """The codecs, in the order in which they are applied."""

    @classmethod
    def parse(cls, spec: str) -> CodecChain:
        """Parses a spec such as "block:8+int8".

        Args:
            spec: Codecs joined by +.

        Returns:
            The chain.

        Raises:
            KfacpackError: If the spec is not a string, or if it contains an unknown codec, an invalid argument or an
                invalid combination.
        """
        if not isinstance(spec, str):
            raise KfacpackError(f"expected a codec string, such as {EXAMPLES}; got {type(spec).__name__}")
        supported = ", ".join(codec.usage for codec in CODECS.values())
        steps = []
        for part in spec.strip().split("+"):
            name, colon, argument = part.strip().partition(":")
            if name not in CODECS:
                raise KfacpackError(
                    f"unknown codec {part!r} in {spec!r}; expected codecs joined by +, such as {EXAMPLES}. "
                    f"Available codecs: {supported}"
                )
            steps.append(CODECS[name].parse(argument if colon else None))
        if [step.structural for step in steps] not in ([True], [False], [True, False]):
            structures, numbers = (
                ", ".join(codec.usage for codec in CODECS.values() if codec.structural is structural)
                for structural in (True, False)
            )
            expected = f"expected at most one of {structures}, followed by at most one of {numbers}"
            raise KfacpackError(f"invalid combination of codecs {spec!r}; {expected}")
        return cls(tuple(steps))

    def __str__(self) -> str:
        return "+".join(map(str, self.steps)) or "none"

    @property
    def structure(self) -> Codec | None:
        """The structural codec, or None if the chain has no structural codec."""
        return next((step for step in self.steps if step.structural), None)

    def encode(self, matrix: Matrix) -> tuple[CodecChain, Matrix]:
        """Compresses a matrix.

        Steps that do not make the matrix smaller are skipped. Structural codecs are not applied to diagonal matrices.

        Args:
            matrix: The matrix to compress.

        Returns:
            A chain of the steps that were applied, and the compressed matrix. If no step was applied, the matrix is
            returned unchanged.
        """
        encoded, applied = matrix, []
        for step in self.steps:
            if self._specs_if_smaller(step, encoded) is not None:
                encoded = step.encode(encoded)
                applied.append(step)
        return CodecChain(tuple(applied)), encoded

    def shape_of(self, matrix: Matrix) -> Matrix:
        """Returns a placeholder with the form, dtypes and shapes of the compressed matrix, but without its values.

        The placeholder is used to determine the size of the compressed matrix without compressing the matrix.

        Args:
            matrix: The matrix to compress. Its values are not read.
        """
        encoded = matrix
        for step in self.steps:
            if (specs := self._specs_if_smaller(step, encoded)) is not None:
                encoded = (step.form or type(encoded.for_storage()))(matrix.side, SpecTensors(specs), psd=matrix.psd)
        return encoded

    @staticmethod
    def _specs_if_smaller(step: Codec, matrix: Matrix) -> Specs | None:
        """Returns the dtype and shape of each component that a step produces.

        Returns None if the step cannot be applied to the matrix or does not make it smaller.
        """
        if step.structural and matrix.structure == "diagonal":
            return None
        stored = matrix.for_storage()
        specs = step.specs(stored)
        return specs if specs is not None and _nbytes(specs) < stored.nbytes else None


def _nbytes(specs: Specs) -> int:
    return sum(map(nbytes_of, specs.values()))
