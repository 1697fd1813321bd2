"""Running sums over rows, from which the matrices of a curvature are computed.

Sums are updated in place, in float32 or a wider dtype. Only one triangle of a symmetric matrix is stored. Rows are
passed as a tensor of shape (P, n). The `tensors` of a sum can be saved, restored, and added up over processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from kfacpack.curvature.matrices.components import FILE_TYPES, LazyTensors, MatrixTensors, SpecTensors, pack_rows
from kfacpack.curvature.matrices.dense import Packed, aligned
from kfacpack.curvature.matrices.matrix import Matrix
from kfacpack.curvature.matrices.structured import BlockDiagonal, Diagonal, spans
from kfacpack.errors import KfacpackError
from kfacpack.format.schema import triangle_length, widest_block

TILE, STRIP = 768, 192
"""Maximum number of rows of the tiles into which a triangle is divided, and approximate number of rows of the strips
into which tiles on the diagonal are divided. Some elements above the diagonal are computed as well, but the products
are large enough to be fast. The columns of each tile are first copied to contiguous memory, because products of strided
columns are slow."""


class RunningSum(ABC):
    """A running sum over rows, from which a matrix is computed at the end."""

    side: int
    """Number of rows and columns of the matrix."""

    @abstractmethod
    def add(self, rows: Tensor, count: Tensor | None = None) -> None:
        """Adds rows, (P, side), or one-hot rows that are passed as indices, (P,), to the sum.

        Args:
            rows: Rows to add.
            count: Number of rows that are not padding. Padding rows must be zero. Defaults to P.
        """

    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """Yields the tensors that contain the sum. They may be modified in place."""

    @abstractmethod
    def is_finite(self) -> bool:
        """Returns whether the sum contains neither NaN nor Inf."""

    @abstractmethod
    def finish(self, divisor: float, *, examples: int, positions: int | None) -> Matrix:
        """Returns the sum divided by `divisor` as a matrix on the CPU. The sum cannot be used afterwards.

        Args:
            divisor: Number by which the sum is divided.
            examples: Number of examples, which is recorded in the matrix.
            positions: Number of positions, which is recorded in the matrix.
        """

    @abstractmethod
    def shape(self) -> Matrix:
        """Returns a placeholder that has the dtype and shape of the finished matrix, but no values."""


class TriangleSum:
    """The lower triangle of the sum Σ x xᵀ over rows x.

    Args:
        side: Number of elements of x.
        dtype: Dtype of the sum.
        device: Device of the sum.
    """

    def __init__(self, side: int, dtype: torch.dtype, device: torch.device) -> None:
        self._tiles = spans(side, ceil(side / TILE)) if side else []
        places: list[tuple[int, int, int, int, int, int, int]] = []
        for tile, (start, stop) in enumerate(self._tiles):
            for other, (left, right) in enumerate(self._tiles[:tile]):
                places.append((start, left, stop - start, right - left, tile, other, 0))
            for first, last in spans(stop - start, max(1, round((stop - start) / STRIP))):
                places.append((start + first, start, last - first, last, tile, tile, first))
        # One buffer, which the allocator can reuse as a whole. With one tensor per part, freed parts left gaps that
        # were too small for the packed matrices, and memory use doubled while the matrices were written.
        sizes = [aligned(height * width) for _, _, height, width, *_ in places]
        parts = torch.zeros(sum(sizes), dtype=dtype, device=device).split(sizes) if sizes else ()
        self._parts = [
            PackedBlock(row, left, part[: height * width].view(height, width), tile, other, first)
            for (row, left, height, width, tile, other, first), part in zip(places, parts, strict=True)
        ]

    def add(self, rows: Tensor) -> None:
        """Adds the lower triangle of Σ x xᵀ for rows x, (P, side)."""
        columns = [rows[:, start:stop].contiguous() for start, stop in self._tiles]
        for part in self._parts:
            height, width = part.values.shape
            left, right = columns[part.tile][:, part.first : part.first + height], columns[part.other][:, :width]
            if part.values.device == rows.device:
                part.values.addmm_(left.T, right)
            else:
                part.values.add_((left.T @ right).to(part.values.device))

    def tensors(self) -> Iterator[Tensor]:
        """Yields the tensors that contain the sum. They may be modified in place."""
        return (part.values for part in self._parts)

    def is_finite(self) -> bool:
        """Returns whether the sum contains neither NaN nor Inf."""
        # |m[i,j]| is at most the larger of m[i,i] and m[j,j], so an overflow shows on the diagonal.
        diagonals = (part.values[:, part.first :].diagonal() for part in self._parts if part.tile == part.other)
        return all(bool(diagonal.isfinite().all()) for diagonal in diagonals)

    def pack_into(self, packed: Tensor, divisor: float) -> None:
        """Writes the sum, divided by `divisor`, to the packed triangle `packed`, and frees the memory of the sum."""
        while self._parts:
            part = self._parts.pop()
            pack_rows(part.values.div_(divisor).cpu(), part.row, part.left, packed)


@dataclass(frozen=True)
class PackedBlock:
    """A rectangular part of a triangle: the products of columns from the tiles with indices `tile` and `other`."""

    row: int
    """Index of the part's first row in the triangle."""
    left: int
    """Index of the part's first column in the triangle."""
    values: Tensor
    tile: int
    other: int
    first: int
    """Index, within the tile `tile`, of the column from which the part's first row is computed."""


class GramSum(RunningSum):
    """The lower triangles of the diagonal blocks of the sum Σ x xᵀ over rows x.

    Args:
        width: Number of elements of x.
        dtype: Dtype of the sum.
        device: Device of the sum.
        ones: Whether to append a one to every row. The ones are not stored: the sum of their products with the other
            elements is the sum of the rows, and the sum of their squares is the number of rows.
        blocks: Number of diagonal blocks.

    Raises:
        KfacpackError: If the matrix is too small for this number of blocks.
    """

    def __init__(
        self, width: int, dtype: torch.dtype, device: torch.device, ones: bool = False, blocks: int = 1
    ) -> None:
        self.side = width + ones
        self.blocks = blocks
        if not 1 <= blocks <= self.side:
            expected = f"expected a number of diagonal blocks from 1 to {self.side}"
            raise KfacpackError(f"{expected} for a matrix of side length {self.side}, got {blocks}")
        self._dtype = dtype
        self._spans = [(left, min(right, width)) for left, right in spans(self.side, blocks)]
        self._triangles = [TriangleSum(right - left, dtype, device) for left, right in self._spans]
        left, right = self._spans[-1]
        self._sums = torch.zeros(right - left, dtype=dtype, device=device) if ones else None
        self._count = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, rows: Tensor, count: Tensor | None = None) -> None:
        """Adds the products x xᵀ for all rows x, (P, width)."""
        rows = rows.to(self._dtype)
        for (left, right), triangle in zip(self._spans, self._triangles, strict=True):
            triangle.add(rows[:, left:right])
        if self._sums is not None:
            self._sums.add_(rows[:, self._spans[-1][0] :].sum(0).to(self._sums.device))
            self._count.add_(len(rows) if count is None else count.to(self._count.device))

    def tensors(self) -> Iterator[Tensor]:
        """Yields the tensors that contain the sum. They may be modified in place."""
        for triangle in self._triangles:
            yield from triangle.tensors()
        if self._sums is not None:
            yield from (self._sums, self._count)

    def shape(self) -> Matrix:
        """Returns a placeholder that has the dtype and shape of the finished matrix, but no values."""
        return self._matrix(SpecTensors({"data": (FILE_TYPES[self._dtype], self._data_shape)}))

    def is_finite(self) -> bool:
        """Returns whether the sum contains neither NaN nor Inf."""
        return all(triangle.is_finite() for triangle in self._triangles)

    def finish(self, divisor: float, *, examples: int, positions: int | None) -> Matrix:
        """Returns the sum divided by `divisor` as a matrix, whose values are packed when they are first accessed."""
        shape = self._data_shape
        # Packed on demand, because a matrix is read only once when it is saved, and may not be read at all otherwise.
        components = LazyTensors((FILE_TYPES[self._dtype], shape), lambda: self._packed(divisor).reshape(shape))
        return self._matrix(components, examples=examples, positions=positions)

    def _matrix(self, components: MatrixTensors, examples: int | None = None, positions: int | None = None) -> Matrix:
        form: type[Packed | BlockDiagonal] = Packed if self.blocks == 1 else BlockDiagonal
        return form(self.side, components, examples=examples, positions=positions)

    @property
    def _data_shape(self) -> tuple[int, ...]:
        return self._packed_shape if self.blocks > 1 else self._packed_shape[1:]

    @property
    def _packed_shape(self) -> tuple[int, int]:
        return self.blocks, triangle_length(widest_block(self.side, self.blocks))

    def _packed(self, divisor: float) -> Tensor:
        # Every element is written, except for the padding of blocks that are smaller than the widest block.
        packed = (torch.empty if self.blocks == 1 else torch.zeros)(self._packed_shape, dtype=self._dtype)
        for triangle, target in zip(self._triangles, packed, strict=True):
            triangle.pack_into(target, divisor)
        if self._sums is not None:
            start, width = triangle_length(len(self._sums)), len(self._sums)
            packed[-1, start : start + width] = self._sums.cpu() / divisor
            packed[-1, start + width] = self._count.cpu().double() / divisor
        return packed


class DiagonalSum(RunningSum):
    """Base class of running sums that store only the diagonal of the matrix.

    Args:
        side: Number of elements of the diagonal.
        dtype: Dtype of the sum.
        device: Device of the sum.
    """

    def __init__(self, side: int, dtype: torch.dtype, device: torch.device) -> None:
        self.side = side
        self._values = torch.zeros(side, dtype=dtype, device=device)

    def _add(self, values: Tensor) -> None:
        self._values.add_(values.to(device=self._values.device, dtype=self._values.dtype))

    def tensors(self) -> Iterator[Tensor]:
        """Yields the tensors that contain the sum. They may be modified in place."""
        yield self._values

    def shape(self) -> Matrix:
        """Returns a placeholder that has the dtype and shape of the finished matrix, but no values."""
        return Diagonal(self.side, SpecTensors({"data": (FILE_TYPES[self._values.dtype], (self.side,))}))

    def is_finite(self) -> bool:
        """Returns whether the sum contains neither NaN nor Inf."""
        return bool(self._values.isfinite().all())

    def finish(self, divisor: float, *, examples: int, positions: int | None) -> Matrix:
        """Returns the sum divided by `divisor` as a diagonal matrix."""
        return Diagonal.of(self._values.cpu().div_(divisor), examples=examples, positions=positions)


class SquareSum(DiagonalSum):
    """The sum of the elementwise squares of rows x, which is the diagonal of Σ x xᵀ."""

    def add(self, rows: Tensor, count: Tensor | None = None) -> None:
        """Adds the elementwise squares of rows, (P, side)."""
        self._add(rows.to(self._values.dtype).square().sum(0))


class CountSum(DiagonalSum):
    """The sum Σ x xᵀ over one-hot rows x: a diagonal matrix that contains the number of rows for each index.

    The rows are passed as indices. Negative indices are ignored.
    """

    def add(self, rows: Tensor, count: Tensor | None = None) -> None:
        """Adds one-hot rows, given as indices, (P,)."""
        # bincount and rows[rows >= 0] are not used, because both synchronise with a GPU. Element 0 counts index -1.
        indices = rows.to(torch.int64).clamp(min=-1) + 1
        counts = torch.zeros(self.side + 1, dtype=torch.int64, device=rows.device)
        self._add(counts.scatter_add_(0, indices, torch.ones_like(indices))[1:])
