"""Some entries of the lower triangle by coordinates, in row-major order; their mirror images are meant too."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kfacpack.curvature.matrices.base import Matrix, require_square
from kfacpack.curvature.matrices.components import InMemory
from kfacpack.errors import MatrixError


class Sparse(Matrix):
    form = "sparse"

    @classmethod
    def from_dense(cls, matrix: Tensor, fraction: float) -> Sparse:
        """Keep that fraction of the triangle's entries, the largest magnitudes, zeros never."""
        side = require_square(matrix)
        if not 0 <= fraction <= 1:
            raise MatrixError(f"the fraction of entries to keep is from 0 to 1, not {fraction}")
        rows, columns = torch.tril_indices(side, side, device=matrix.device)
        values = matrix[rows, columns]
        count = min(round(fraction * len(values)), int(values.count_nonzero()))
        kept = values.abs().argsort(descending=True, stable=True)[:count].sort().values
        parts = InMemory(data=values[kept], rows=rows[kept].int(), columns=columns[kept].int())
        return cls(side, parts, psd=False)

    def matmul(self, x: Tensor) -> Tensor:
        rows, columns = self._coordinates(x.device)
        values = self.numbers(x.dtype, x.device)
        off = rows != columns
        indices = torch.stack([torch.cat([rows, columns[off]]), torch.cat([columns, rows[off]])])
        both = torch.sparse_coo_tensor(
            indices, torch.cat([values, values[off]]), (self.side, self.side), check_invariants=False
        )
        product: Tensor = torch.sparse.mm(both, x)
        return product

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        rows, columns = self._coordinates()
        full = torch.zeros((self.side, self.side), dtype=dtype, device=rows.device)
        full[rows, columns] = full[columns, rows] = self.numbers(dtype)
        return full

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

    def _coordinates(self, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        # An index out of range may crash a kernel: look before it gets there.
        self.require_sound()
        rows, columns = (self.components[name].to(device).long() for name in ("rows", "columns"))
        return rows, columns
