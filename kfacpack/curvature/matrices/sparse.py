"""Sparse matrices: entries of the lower triangle by coordinates, in row-major order; the upper triangle is implied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from kfacpack.curvature.matrices.components import InMemoryTensors, pack
from kfacpack.curvature.matrices.dense import DenseOperator
from kfacpack.curvature.matrices.matrix import Matrix, Operator, require_square
from kfacpack.errors import MatrixError

_SPARSE_COST = 16
"""Cost of multiplying by one sparse entry, relative to one dense entry, and roughly the cost of filling in one entry of
a dense matrix. Measured as 8 to 14 on 2 cores; with more cores the dense product gains more. A wide product is
therefore dense if more than one entry in sixteen is stored, and a product with one vector almost never."""


class SparseOperator(Operator):
    """Multiplies by a sparse matrix, given by the entries of both triangles in row-major order.

    Its tensors are the coordinates, (2, entries), and the values, (entries,).
    """

    def __call__(self, x: Tensor) -> Tensor:
        """Returns M x."""
        coordinates, values = self.tensors
        shape = (len(x), len(x))
        matrix = torch.sparse_coo_tensor(coordinates, values, shape, check_invariants=False, is_coalesced=True)
        # The kernel reads x row by row, which is slow unless rows are contiguous.
        product: Tensor = torch.sparse.mm(matrix, x.contiguous())
        return product

    def diagonal(self, side: int) -> Tensor:
        """Returns the diagonal of M without forming M."""
        (rows, columns), values = self.tensors
        on_diagonal = rows == columns
        return values.new_zeros(side).index_put_((rows[on_diagonal],), values[on_diagonal])


class Sparse(Matrix):
    """A symmetric matrix as entries of its lower triangle: `data`, `rows` and `columns`, each (entries,).

    Example:
        >>> import torch
        >>> import kfacpack as kp
        >>> kp.Sparse.from_dense(torch.tensor([[2.0, 0.1], [0.1, 3.0]]), fraction=0.7).dense().diag()
        tensor([2., 3.])
    """

    form = "sparse"
    stackable = False

    @classmethod
    def from_dense(cls, matrix: Tensor, fraction: float) -> Sparse:
        """Keeps the entries of largest magnitude.

        Args:
            matrix: Square floating-point tensor, (n, n); only its lower triangle is read.
            fraction: Fraction of the entries of the triangle to keep, from 0 to 1. Zeros are never kept.

        Returns:
            The sparse matrix. It is not declared to be positive semi-definite.

        Raises:
            MatrixError: If `matrix` is not square or `fraction` is out of range.
        """
        side = require_square(matrix)
        if not 0 <= fraction <= 1:
            raise MatrixError(f"expected a fraction of entries to keep from 0 to 1, got {fraction}")
        values = pack(matrix)
        count = min(round(fraction * len(values)), int(values.count_nonzero()))
        kept = _largest(values.abs().to(torch.promote_types(values.dtype, torch.float32)), count)
        rows, columns = _coordinates_of(kept)
        components = InMemoryTensors(data=values[kept], rows=rows.int(), columns=columns.int())
        return cls(side, components, psd=False)

    def _make_operator(self, dtype: torch.dtype, device: torch.device | None = None) -> Operator:
        # A dense matrix is filled in once per operator, so only the cost of the product counts. Sparse products need
        # at least float32.
        if 2 * self.entries * _SPARSE_COST > self.side**2 or dtype.itemsize < 4:
            return DenseOperator(self._full(dtype, device))
        return self._sparse_operator(dtype, device)

    def unpacked(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Operator:
        """Returns an operator that multiplies by a full (n, n) tensor; a sparse one would have to be sorted first."""
        matrix = self._with_components(InMemoryTensors(**tensors), self.psd)
        matrix.skip_validation()
        return DenseOperator(matrix._full(dtype))

    def matmul(self, x: Tensor) -> Tensor:
        """Returns M x, by a dense product if filling in the matrix for one product is faster."""
        width = x.shape[1]
        if self._resident is not None and self._resident.matches(x.dtype, x.device):
            return self._resident(x)
        if 2 * self.entries * _SPARSE_COST * width > self.side**2 * (width + _SPARSE_COST):
            return self._full(x.dtype, x.device) @ x
        return self._sparse_operator(x.dtype, x.device)(x)

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns M as an (n, n) tensor."""
        return self._full(dtype)

    def psd_witnesses(self) -> Iterator[Tensor]:
        """Yields nothing: the format does not allow `psd`, because dropping entries may make a matrix indefinite."""
        return iter(())

    def row_index(self) -> Tensor:
        """Returns the row of every entry."""
        return self._coordinates()[0]

    def violation(self) -> tuple[str, str] | None:
        """Checks that the coordinates are in the lower triangle, sorted and unique."""
        rows, columns = (self.components[name].long() for name in ("rows", "columns"))
        if not bool(((columns >= 0) & (columns <= rows) & (rows < self.side)).all()):
            return "rows", f"contains coordinates outside the lower triangle of side {self.side}"
        if not bool((rows * self.side + columns).diff().gt(0).all()):
            return "rows", "contains coordinates that are not sorted by row and then column, or are not unique"
        return super().violation()

    @property
    def entries(self) -> int:
        """Number of stored entries."""
        return self.components.specs["data"][1][0]

    def _full(self, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        rows, columns = self._coordinates(device)
        values = self.float_values(dtype, device)
        full = torch.zeros(self.side**2, dtype=dtype, device=values.device)
        full[rows * self.side + columns] = values
        full[columns * self.side + rows] = values
        return full.view(self.side, self.side)

    def _sparse_operator(self, dtype: torch.dtype, device: torch.device | None) -> SparseOperator:
        rows, columns = self._coordinates(device)
        values = self.float_values(dtype, device)
        off_diagonal = rows != columns
        mirrored = columns[off_diagonal], rows[off_diagonal]
        coordinates = torch.stack([torch.cat([rows, mirrored[0]]), torch.cat([columns, mirrored[1]])])
        order = (coordinates[0] * self.side + coordinates[1]).argsort()
        return SparseOperator(coordinates[:, order], torch.cat([values, values[off_diagonal]])[order])

    def _coordinates(self, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        # Validate first: an index out of range may crash a kernel.
        self.require_valid()
        rows, columns = (self.components[name].to(device).long() for name in ("rows", "columns"))
        return rows, columns


def _largest(magnitudes: Tensor, count: int) -> Tensor:
    """Returns the indices of the `count` largest values in ascending order; ties are broken by the lower index."""
    if not count:
        return torch.zeros(0, dtype=torch.int64, device=magnitudes.device)
    threshold = magnitudes.kthvalue(len(magnitudes) - count + 1).values
    above = magnitudes > threshold
    equal = (magnitudes == threshold).nonzero().squeeze(1)[: count - int(above.sum())]
    above[equal] = True
    return above.nonzero().squeeze(1)


def _coordinates_of(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Returns row and column of entries of a packed triangle: index = row (row + 1) / 2 + column."""
    # Exact in float64: 8 index + 1 is a perfect square at the start of a row, and indices are far below 2^53 / 8.
    rows = ((8 * indices.double() + 1).sqrt() - 1).div(2).floor().long()
    return rows, indices - rows * (rows + 1) // 2
