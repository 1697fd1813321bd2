"""The lower triangle: half the bytes of a symmetric matrix, no loss. What a bundle holds unless told otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kfacpack.curvature.matrices.base import Matrix, Operator, require_square
from kfacpack.curvature.matrices.components import InMemory
from kfacpack.curvature.matrices.triangle import pack, row_of_each, unpack


class Full(Operator):
    """All n² numbers."""

    def __call__(self, x: Tensor) -> Tensor:
        (full,) = self.tensors
        return full @ x


class Packed(Matrix):
    form = "packed"

    @classmethod
    def from_dense(cls, matrix: Tensor, *, psd: bool = True) -> Packed:
        """From a (n, n) tensor; only its lower triangle is looked at."""
        return cls(require_square(matrix), InMemory(data=pack(matrix)), psd=psd)

    def operator(self, dtype: torch.dtype, device: torch.device | None = None) -> Full:
        return Full(self._full(dtype, device))

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._full(dtype)

    def psd_witnesses(self) -> Iterator[Tensor]:
        yield self.dense(torch.float64)

    def row_index(self) -> Tensor:
        return row_of_each(self.side)

    def _full(self, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        data, scale = self.stored_numbers(dtype, device)
        return unpack(data, self.side, scale)
