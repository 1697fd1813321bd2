"""M = U diag(w) Uᵀ with U of shape (n, r): r/n of the numbers, and positive semi-definite if no weight is negative."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kfacpack.curvature.matrices.base import Matrix, Operator, require_square
from kfacpack.curvature.matrices.components import InMemory
from kfacpack.curvature.matrices.spectrum import leading, width_for
from kfacpack.errors import MatrixError


class Factored(Operator):
    """U (w (Uᵀ x))."""

    def __call__(self, x: Tensor) -> Tensor:
        u, w = self.tensors
        return u @ (w[:, None] * (u.T @ x))


class LowRank(Matrix):
    form = "lowrank"
    rounding_keeps_psd = True  # rounding U leaves U diag(w) Uᵀ a sum of squares

    @classmethod
    def from_dense(cls, matrix: Tensor, rank: int, *, psd: bool = True) -> LowRank:
        """The best approximation of that rank: the eigenvectors of the `rank` largest |eigenvalues|."""
        side = require_square(matrix)
        if not 0 <= rank <= side:
            raise MatrixError(f"a matrix of side {side} has a rank from 0 to {side}, not {rank}")
        values, vectors = leading(matrix.double(), width_for(side, rank))
        return cls.from_spectrum(values, vectors, rank, matrix.dtype, psd=psd)

    @classmethod
    def from_spectrum(
        cls, values: Tensor, vectors: Tensor, rank: int, dtype: torch.dtype, *, psd: bool = True
    ) -> LowRank:
        """From eigenvalues, the largest magnitudes first, and their vectors, (w,) and (n, w)."""
        kept = values[:rank].clamp(min=0) if psd else values[:rank]
        data = vectors[:, :rank].to(dtype).contiguous()
        return cls(len(vectors), InMemory(data=data, weights=kept.to(dtype)), psd=psd)

    def operator(self, dtype: torch.dtype, device: torch.device | None = None) -> Factored:
        return Factored(*self._factors(dtype, device))

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        u, w = self._factors(dtype)
        return (u * w) @ u.T

    def eigenvalues(self) -> Tensor:
        inner = torch.linalg.eigvalsh(self._inner())
        return torch.cat([inner, inner.new_zeros(self.side - len(inner))]).sort(descending=True).values

    def psd_witnesses(self) -> Iterator[Tensor]:
        _, w = self._factors(torch.float64)
        if bool((w < 0).any()):
            yield self._inner()

    def _inner(self) -> Tensor:
        """R diag(w) Rᵀ with U = Q R, at most (r, r): as Q has orthonormal columns, M has its eigenvalues, and zeros."""
        u, w = self._factors(torch.float64)
        r: Tensor = torch.linalg.qr(u, mode="r").R
        return (r * w) @ r.T

    def row_index(self) -> Tensor:
        return torch.arange(self.side)[:, None]

    def _factors(self, dtype: torch.dtype, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        return self.numbers(dtype, device), self.components["weights"].to(device=device, dtype=dtype)
