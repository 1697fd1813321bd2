"""Only the diagonal: the curvature of single numbers, or a factor that is diagonal by nature."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kfacpack.curvature.matrices.base import Matrix, Operator
from kfacpack.curvature.matrices.components import InMemory
from kfacpack.errors import MatrixError


class EachRow(Operator):
    """A factor for each row of x."""

    def __call__(self, x: Tensor) -> Tensor:
        (factors,) = self.tensors
        return factors[:, None] * x


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

    def operator(self, dtype: torch.dtype, device: torch.device | None = None) -> EachRow:
        return EachRow(self.numbers(dtype, device))

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.numbers(dtype).diag()

    @property
    def plain_shape(self) -> tuple[int, ...]:
        return (self.side,)

    def plain(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.numbers(dtype)

    def eigenvalues(self) -> Tensor:
        return self.numbers(torch.float64).sort(descending=True).values

    def psd_witnesses(self) -> Iterator[Tensor]:
        # The largest entry goes along, so that the smallest is judged by the size of the whole.
        yield torch.stack(self.numbers(torch.float64).aminmax()).diag()
