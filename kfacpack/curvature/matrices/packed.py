"""The lower triangle: half the bytes of a symmetric matrix, no loss. What a bundle holds unless told otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kfacpack.curvature.matrices.base import Matrix, require_square
from kfacpack.curvature.matrices.components import InMemory
from kfacpack.curvature.matrices.triangle import pack, row_of_each, unpack


class Packed(Matrix):
    form = "packed"

    @classmethod
    def from_dense(cls, matrix: Tensor, *, psd: bool = True) -> Packed:
        """From a (n, n) tensor; only its lower triangle is looked at."""
        return cls(require_square(matrix), InMemory(data=pack(matrix)), psd=psd)

    def matmul(self, x: Tensor) -> Tensor:
        return self._full(x.dtype, x.device) @ x

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._full(dtype)

    def psd_witnesses(self) -> Iterator[Tensor]:
        yield self.dense(torch.float64)

    def row_index(self) -> Tensor:
        return row_of_each(self.side)

    def _full(self, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        data, scale = self.stored_numbers(dtype, device)
        return unpack(data, self.side, scale)
