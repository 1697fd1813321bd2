"""The lower triangle: half the bytes of a symmetric matrix, no loss. What a bundle holds unless told otherwise.

All n² numbers. The form of a matrix being computed, or one in use where memory is no concern.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan

import torch
from torch import Tensor

from kfacpack.curvature.matrices.components import (
    InMemoryTensors,
    LazyPackedTensors,
    asymmetry,
    pack,
    row_indices,
    unpack,
)
from kfacpack.curvature.matrices.matrix import Matrix, Operator, require_square
from kfacpack.errors import MatrixError


class PackedOperator(Operator):
    """All n² numbers."""

    def __call__(self, x: Tensor) -> Tensor:
        (full,) = self.tensors
        return full @ x


class Packed(Matrix):
    form = "packed"

    @classmethod
    def from_dense(cls, matrix: Tensor, *, psd: bool = True) -> Packed:
        """From a (n, n) tensor; only its lower triangle is looked at."""
        return cls(require_square(matrix), InMemoryTensors(data=pack(matrix)), psd=psd)

    def operator(self, dtype: torch.dtype, device: torch.device | None = None) -> PackedOperator:
        return PackedOperator(self._full(dtype, device))

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._full(dtype)

    def psd_witnesses(self) -> Iterator[Tensor]:
        yield self.dense(torch.float64)

    def row_index(self) -> Tensor:
        return row_indices(self.side)

    def _full(self, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        data, scale = self.stored_numbers(dtype, device)
        return unpack(data, self.side, scale)


class Dense(Matrix):
    form = "dense"

    @classmethod
    def of(
        cls, matrix: Tensor, *, psd: bool = True, examples: int | None = None, positions: int | None = None
    ) -> Dense:
        """From a symmetric (n, n) tensor, which must not be changed afterwards.

        It is not copied, unless m[i,j] and m[j,i] differ by rounding: then the lower triangle counts.
        """
        side = require_square(matrix)
        if isnan(gap := asymmetry(matrix)):
            raise MatrixError("the matrix has numbers that are not finite")
        if gap:
            # Some kernels add up m[i,j] in another order than m[j,i]: a few roundings of the largest are no fault.
            eps = min(torch.finfo(matrix.dtype).eps, torch.finfo(torch.float32).eps)
            if gap > 8 * eps * float(matrix.abs().amax()):
                problem = f"the matrix is not symmetric: m[i,j] and m[j,i] differ by up to {gap:.3g}"
                raise MatrixError(f"{problem}. If that is meant to be rounding, pass (m + m.T) / 2")
            matrix = unpack(pack(matrix), side)
        made = cls(side, InMemoryTensors(data=matrix), psd=psd, examples=examples, positions=positions)
        made._sound = True
        return made

    def operator(self, dtype: torch.dtype, device: torch.device | None = None) -> PackedOperator:
        return PackedOperator(self.numbers(dtype, device))

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.numbers(dtype)

    def psd_witnesses(self) -> Iterator[Tensor]:
        yield self.numbers(torch.float64)

    def violation(self) -> tuple[str, str] | None:
        if gap := asymmetry(self.components["data"]):
            return "data", f"is not symmetric: m[i,j] and m[j,i] differ by up to {gap:.3g}"
        return None

    def for_storage(self) -> Matrix:
        triangle = LazyPackedTensors(self.components)
        return Packed(self.side, triangle, psd=self.psd, examples=self.examples, positions=self.positions)
