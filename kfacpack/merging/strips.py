"""Access to several matrices in parallel, one strip of entries at a time, regardless of their forms.

Matrices of the same side share a layout: the lower triangles of K diagonal blocks (K = 1 for a full matrix), or their
diagonals. A strip is a range of rows of one triangle, or a range of diagonal entries, and contains the same
entries of every matrix. Sums and inner products therefore never need more of a matrix than one strip in memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kfacpack.curvature.matrices.dense import Packed
from kfacpack.curvature.matrices.matrix import Matrix
from kfacpack.curvature.matrices.structured import BlockDiagonal, Diagonal, spans
from kfacpack.format.schema import triangle_length, widest_block

if TYPE_CHECKING:
    from kfacpack.curvature.matrices.components import MatrixTensors
    from kfacpack.format.schema import Shape

    FloatArray = np.ndarray[Any, np.dtype[np.float64]]


STRIP_ENTRIES = 2**20
"""Total number of entries of all matrices in memory at a time, or one row of each matrix if that is more.

Memory use does not grow with the number of matrices, up to about a hundred of them."""


@dataclass(frozen=True)
class Strip:
    """A range of elements of one triangle or diagonal."""

    block: int
    """Index of the triangle; 0 for a diagonal."""
    start: int
    """Index of the first element."""
    stop: int
    """Index after the last element."""


class StripLayout(ABC):
    """The common layout of matrices of the same side: the order of their entries, and which of them occur twice."""

    side: int
    """n of the (n, n) matrices."""
    shape: Shape
    """Shape of the component `data` of a matrix in this layout."""

    @abstractmethod
    def strips(self, limit: int) -> Iterator[Strip]:
        """Yields strips that cover the matrix in the order of its `data`: at most `limit` elements each, or one row."""

    @abstractmethod
    def is_strip(self, strip: Strip) -> bool:
        """Returns whether the elements are a range that `read` supports."""

    @abstractmethod
    def read(self, matrix: Matrix, strip: Strip) -> Tensor:
        """Returns a strip of one matrix in a floating-point dtype; it may share memory with the matrix."""

    @abstractmethod
    def diagonal(self, strip: Strip) -> Tensor:
        """Returns the indices of a strip's diagonal elements; all other elements occur twice in the matrix."""

    @abstractmethod
    def make_matrix(
        self, components: MatrixTensors, *, psd: bool, examples: int | None = None, positions: int | None = None
    ) -> Matrix:
        """Returns a matrix in this layout that has these components."""


class DiagonalStrips(StripLayout):
    """The diagonals of diagonal matrices. A strip is any range of elements."""

    def __init__(self, side: int):
        self.side = side
        self.shape = (side,)

    def strips(self, limit: int) -> Iterator[Strip]:
        """Yields strips that cover the matrix."""
        for start in range(0, self.side, limit):
            yield Strip(0, start, min(start + limit, self.side))

    def is_strip(self, strip: Strip) -> bool:
        """Returns whether the elements are a valid strip."""
        return strip.stop <= self.side

    def read(self, matrix: Matrix, strip: Strip) -> Tensor:
        """Returns a strip of one matrix."""
        return matrix.components.span("data", strip.start, strip.stop)

    def diagonal(self, strip: Strip) -> Tensor:
        """Returns the indices of a strip's diagonal elements."""
        return torch.arange(strip.stop - strip.start)

    def make_matrix(
        self, components: MatrixTensors, *, psd: bool, examples: int | None = None, positions: int | None = None
    ) -> Matrix:
        """Returns a matrix in this layout that has these components."""
        return Diagonal(self.side, components, psd=psd, examples=examples, positions=positions)


class TriangleStrips(StripLayout):
    """The lower triangles of `count` diagonal blocks. A strip is a range of whole rows of one triangle."""

    def __init__(self, side: int, count: int = 1):
        self.side, self.count = side, count
        self._width = widest_block(side, count)
        self.shape = (count, triangle_length(self._width)) if count > 1 else (triangle_length(side),)

    def strips(self, limit: int) -> Iterator[Strip]:
        """Yields strips that cover the matrix."""
        for block in range(self.count):
            first = 0
            while first < self._width:
                last = first + 1
                while last < self._width and triangle_length(last + 1) - triangle_length(first) <= limit:
                    last += 1
                yield Strip(block, triangle_length(first), triangle_length(last))
                first = last

    def is_strip(self, strip: Strip) -> bool:
        """Returns whether the elements are a valid strip."""
        first, last = _row_range(strip)
        return (triangle_length(first), triangle_length(last)) == (strip.start, strip.stop) and last <= self._width

    def read(self, matrix: Matrix, strip: Strip) -> Tensor:
        """Returns a strip of one matrix."""
        first, last = _row_range(strip)
        if self.count > 1:
            return _read_triangle(matrix, strip.block, first, last)
        return READERS.get(matrix.form, _read_dense)(matrix, first, last)

    def diagonal(self, strip: Strip) -> Tensor:
        """Returns the indices of a strip's diagonal elements."""
        rows = torch.arange(*_row_range(strip))
        return rows * (rows + 3) // 2 - strip.start

    def make_matrix(
        self, components: MatrixTensors, *, psd: bool, examples: int | None = None, positions: int | None = None
    ) -> Matrix:
        """Returns a matrix in this layout that has these components."""
        form: type[Packed | BlockDiagonal] = BlockDiagonal if self.count > 1 else Packed
        return form(self.side, components, psd=psd, examples=examples, positions=positions)


def layout_of(matrices: Sequence[Matrix]) -> StripLayout:
    """Returns the smallest layout that represents all of the matrices exactly."""
    side, forms = matrices[0].side, {matrix.form for matrix in matrices}
    if forms == {Diagonal.form}:
        return DiagonalStrips(side)
    counts = {matrix.components.specs["data"][1][0] for matrix in matrices}
    if forms == {BlockDiagonal.form} and len(counts) == 1:
        return TriangleStrips(side, counts.pop())
    return TriangleStrips(side)


def iterate_strips(layout: StripLayout, matrices: Sequence[Matrix]) -> Iterator[tuple[Strip, FloatArray]]:
    """Iterates over the strips of T matrices.

    Args:
        layout: Their common layout.
        matrices: T matrices.

    Yields:
        The strip and its entries, of shape (T, length). The array is reused for the next strip.
    """
    max_length = max(STRIP_ENTRIES // len(matrices), layout.side)
    buffer = np.empty(len(matrices) * max_length)
    for strip in layout.strips(max_length):
        yield strip, write_strip(layout, matrices, strip, buffer)


def write_strip(layout: StripLayout, matrices: Sequence[Matrix], strip: Strip, buffer: FloatArray) -> FloatArray:
    """Copies one strip of T matrices into a buffer.

    Uses numpy, which copies and adds in a single thread: for arrays this small, torch's threads spend more time
    on synchronisation than on computation, especially on a busy machine.

    Args:
        layout: The common layout of the matrices.
        matrices: T matrices.
        strip: The elements to copy.
        buffer: A float64 array of at least T · length elements.

    Returns:
        A view of the buffer, of shape (T, length).
    """
    rows = buffer[: len(matrices) * (strip.stop - strip.start)].reshape(len(matrices), -1)
    for row, matrix in zip(rows, matrices, strict=True):
        matrix.require_valid()
        values = layout.read(matrix, strip)
        row[:] = (values.float() if values.dtype is torch.bfloat16 else values).numpy()
    return rows


def _row_range(strip: Strip) -> tuple[int, int]:
    """Returns the first and last (exclusive) row of a strip: row i of a triangle begins at element i (i + 1) / 2."""
    first, last = ((isqrt(8 * element + 1) - 1) // 2 for element in (strip.start, strip.stop))
    return first, last


def _row_indices(first: int, last: int) -> Tensor:
    """Returns the row of each element in rows `first` to `last` of a triangle, counted from `first`."""
    rows = torch.arange(first, last)
    return (rows - first).repeat_interleave(rows + 1)


def _read_triangle(matrix: Matrix, block: int, first: int, last: int) -> Tensor:
    """Returns rows of one of the triangles that a matrix is stored in."""
    start = block * matrix.components.specs["data"][1][-1]
    values = matrix.components.span("data", start + triangle_length(first), start + triangle_length(last))
    if "scale" not in matrix.components.specs:
        return values
    start = block * matrix.components.specs["scale"][1][-1]
    scale = matrix.components.span("scale", start + first, start + last)
    return values.double() * scale.double()[_row_indices(first, last)]


def _read_packed(matrix: Matrix, first: int, last: int) -> Tensor:
    return _read_triangle(matrix, 0, first, last)


def _read_blocks(matrix: Matrix, first: int, last: int) -> Tensor:
    rows = torch.zeros((last - first, last), dtype=torch.float64)
    for block, (left, right) in enumerate(spans(matrix.side, matrix.components.specs["data"][1][0])):
        top, bottom = max(first, left), min(last, right)
        if top < bottom:
            values = _read_triangle(matrix, block, top - left, bottom - left)
            lower = torch.ones((bottom - top, bottom - left), dtype=torch.bool).tril(top - left)
            rows[top - first : bottom - first, left:bottom][lower] = values.double()
    return _packed_rows(rows, first)


def _read_low_rank(matrix: Matrix, first: int, last: int) -> Tensor:
    def rows(start: int) -> Tensor:
        values = matrix.components["data"][start:last].double()
        return values * matrix.components["scale"][start:last, None].double() if scaled else values

    scaled = "scale" in matrix.components.specs
    return _packed_rows((rows(first) * matrix.components["weights"].double()) @ rows(0).T, first)


def _read_sparse(matrix: Matrix, first: int, last: int) -> Tensor:
    # Entries are sorted by row, so a binary search touches only a few pages of a mapped tensor.
    start, stop = torch.searchsorted(matrix.components["rows"], torch.tensor([first, last], dtype=torch.int32)).tolist()
    rows, columns, data = (matrix.components[name][start:stop] for name in ("rows", "columns", "data"))
    values, rows = data.double(), rows.long()
    if "scale" in matrix.components.specs:
        values = values * matrix.components["scale"][rows].double()
    packed = torch.zeros(triangle_length(last) - triangle_length(first), dtype=torch.float64)
    packed[rows * (rows + 1) // 2 + columns - triangle_length(first)] = values
    return packed


def _read_diagonal(matrix: Matrix, first: int, last: int) -> Tensor:
    packed = torch.zeros(triangle_length(last) - triangle_length(first), dtype=torch.float64)
    rows = torch.arange(first, last)
    packed[rows * (rows + 3) // 2 - triangle_length(first)] = matrix.components.span("data", first, last).double()
    return packed


def _read_dense(matrix: Matrix, first: int, last: int) -> Tensor:
    dtype = matrix.dtype if matrix.dtype.is_floating_point else torch.float32
    return _packed_rows(matrix.dense(dtype)[first:last], first)


def _packed_rows(rows: Tensor, first: int) -> Tensor:
    """Returns rows of a full matrix, starting at row `first`, up to and including the diagonal."""
    return rows[torch.ones_like(rows, dtype=torch.bool).tril(first)]


READERS: dict[str, Callable[[Matrix, int, int], Tensor]] = {
    "packed": _read_packed,
    "block": _read_blocks,
    "lowrank": _read_low_rank,
    "sparse": _read_sparse,
    "diagonal": _read_diagonal,
}
"""Functions that return rows `first` to `last` of the lower triangle, by matrix form. Others use `_read_dense`."""
