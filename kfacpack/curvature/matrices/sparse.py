"""Some entries of the lower triangle by coordinates, in row-major order; their mirror images are meant too."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kfacpack.curvature.matrices.components import InMemoryTensors, pack
from kfacpack.curvature.matrices.dense import PackedOperator
from kfacpack.curvature.matrices.matrix import Matrix, Operator, require_square
from kfacpack.errors import MatrixError

_SPARSE_COST = 16
"""What a multiplication by a sparse entry costs, in those of a dense product, and about what it costs to fill in one
number of a dense matrix. Measured 8 to 14 on 2 cores; more cores serve the dense product better. So a wide product is
dense from one entry in sixteen on, and a product with one vector hardly ever."""


class SparseOperator(Operator):
    """Entries of both triangles, in row-major order: their coordinates, (2, entries), and their values."""

    def __call__(self, x: Tensor) -> Tensor:
        places, values = self.tensors
        side = (len(x), len(x))
        matrix = torch.sparse_coo_tensor(places, values, side, check_invariants=False, is_coalesced=True)
        # Rows of x are what the kernel goes through: they must not lie apart in memory.
        product: Tensor = torch.sparse.mm(matrix, x.contiguous())
        return product


class Sparse(Matrix):
    form = "sparse"

    @classmethod
    def from_dense(cls, matrix: Tensor, fraction: float) -> Sparse:
        """Keep that fraction of the triangle's entries, the largest magnitudes, zeros never."""
        side = require_square(matrix)
        if not 0 <= fraction <= 1:
            raise MatrixError(f"the fraction of entries to keep is from 0 to 1, not {fraction}")
        values = pack(matrix)
        count = min(round(fraction * len(values)), int(values.count_nonzero()))
        kept = _largest(values.abs().to(torch.promote_types(values.dtype, torch.float32)), count)
        rows, columns = _positions(kept)
        parts = InMemoryTensors(data=values[kept], rows=rows.int(), columns=columns.int())
        return cls(side, parts, psd=False)

    def operator(self, dtype: torch.dtype, device: torch.device | None = None) -> Operator:
        """Filled in to a dense matrix where that multiplies faster, as it is filled in only once."""
        if 2 * self.entries * _SPARSE_COST > self.side**2:
            return PackedOperator(self._full(dtype, device))
        return self._in_order(dtype, device)

    def matmul(self, x: Tensor) -> Tensor:
        width = x.shape[1]
        if 2 * self.entries * _SPARSE_COST * width > self.side**2 * (width + _SPARSE_COST):
            return self._full(x.dtype, x.device) @ x
        return self._in_order(x.dtype, x.device)(x)

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._full(dtype)

    def psd_witnesses(self) -> Iterator[Tensor]:
        """None: dropping entries does not keep a matrix positive semi-definite, and the format forbids the promise."""
        return iter(())

    def row_index(self) -> Tensor:
        return self._coordinates()[0]

    def violation(self) -> tuple[str, str] | None:
        rows, columns = (self.components[name].long() for name in ("rows", "columns"))
        if not bool(((columns >= 0) & (columns <= rows) & (rows < self.side)).all()):
            return "rows", f"and its columns leave the lower triangle of side {self.side}"
        if not bool((rows * self.side + columns).diff().gt(0).all()):
            return "rows", "and its columns are not ordered by row and then column, each pair once"
        return super().violation()

    @property
    def entries(self) -> int:
        """How many are stored."""
        return self.components.specs["data"][1][0]

    def _full(self, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        rows, columns = self._coordinates(device)
        values = self.numbers(dtype, device)
        full = torch.zeros(self.side**2, dtype=dtype, device=values.device)
        full[rows * self.side + columns] = values
        full[columns * self.side + rows] = values
        return full.view(self.side, self.side)

    def _in_order(self, dtype: torch.dtype, device: torch.device | None) -> SparseOperator:
        rows, columns = self._coordinates(device)
        values = self.numbers(dtype, device)
        off = rows != columns
        places = torch.stack([torch.cat([rows, columns[off]]), torch.cat([columns, rows[off]])])
        order = (places[0] * self.side + places[1]).argsort()
        return SparseOperator(places[:, order], torch.cat([values, values[off]])[order])

    def _coordinates(self, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        # An index out of range may crash a kernel: look before it gets there.
        self.require_sound()
        rows, columns = (self.components[name].to(device).long() for name in ("rows", "columns"))
        return rows, columns


def _largest(magnitudes: Tensor, count: int) -> Tensor:
    """The places of the `count` largest, in order; among equals the first."""
    if not count:
        return torch.zeros(0, dtype=torch.int64, device=magnitudes.device)
    bar = magnitudes.kthvalue(len(magnitudes) - count + 1).values
    above = magnitudes > bar
    equal = (magnitudes == bar).nonzero().squeeze(1)[: count - int(above.sum())]
    above[equal] = True
    return above.nonzero().squeeze(1)


def _positions(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of the triangle's numbers, counted row by row: number = row (row + 1) / 2 + column."""
    # Exact: the root of 8 number + 1 is a whole number where a row begins, and numbers are far below 2^53 / 8.
    rows = ((8 * numbers.double() + 1).sqrt() - 1).div(2).floor().long()
    return rows, numbers - rows * (rows + 1) // 2
