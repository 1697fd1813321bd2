"""Only the diagonal: the curvature of single numbers, or a factor that is diagonal by nature."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kfacpack.curvature.components import InMemory
from kfacpack.curvature.matrices.base import Matrix


class Diagonal(Matrix):
    form = "diagonal"

    @classmethod
    def of(
        cls, diagonal: Tensor, *, psd: bool = True, examples: int | None = None, positions: int | None = None
    ) -> Diagonal:
        """From its (n,) diagonal, not copied."""
        return cls(len(diagonal), InMemory(data=diagonal), psd=psd, examples=examples, positions=positions)

    def matmul(self, x: Tensor) -> Tensor:
        return self.numbers(x.dtype, x.device)[:, None] * x

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.numbers(dtype).diag()

    def psd_witnesses(self) -> Iterator[Tensor]:
        yield self.numbers(torch.float64).amin().reshape(1, 1)
