"""Running sums that become matrices: in float32 at least, in place, and never larger than they have to be.

Shapes: rows are (P, n). A sum knows its `tensors`, to be stored, restored and added up between processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import Tensor

from kfacpack.curvature.matrices.components import FILE_TYPES, LazyTensors, pack_rows
from kfacpack.curvature.matrices.dense import Packed
from kfacpack.curvature.matrices.matrix import Matrix
from kfacpack.curvature.matrices.structured import BlockDiagonal, Diagonal, spans
from kfacpack.errors import KfacpackError
from kfacpack.format.schema import triangle_length, widest_block

TILE, STRIP = 768, 192
"""A triangle is summed in square tiles, those on the diagonal in strips of rows: that wastes a few percent above the
diagonal, and keeps each product large enough to be fast. Columns that lie apart in memory make products slow, too, so
that each tile's columns are copied together first."""


class RunningSum(ABC):
    side: int

    @abstractmethod
    def add(self, rows: Tensor) -> None: ...

    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """Everything summed so far, to be changed in place."""

    @abstractmethod
    def is_finite(self) -> bool: ...

    @abstractmethod
    def finish(self, divisor: float, *, examples: int, positions: int | None) -> Matrix:
        """The sum divided by `divisor`, as a matrix on the CPU. The sum is used up."""

    @property
    @abstractmethod
    def stored_bytes(self) -> int:
        """What the finished matrix will take in a bundle."""


class TriangleSum:
    """The lower triangle of Σ x xᵀ, x of n numbers."""

    def __init__(self, side: int, dtype: torch.dtype, device: torch.device) -> None:
        self._tiles = spans(side, ceil(side / TILE)) if side else []
        self._parts: list[PackedBlock] = []
        for number, (start, stop) in enumerate(self._tiles):
            for other, (left, right) in enumerate(self._tiles[:number]):
                values = torch.zeros((stop - start, right - left), dtype=dtype, device=device)
                self._parts.append(PackedBlock(start, left, values, number, other, 0))
            for first, last in spans(stop - start, max(1, round((stop - start) / STRIP))):
                values = torch.zeros((last - first, last), dtype=dtype, device=device)
                self._parts.append(PackedBlock(start + first, start, values, number, number, first))

    def add(self, rows: Tensor) -> None:
        columns = [rows[:, start:stop].contiguous() for start, stop in self._tiles]
        for part in self._parts:
            height, width = part.values.shape
            own, others = columns[part.tile][:, part.first : part.first + height], columns[part.other][:, :width]
            if part.values.device == rows.device:
                part.values.addmm_(own.T, others)
            else:
                part.values.add_((own.T @ others).to(part.values.device))

    def tensors(self) -> Iterator[Tensor]:
        return (part.values for part in self._parts)

    def is_finite(self) -> bool:
        # |m[i,j]| is at most the larger of m[i,i] and m[j,j], so what overflows does so on the diagonal.
        diagonals = (part.values[:, part.first :].diagonal() for part in self._parts if part.tile == part.other)
        return all(bool(diagonal.isfinite().all()) for diagonal in diagonals)

    def pack_into(self, packed: Tensor, divisor: float) -> None:
        """Divided, to its place in a packed triangle. Each part is given back as soon as it is there."""
        while self._parts:
            part = self._parts.pop()
            pack_rows(part.values.div_(divisor).cpu(), part.row, part.left, packed)


@dataclass(frozen=True)
class PackedBlock:
    """Some rows of a triangle, from the column `left` on: columns of one tile times those of another."""

    row: int
    left: int
    values: Tensor
    tile: int
    other: int
    first: int
    """Which column of its tile the first row belongs to."""


class GramSum(RunningSum):
    """Σ x xᵀ over rows x, of which only diagonal blocks are kept, and of those one triangle.

    With `ones`, a one is joined to every row. It never enters a product: what it adds to the matrix is the sum of the
    rows, and their number.
    """

    def __init__(
        self, width: int, dtype: torch.dtype, device: torch.device, ones: bool = False, blocks: int = 1
    ) -> None:
        self.side = width + ones
        self.blocks = blocks
        if not 1 <= blocks <= self.side:
            raise KfacpackError(f"a matrix of side {self.side} has 1 to {self.side} diagonal blocks, not {blocks}")
        self._dtype = dtype
        self._spans = [(left, min(right, width)) for left, right in spans(self.side, blocks)]
        self._triangles = [TriangleSum(right - left, dtype, device) for left, right in self._spans]
        left, right = self._spans[-1]
        self._sums = torch.zeros(right - left, dtype=dtype, device=device) if ones else None
        self._count = torch.zeros((), dtype=torch.float64)

    def add(self, rows: Tensor) -> None:
        rows = rows.to(self._dtype)
        for (left, right), each in zip(self._spans, self._triangles, strict=True):
            each.add(rows[:, left:right])
        if self._sums is not None:
            self._sums.add_(rows[:, self._spans[-1][0] :].sum(0).to(self._sums.device))
            self._count.add_(len(rows))

    def tensors(self) -> Iterator[Tensor]:
        for each in self._triangles:
            yield from each.tensors()
        if self._sums is not None:
            yield from (self._sums, self._count)

    @property
    def stored_bytes(self) -> int:
        return prod(self._packed_shape) * self._dtype.itemsize

    def is_finite(self) -> bool:
        return all(each.is_finite() for each in self._triangles)

    def finish(self, divisor: float, *, examples: int, positions: int | None) -> Matrix:
        form: type[Packed | BlockDiagonal] = Packed if self.blocks == 1 else BlockDiagonal
        shape = self._packed_shape if self.blocks > 1 else self._packed_shape[1:]
        # Whoever saves the matrix has to read it once more anyway; who does not need it is spared the work.
        components = LazyTensors((FILE_TYPES[self._dtype], shape), lambda: self._packed(divisor).reshape(shape))
        return form(self.side, components, examples=examples, positions=positions)

    @property
    def _packed_shape(self) -> tuple[int, int]:
        return self.blocks, triangle_length(widest_block(self.side, self.blocks))

    def _packed(self, divisor: float) -> Tensor:
        # Every number is put in its place, but those that fill up the shorter of several blocks.
        packed = (torch.empty if self.blocks == 1 else torch.zeros)(self._packed_shape, dtype=self._dtype)
        for each, target in zip(self._triangles, packed, strict=True):
            each.pack_into(target, divisor)
        if self._sums is not None:
            start, width = triangle_length(len(self._sums)), len(self._sums)
            packed[-1, start : start + width] = self._sums.cpu() / divisor
            packed[-1, start + width] = self._count / divisor
        return packed


class DiagonalSum(RunningSum):
    """A sum that is a diagonal matrix, or only the diagonal of one."""

    def __init__(self, side: int, dtype: torch.dtype, device: torch.device) -> None:
        self.side = side
        self._values = torch.zeros(side, dtype=dtype, device=device)

    def _add(self, values: Tensor) -> None:
        self._values.add_(values.to(device=self._values.device, dtype=self._values.dtype))

    def tensors(self) -> Iterator[Tensor]:
        yield self._values

    @property
    def stored_bytes(self) -> int:
        return self._values.nbytes

    def is_finite(self) -> bool:
        return bool(self._values.isfinite().all())

    def finish(self, divisor: float, *, examples: int, positions: int | None) -> Matrix:
        return Diagonal.of(self._values.cpu().div_(divisor), examples=examples, positions=positions)


class SquareSum(DiagonalSum):
    """Σ x² over rows x, number by number."""

    def add(self, rows: Tensor) -> None:
        self._add(rows.to(self._values.dtype).square().sum(0))


class CountSum(DiagonalSum):
    """How often each index occurred: Σ x xᵀ of one-hot rows, given as (P,) indices; negative ones are nobody."""

    def add(self, rows: Tensor) -> None:
        self._add(torch.bincount(rows[rows >= 0], minlength=self.side))
