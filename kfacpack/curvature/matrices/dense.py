"""All n² numbers. The form of a matrix being computed, or one in use where memory is no concern."""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan

import torch
from torch import Tensor

from kfacpack.curvature.matrices.base import Matrix, require_square
from kfacpack.curvature.matrices.components import InMemory, PackedOnDemand
from kfacpack.curvature.matrices.packed import Full, Packed
from kfacpack.curvature.matrices.triangle import asymmetry, pack, unpack
from kfacpack.errors import MatrixError


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
        made = cls(side, InMemory(data=matrix), psd=psd, examples=examples, positions=positions)
        made._sound = True
        return made

    def operator(self, dtype: torch.dtype, device: torch.device | None = None) -> Full:
        return Full(self.numbers(dtype, device))

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.numbers(dtype)

    def psd_witnesses(self) -> Iterator[Tensor]:
        yield self.numbers(torch.float64)

    def violation(self) -> tuple[str, str] | None:
        if gap := asymmetry(self.components["data"]):
            return "data", f"is not symmetric: m[i,j] and m[j,i] differ by up to {gap:.3g}"
        return None

    def for_storage(self) -> Matrix:
        triangle = PackedOnDemand(self.components)
        return Packed(self.side, triangle, psd=self.psd, examples=self.examples, positions=self.positions)
