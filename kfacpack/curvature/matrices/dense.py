"""All n² numbers. The form of a matrix being computed, or one in use where memory is no concern."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from kfacpack.curvature.components import InMemory, PackedOnDemand
from kfacpack.curvature.matrices.base import Matrix, require_square
from kfacpack.curvature.matrices.packed import Packed
from kfacpack.curvature.triangle import asymmetry


class Dense(Matrix):
    form = "dense"

    @classmethod
    def of(
        cls, matrix: Tensor, *, psd: bool = True, examples: int | None = None, positions: int | None = None
    ) -> Dense:
        """From a (n, n) tensor, not copied, and not to be changed afterwards. Refused here if it is not symmetric."""
        side = require_square(matrix)
        made = cls(side, InMemory(data=matrix), psd=psd, examples=examples, positions=positions)
        for _, problem in made.violations():
            raise ValueError(f"the matrix {problem}")
        return made

    def matmul(self, x: Tensor) -> Tensor:
        return self.numbers(x.dtype, x.device) @ x

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.numbers(dtype)

    def psd_witnesses(self) -> Iterator[Tensor]:
        yield self.numbers(torch.float64)

    def violations(self) -> Iterator[tuple[str, str]]:
        if self._asymmetry is not None:
            yield "data", f"is not symmetric: m[i,j] and m[j,i] differ by up to {self._asymmetry:.3g}"

    @cached_property
    def _asymmetry(self) -> float | None:
        """The largest |m[i,j] - m[j,i]|, or None if it is rounding. Kept, so that saving does not look again."""
        data = self.components["data"]
        # Some kernels add up m[i,j] in another order than m[j,i]: a few roundings of the largest number are no fault.
        if (gap := asymmetry(data)) <= 8 * torch.finfo(data.dtype).eps * float(data.abs().amax()):
            return None
        return gap

    def for_storage(self) -> Matrix:
        triangle = PackedOnDemand(self.components)
        return Packed(self.side, triangle, psd=self.psd, examples=self.examples, positions=self.positions)
