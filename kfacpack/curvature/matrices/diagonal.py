"""Only the diagonal: the curvature of single numbers, or a factor that is diagonal by nature."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kfacpack.curvature.matrices.base import Matrix
from kfacpack.curvature.matrices.components import InMemory
from kfacpack.errors import MatrixError


class Diagonal(Matrix):
    form = "diagonal"
    structure = "diagonal"

    @classmethod
    def of(
        cls, diagonal: Tensor, *, psd: bool = True, examples: int | None = None, positions: int | None = None
    ) -> Diagonal:
        """From its (n,) diagonal, not copied."""
        if diagonal.dim() != 1 or not len(diagonal) or not diagonal.is_floating_point():
            raise MatrixError(f"expected a vector of floats, found {diagonal.dtype} of shape {list(diagonal.shape)}")
        return cls(len(diagonal), InMemory(data=diagonal), psd=psd, examples=examples, positions=positions)

    def matmul(self, x: Tensor) -> Tensor:
        return self.numbers(x.dtype, x.device)[:, None] * x

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.numbers(dtype).diag()

    def psd_witnesses(self) -> Iterator[Tensor]:
        # The largest entry goes along, so that the smallest is judged by the size of the whole.
        yield torch.stack(self.numbers(torch.float64).aminmax()).diag()
