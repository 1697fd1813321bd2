"""Matrices side by side, a strip of numbers at a time, whatever form each is held in.

Matrices of one side are laid out alike: as the triangles of K diagonal blocks, K = 1 for the whole matrix, or as their
diagonals. A strip is some rows of one of those triangles, or some numbers of the diagonals: a vector that means the
same in all of them. So sums and inner products never need more of a matrix than one strip.
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

    Shape = tuple[int, ...]

    Numbers = np.ndarray[Any, np.dtype[np.float64]]


STRIP_NUMBERS = 2**20
"""How many numbers of all matrices are held at a time, or one row of each if that is more: memory does not grow with
the number of matrices, up to some hundred of them."""


@dataclass(frozen=True)
class Strip:
    """Numbers `start` to `stop` of triangle or diagonal `block`."""

    block: int
    start: int
    stop: int


class StripLayout(ABC):
    """What matrices of one side have in common: where their numbers are, and which count twice."""

    side: int
    shape: Shape
    """Of the component `data` of a matrix that is held like this."""

    @abstractmethod
    def strips(self, limit: int) -> Iterator[Strip]:
        """All of the matrix, in the order of its `data`; at most `limit` numbers at a time, or one row."""

    @abstractmethod
    def is_strip(self, strip: Strip) -> bool:
        """Whether these numbers are ones that can be read in one go."""

    @abstractmethod
    def read(self, matrix: Matrix, strip: Strip) -> Tensor:
        """The strip of one matrix, in some type of floats. It may be the matrix's own memory."""

    @abstractmethod
    def diagonal(self, strip: Strip) -> Tensor:
        """Which numbers of a strip stand on the diagonal. All others stand in the matrix twice."""

    @abstractmethod
    def hold(
        self, components: MatrixTensors, *, psd: bool, examples: int | None = None, positions: int | None = None
    ) -> Matrix:
        """A matrix of this layout."""


class DiagonalStrips(StripLayout):
    def __init__(self, side: int):
        self.side = side
        self.shape = (side,)

    def strips(self, limit: int) -> Iterator[Strip]:
        for start in range(0, self.side, limit):
            yield Strip(0, start, min(start + limit, self.side))

    def is_strip(self, strip: Strip) -> bool:
        return strip.stop <= self.side

    def read(self, matrix: Matrix, strip: Strip) -> Tensor:
        return matrix.components.span("data", strip.start, strip.stop)

    def diagonal(self, strip: Strip) -> Tensor:
        return torch.arange(strip.stop - strip.start)

    def hold(
        self, components: MatrixTensors, *, psd: bool, examples: int | None = None, positions: int | None = None
    ) -> Matrix:
        return Diagonal(self.side, components, psd=psd, examples=examples, positions=positions)


class TriangleStrips(StripLayout):
    """The triangles of `count` diagonal blocks. Strips are whole rows of them."""

    def __init__(self, side: int, count: int = 1):
        self.side, self.count = side, count
        self._width = widest_block(side, count)
        self.shape = (count, triangle_length(self._width)) if count > 1 else (triangle_length(side),)

    def strips(self, limit: int) -> Iterator[Strip]:
        for block in range(self.count):
            first = 0
            while first < self._width:
                last = first + 1
                while last < self._width and triangle_length(last + 1) - triangle_length(first) <= limit:
                    last += 1
                yield Strip(block, triangle_length(first), triangle_length(last))
                first = last

    def is_strip(self, strip: Strip) -> bool:
        first, last = _rows(strip)
        return (triangle_length(first), triangle_length(last)) == (strip.start, strip.stop) and last <= self._width

    def read(self, matrix: Matrix, strip: Strip) -> Tensor:
        first, last = _rows(strip)
        if self.count > 1:
            return _stored(matrix, strip.block, first, last)
        return READERS.get(matrix.form, _of_dense)(matrix, first, last)

    def diagonal(self, strip: Strip) -> Tensor:
        rows = torch.arange(*_rows(strip))
        return rows * (rows + 3) // 2 - strip.start

    def hold(
        self, components: MatrixTensors, *, psd: bool, examples: int | None = None, positions: int | None = None
    ) -> Matrix:
        form: type[Packed | BlockDiagonal] = BlockDiagonal if self.count > 1 else Packed
        return form(self.side, components, psd=psd, examples=examples, positions=positions)


def layout_of(matrices: Sequence[Matrix]) -> StripLayout:
    """The smallest layout that loses nothing of any of them."""
    side, forms = matrices[0].side, {matrix.form for matrix in matrices}
    if forms == {Diagonal.form}:
        return DiagonalStrips(side)
    counts = {matrix.components.specs["data"][1][0] for matrix in matrices}
    if forms == {BlockDiagonal.form} and len(counts) == 1:
        return TriangleStrips(side, counts.pop())
    return TriangleStrips(side)


def side_by_side(layout: StripLayout, matrices: Sequence[Matrix]) -> Iterator[tuple[Strip, Numbers]]:
    """Every strip of the T matrices as (T, numbers). The next strip is put where the last one was."""
    longest = max(STRIP_NUMBERS // len(matrices), layout.side)
    room = np.empty(len(matrices) * longest)
    for strip in layout.strips(longest):
        yield strip, write_strip(layout, matrices, strip, room)


def write_strip(layout: StripLayout, matrices: Sequence[Matrix], strip: Strip, room: Numbers) -> Numbers:
    """One strip of the T matrices as (T, numbers), in a room that is large enough.

    In numpy, which copies and adds in one thread. Those of torch wait for each other, and for such small steps that
    takes longer than the work; on a busy machine, many times as long.
    """
    rows = room[: len(matrices) * (strip.stop - strip.start)].reshape(len(matrices), -1)
    for row, matrix in zip(rows, matrices, strict=True):
        matrix.require_sound()
        numbers = layout.read(matrix, strip)
        row[:] = (numbers.float() if numbers.dtype is torch.bfloat16 else numbers).numpy()
    return rows


def _rows(strip: Strip) -> tuple[int, int]:
    """Which rows of a triangle a strip consists of: row i begins at number i (i + 1) / 2."""
    first, last = ((isqrt(8 * place + 1) - 1) // 2 for place in (strip.start, strip.stop))
    return first, last


def _row_of_each(first: int, last: int) -> Tensor:
    """For every number of some rows of a triangle, its row, counted from `first`."""
    rows = torch.arange(first, last)
    return (rows - first).repeat_interleave(rows + 1)


def _stored(matrix: Matrix, block: int, first: int, last: int) -> Tensor:
    """Rows of one of the triangles that a matrix consists of."""
    start = block * matrix.components.specs["data"][1][-1]
    numbers = matrix.components.span("data", start + triangle_length(first), start + triangle_length(last))
    if "scale" not in matrix.components.specs:
        return numbers
    start = block * matrix.components.specs["scale"][1][-1]
    scale = matrix.components.span("scale", start + first, start + last)
    return numbers.double() * scale.double()[_row_of_each(first, last)]


def _of_packed(matrix: Matrix, first: int, last: int) -> Tensor:
    return _stored(matrix, 0, first, last)


def _of_blocks(matrix: Matrix, first: int, last: int) -> Tensor:
    rows = torch.zeros((last - first, last), dtype=torch.float64)
    for block, (left, right) in enumerate(spans(matrix.side, matrix.components.specs["data"][1][0])):
        top, bottom = max(first, left), min(last, right)
        if top < bottom:
            numbers = _stored(matrix, block, top - left, bottom - left)
            own = torch.ones((bottom - top, bottom - left), dtype=torch.bool).tril(top - left)
            rows[top - first : bottom - first, left:bottom][own] = numbers.double()
    return _packed_rows(rows, first)


def _of_low_rank(matrix: Matrix, first: int, last: int) -> Tensor:
    def rows(start: int) -> Tensor:
        numbers = matrix.components["data"][start:last].double()
        return numbers * matrix.components["scale"][start:last, None].double() if scaled else numbers

    scaled = "scale" in matrix.components.specs
    return _packed_rows((rows(first) * matrix.components["weights"].double()) @ rows(0).T, first)


def _of_sparse(matrix: Matrix, first: int, last: int) -> Tensor:
    # Entries are ordered by row: a search touches a few numbers of a mapped tensor, not all.
    start, stop = torch.searchsorted(matrix.components["rows"], torch.tensor([first, last], dtype=torch.int32)).tolist()
    rows, columns, data = (matrix.components[name][start:stop] for name in ("rows", "columns", "data"))
    numbers, rows = data.double(), rows.long()
    if "scale" in matrix.components.specs:
        numbers = numbers * matrix.components["scale"][rows].double()
    packed = torch.zeros(triangle_length(last) - triangle_length(first), dtype=torch.float64)
    packed[rows * (rows + 1) // 2 + columns - triangle_length(first)] = numbers
    return packed


def _of_diagonal(matrix: Matrix, first: int, last: int) -> Tensor:
    packed = torch.zeros(triangle_length(last) - triangle_length(first), dtype=torch.float64)
    rows = torch.arange(first, last)
    packed[rows * (rows + 3) // 2 - triangle_length(first)] = matrix.components.span("data", first, last).double()
    return packed


def _of_dense(matrix: Matrix, first: int, last: int) -> Tensor:
    dtype = matrix.dtype if matrix.dtype.is_floating_point else torch.float32
    return _packed_rows(matrix.dense(dtype)[first:last], first)


def _packed_rows(rows: Tensor, first: int) -> Tensor:
    """Rows of a full matrix, from row `first` on, as far as the diagonal."""
    return rows[torch.ones_like(rows, dtype=torch.bool).tril(first)]


READERS: dict[str, Callable[[Matrix, int, int], Tensor]] = {
    "packed": _of_packed,
    "block": _of_blocks,
    "lowrank": _of_low_rank,
    "sparse": _of_sparse,
    "diagonal": _of_diagonal,
}
"""Rows `first` to `last` of the lower triangle, one function a form; one that is not here is made dense for it."""
