"""Only the diagonal: the curvature of single numbers, or a factor that is diagonal by nature.

K diagonal blocks, everything between them dropped: 1/K of the bytes and of the arithmetic.

Block k covers q or q + 1 consecutive indices, q = n div K; the first n mod K blocks are the longer ones. All are stored
as triangles of the longest, the shorter ones with a last row of zeros, so that one batched product serves them all.

M = U diag(w) Uᵀ with U of shape (n, r): r/n of the numbers, and positive semi-definite if no weight is negative.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from kfacpack.curvature.matrices.components import InMemoryTensors, pack, row_indices, unpack
from kfacpack.curvature.matrices.matrix import Matrix, Operator, leading, require_square, width_for
from kfacpack.errors import MatrixError
from kfacpack.format.schema import widest_block


class DiagonalOperator(Operator):
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
        return cls(len(diagonal), InMemoryTensors(data=diagonal), psd=psd, examples=examples, positions=positions)

    def operator(self, dtype: torch.dtype, device: torch.device | None = None) -> DiagonalOperator:
        return DiagonalOperator(self.numbers(dtype, device))

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


class BlockDiagonalOperator(Operator):
    """The longer blocks and the shorter ones, (k, s, s) each: a batched product for each length, and no padding."""

    def __call__(self, x: Tensor) -> Tensor:
        ends = [blocks.shape[0] * blocks.shape[1] for blocks in self.tensors]
        parts = [
            (blocks @ rows.reshape(*blocks.shape[:2], -1)).reshape(rows.shape)
            for blocks, rows in zip(self.tensors, x.split(ends), strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class BlockDiagonal(Matrix):
    form = "block"

    @classmethod
    def from_dense(cls, matrix: Tensor, count: int, *, psd: bool = True) -> BlockDiagonal:
        """The `count` diagonal blocks of a (n, n) tensor; only their lower triangles are looked at."""
        side = require_square(matrix)
        if not 1 <= count <= side:
            raise MatrixError(f"a matrix of side {side} has 1 to {side} diagonal blocks, not {count}")
        width = widest_block(side, count)
        blocks = matrix.new_zeros((count, width, width))
        for block, (start, stop) in zip(blocks, spans(side, count), strict=True):
            block[: stop - start, : stop - start] = matrix[start:stop, start:stop]
        return cls(side, InMemoryTensors(data=pack(blocks)), psd=psd)

    @property
    def count(self) -> int:
        return self.components.specs["data"][1][0]

    def blocks(self, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """(K, s, s), s the widest block's side."""
        data, scale = self.stored_numbers(dtype, device)
        return unpack(data, widest_block(self.side, self.count), scale)

    def operator(self, dtype: torch.dtype, device: torch.device | None = None) -> BlockDiagonalOperator:
        blocks, longer = self.blocks(dtype, device), self.side % self.count
        if not longer:
            return BlockDiagonalOperator(blocks)
        return BlockDiagonalOperator(blocks[:longer], blocks[longer:, :-1, :-1].contiguous())

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        sizes = (stop - start for start, stop in spans(self.side, self.count))
        parts = (block[:size, :size] for block, size in zip(self.blocks(dtype), sizes, strict=True))
        full: Tensor = torch.block_diag(*parts)
        return full

    def eigenvalues(self) -> Tensor:
        of_blocks = (torch.linalg.eigvalsh(blocks).flatten() for blocks in self.operator(torch.float64).tensors)
        return torch.cat(list(of_blocks)).sort(descending=True).values

    def psd_witnesses(self) -> Iterator[Tensor]:
        yield self.blocks(torch.float64)

    def row_index(self) -> Tensor:
        width = widest_block(self.side, self.count)
        return torch.arange(0, self.count * width, width)[:, None] + row_indices(width)

    def violation(self) -> tuple[str, str] | None:
        longer = self.side % self.count
        padding = self.components["data"][longer:, -widest_block(self.side, self.count) :]
        if longer and bool(padding.any()):
            return "data", "has numbers in the padding of its shorter blocks, expected zeros"
        return super().violation()


def spans(side: int, count: int) -> list[tuple[int, int]]:
    """The indices each block covers, as (start, stop)."""
    size, longer = divmod(side, count)
    starts = [k * size + min(k, longer) for k in range(count + 1)]
    return list(pairwise(starts))


class LowRankOperator(Operator):
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
        return cls(len(vectors), InMemoryTensors(data=data, weights=kept.to(dtype)), psd=psd)

    def operator(self, dtype: torch.dtype, device: torch.device | None = None) -> LowRankOperator:
        return LowRankOperator(*self._factors(dtype, device))

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
