"""Inner products and linear combinations of matrices that may not fit into memory, computed strip by strip.

Matrices of the same side length share a layout: the lower triangles of K diagonal blocks (K = 1 for a full matrix), or
only the diagonal. A strip is a range of rows of one triangle, or a range of diagonal entries. It contains the same
entries of every matrix. Sums and inner products therefore need only one strip of each matrix in memory.

The Gram matrix of T matrices has shape (T, T) and the entries <M_s, M_t>. The coordinates X of the matrices, also of
shape (T, T), are chosen such that X Xᵀ is the Gram matrix. Row t of X thus represents matrix t as a vector with the
same norm and the same angles to the other vectors. Everything is computed in float64.
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

from kfacpack.curvature.matrices.components import MatrixTensors
from kfacpack.curvature.matrices.dense import Packed
from kfacpack.curvature.matrices.matrix import Matrix
from kfacpack.curvature.matrices.structured import BlockDiagonal, Diagonal, spans
from kfacpack.format.schema import triangle_length, widest_block

if TYPE_CHECKING:
    from kfacpack.format.schema import Shape

    FloatArray = np.ndarray[Any, np.dtype[np.float64]]


STRIP_ENTRIES = 2**20
"""Maximum number of entries in memory at a time, summed over all matrices. At least one row of each matrix is read.

For up to about a hundred matrices, memory use does not grow with the number of matrices."""


@dataclass(frozen=True)
class Strip:
    """A range of elements of one triangle or diagonal."""

    block: int
    """Index of the triangle; 0 for a diagonal."""
    start: int
    """Index of the first element."""
    stop: int
    """Index one past the last element."""


class StripLayout(ABC):
    """The common layout of matrices with the same side length.

    The layout defines which entries are stored, in which order, and which of them occur twice in the full matrix.
    """

    side: int
    """Side length n of the matrices."""
    shape: Shape
    """Shape of the component `data` of a matrix in this layout."""

    @abstractmethod
    def strips(self, limit: int) -> Iterator[Strip]:
        """Yields strips that cover `data` in order. A strip with more than `limit` elements is always a single row."""

    @abstractmethod
    def is_strip(self, strip: Strip) -> bool:
        """Returns whether `read` supports this range of elements."""

    @abstractmethod
    def read(self, matrix: Matrix, strip: Strip) -> Tensor:
        """Returns a strip of one matrix in a floating-point dtype. The tensor may share memory with the matrix."""

    @abstractmethod
    def diagonal(self, strip: Strip) -> Tensor:
        """Returns the indices of a strip's diagonal elements. All other elements occur twice in the matrix."""

    @abstractmethod
    def make_matrix(
        self, components: MatrixTensors, *, psd: bool, examples: int | None = None, positions: int | None = None
    ) -> Matrix:
        """Builds a matrix in this layout from its components."""


class DiagonalStrips(StripLayout):
    """Layout of diagonal matrices. A strip is any range of diagonal elements."""

    def __init__(self, side: int):
        self.side = side
        self.shape = (side,)

    def strips(self, limit: int) -> Iterator[Strip]:
        """Yields strips of `limit` elements that cover the diagonal. The last strip may be shorter."""
        for start in range(0, self.side, limit):
            yield Strip(0, start, min(start + limit, self.side))

    def is_strip(self, strip: Strip) -> bool:
        """Returns whether the range of elements lies within the diagonal."""
        return strip.stop <= self.side

    def read(self, matrix: Matrix, strip: Strip) -> Tensor:
        """Returns the entries of a diagonal matrix that a strip covers."""
        return matrix.components.span("data", strip.start, strip.stop)

    def diagonal(self, strip: Strip) -> Tensor:
        """Returns the indices of a strip's diagonal elements, which are all of its elements."""
        return torch.arange(strip.stop - strip.start)

    def make_matrix(
        self, components: MatrixTensors, *, psd: bool, examples: int | None = None, positions: int | None = None
    ) -> Matrix:
        """Builds a matrix in this layout from its components."""
        return Diagonal(self.side, components, psd=psd, examples=examples, positions=positions)


class TriangleStrips(StripLayout):
    """Layout of the lower triangles of `count` diagonal blocks. A strip is a range of whole rows in one triangle."""

    def __init__(self, side: int, count: int = 1):
        self.side, self.count = side, count
        self._width = widest_block(side, count)
        self.shape = (count, triangle_length(self._width)) if count > 1 else (triangle_length(side),)

    def strips(self, limit: int) -> Iterator[Strip]:
        """Yields strips that cover all triangles. Each strip has as many rows as fit into `limit`, but at least one."""
        for block in range(self.count):
            first = 0
            while first < self._width:
                last = first + 1
                while last < self._width and triangle_length(last + 1) - triangle_length(first) <= limit:
                    last += 1
                yield Strip(block, triangle_length(first), triangle_length(last))
                first = last

    def is_strip(self, strip: Strip) -> bool:
        """Returns whether the range of elements consists of whole rows of one triangle."""
        first, last = _row_range(strip)
        return (triangle_length(first), triangle_length(last)) == (strip.start, strip.stop) and last <= self._width

    def read(self, matrix: Matrix, strip: Strip) -> Tensor:
        """Returns the entries of a matrix that a strip covers. If `count` is 1, the matrix may have any form."""
        first, last = _row_range(strip)
        if self.count > 1:
            return _read_triangle(matrix, strip.block, first, last)
        return READERS.get(matrix.form, _read_dense)(matrix, first, last)

    def diagonal(self, strip: Strip) -> Tensor:
        """Returns the indices, counted within the strip, of the elements on the diagonal."""
        rows = torch.arange(*_row_range(strip))
        return rows * (rows + 3) // 2 - strip.start

    def make_matrix(
        self, components: MatrixTensors, *, psd: bool, examples: int | None = None, positions: int | None = None
    ) -> Matrix:
        """Builds a matrix in this layout from its components."""
        form: type[Packed | BlockDiagonal] = BlockDiagonal if self.count > 1 else Packed
        return form(self.side, components, psd=psd, examples=examples, positions=positions)


def layout_of(matrices: Sequence[Matrix]) -> StripLayout:
    """Returns a layout that can represent all of the matrices exactly."""
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
        layout: The common layout of the matrices.
        matrices: T matrices.

    Yields:
        Each strip and the array of its entries, of shape (T, length). The array is reused for the next strip.
    """
    max_length = max(STRIP_ENTRIES // len(matrices), layout.side)
    buffer = np.empty(len(matrices) * max_length)
    for strip in layout.strips(max_length):
        yield strip, write_strip(layout, matrices, strip, buffer)


def write_strip(layout: StripLayout, matrices: Sequence[Matrix], strip: Strip, buffer: FloatArray) -> FloatArray:
    """Copies one strip of T matrices into a buffer.

    NumPy is used because it copies and adds in a single thread. For such small arrays, torch's threads spend more time
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
    """Returns the first row of a strip and the row after its last row. Row i begins at element i (i + 1) / 2."""
    first, last = ((isqrt(8 * element + 1) - 1) // 2 for element in (strip.start, strip.stop))
    return first, last


def _row_indices(first: int, last: int) -> Tensor:
    """Returns the row of each element in rows `first` to `last` - 1 of a triangle, counted from `first`."""
    rows = torch.arange(first, last)
    return (rows - first).repeat_interleave(rows + 1)


def _read_triangle(matrix: Matrix, block: int, first: int, last: int) -> Tensor:
    """Returns rows `first` to `last` - 1 of one of the stored triangles of a matrix."""
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
    """Returns the entries on and below the diagonal from consecutive rows of a full matrix, starting at row `first`."""
    return rows[torch.ones_like(rows, dtype=torch.bool).tril(first)]


READERS: dict[str, Callable[[Matrix, int, int], Tensor]] = {
    "packed": _read_packed,
    "block": _read_blocks,
    "lowrank": _read_low_rank,
    "sparse": _read_sparse,
    "diagonal": _read_diagonal,
}
"""Functions that return rows `first` to `last` - 1 of the lower triangle, by matrix form.

All other forms use `_read_dense`.
"""


def gram(matrices: Sequence[Matrix]) -> Tensor:
    """Computes the Gram matrix of symmetric matrices in a single pass.

    Args:
        matrices: T matrices with the same side length. A matrix that occurs more than once is read only once.

    Returns:
        The inner products <M_s, M_t>, of shape (T, T), in float64.
    """
    unique = {id(matrix): matrix for matrix in matrices}
    distinct = list(unique.values())
    layout = layout_of(distinct)
    products = np.zeros((len(distinct), len(distinct)))
    for strip, rows in iterate_strips(layout, distinct):
        on_diagonal = rows[:, layout.diagonal(strip).numpy()]
        # NumPy recognises a product of a matrix with its own transpose and does half the work.
        products += 2 * (rows @ rows.T) - on_diagonal @ on_diagonal.T
    order = list(unique)
    index = torch.tensor([order.index(id(matrix)) for matrix in matrices])
    return torch.from_numpy(products)[index][:, index]


def coordinates(products: Tensor) -> Tensor:
    """Computes coordinates X with X Xᵀ = `products`.

    The Gram matrix is scaled to a unit diagonal before it is decomposed. The coordinates of a matrix with a small norm
    are therefore as accurate as the coordinates of a matrix with a large norm.

    Args:
        products: The Gram matrix of T matrices, of shape (T, T).

    Returns:
        The coordinates, of shape (T, T). Row t represents matrix t as a vector.
    """
    lengths = products.diagonal().clamp(min=0).sqrt()
    scale = torch.where(lengths > 0, lengths, 1.0)
    eigenvalues, eigenvectors = torch.linalg.eigh(products / scale[:, None] / scale)
    points: Tensor = lengths[:, None] * eigenvectors * eigenvalues.clamp(min=0).sqrt()
    return points


class CombinedTensors(MatrixTensors):
    """The matrix Σ coefficient · matrix, whose entries are computed in float64 when they are read.

    If the entries are read in chunks, as when a file is written, they are computed from the given matrices and not
    cached. If all entries are read at once, they are computed once and cached.
    """

    def __init__(self, layout: StripLayout, matrices: Sequence[Matrix], coefficients: Sequence[float]):
        self._layout = layout
        self._matrices = matrices
        self._coefficients = np.array(coefficients)
        self._wide = any(matrix.dtype is torch.float64 for matrix in matrices)
        self.specs = {"data": ("F64" if self._wide else "F32", layout.shape)}
        self._cached: Tensor | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._cached is None:
            self._cached = torch.cat(list(self.parts(name))).reshape(self.specs[name][1])
        return self._cached

    def parts(self, name: str) -> Iterator[Tensor]:
        """Yields the flattened tensor in consecutive chunks."""
        if self._cached is not None:
            yield from super().parts(name)
            return
        for _, rows in iterate_strips(self._layout, self._matrices):
            yield self._sum(rows)

    def span(self, name: str, start: int, stop: int) -> Tensor:
        """Returns elements `start` to `stop` - 1 of the flattened tensor.

        If the elements form a strip of the layout, only these elements are computed. For any other span, the whole
        tensor is computed and cached.
        """
        block, first = divmod(start, self._layout.shape[-1])
        strip = Strip(block, first, first + stop - start)
        if self._cached is not None or not self._layout.is_strip(strip):
            return super().span(name, start, stop)
        return self._sum(
            write_strip(self._layout, self._matrices, strip, np.empty(len(self._matrices) * (stop - start)))
        )

    def _sum(self, rows: FloatArray) -> Tensor:
        total = np.einsum("t,tn->n", self._coefficients, rows)
        return torch.from_numpy(total if self._wide else total.astype(np.float32))


class MatrixCombiner:
    """Builds linear combinations of matrices. Equal combinations are built only once.

    Blocks that share a matrix therefore also share the combined matrix.
    """

    def __init__(self) -> None:
        # Keep references to the inputs, because their ids, which form the key, must not be reused.
        self._combined: dict[tuple[tuple[int, float], ...], tuple[Matrix, list[Matrix]]] = {}

    def __call__(self, matrices: Sequence[Matrix], coefficients: Sequence[float], *, psd: bool | None = None) -> Matrix:
        """Returns Σ coefficient · matrix, whose entries are computed when they are read.

        Args:
            matrices: Matrices with the same side length.
            coefficients: One coefficient per matrix.
            psd: Whether the result is marked as positive semi-definite. By default, it is marked if all
                coefficients are non-negative and all matrices with a non-zero coefficient are positive semi-definite.
        """
        coefficient_of: dict[int, float] = {}
        for matrix, coefficient in zip(matrices, coefficients, strict=True):
            coefficient_of[id(matrix)] = coefficient_of.get(id(matrix), 0.0) + coefficient
        key = tuple((matrix_id, value) for matrix_id, value in coefficient_of.items() if value) or (
            (id(matrices[0]), 0.0),
        )
        by_id = {id(matrix): matrix for matrix in matrices}
        used = [by_id[matrix_id] for matrix_id, _ in key]
        if len(used) == 1 and key[0][1] == 1:
            return used[0]
        if key not in self._combined:
            values = [value for _, value in key]
            layout = layout_of(used)
            nonnegative = all(matrix.psd and value >= 0 for matrix, value in zip(used, values, strict=True))
            combined = layout.make_matrix(
                CombinedTensors(layout, used, values),
                psd=nonnegative if psd is None else psd,
                examples=_total_count([matrix.examples for matrix in used], values),
                positions=_total_count([matrix.positions for matrix in used], values),
            )
            # The inputs are checked when they are read. Checking the sum would compute and cache the whole matrix.
            combined.skip_validation()
            self._combined[key] = combined, used
        return self._combined[key][0]


def _total_count(counts: Sequence[int | None], coefficients: Sequence[float]) -> int | None:
    """Returns the sum of the counts, or None if a count is missing or a coefficient is negative."""
    present = [count for count in counts if count is not None]
    return sum(present) if len(present) == len(counts) and min(coefficients) >= 0 else None
