"""All n² numbers. The form of a matrix being computed, or one in use where memory is no concern."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kfacpack.curvature.components import InMemory, MadeOnDemand
from kfacpack.curvature.matrices.base import Matrix, require_square
from kfacpack.curvature.matrices.packed import Packed
from kfacpack.curvature.matrices.triangle import asymmetry, pack, triangle


class Dense(Matrix):
    form = "dense"

    @classmethod
    def of(cls, matrix: Tensor, *, psd: bool = True, examples: int | None = None, positions: int | None = None) -> Dense:
        """A (n, n) symmetric tensor, not copied."""
        side = require_square(matrix)
        return cls(side, InMemory(data=matrix), psd=psd, examples=examples, positions=positions)

    def matmul(self, x: Tensor) -> Tensor:
        return self.numbers(x.dtype, x.device) @ x

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.numbers(dtype)

    def psd_witnesses(self) -> Iterator[Tensor]:
        yield self.numbers(torch.float64)

    def violations(self) -> Iterator[tuple[str, str]]:
        data = self.components["data"]
        # Some kernels add up m[i,j] in another order than m[j,i]: a few roundings of the largest number are no fault.
        tolerated = 8 * torch.finfo(data.dtype).eps * float(max(map(abs, data.aminmax())))
        if (gap := asymmetry(data)) > tolerated:
            yield "data", f"is not symmetric: m[i,j] and m[j,i] differ by up to {gap:.3g}, at most {tolerated:.3g} is rounding"

    def for_storage(self) -> Matrix:
        dtype, _ = self.components.specs["data"]
        on_demand = MadeOnDemand((dtype, (triangle(self.side),)), lambda: pack(self.components["data"]))
        return Packed(
            self.side, on_demand, psd=self.psd, examples=self.examples, positions=self.positions
        )
