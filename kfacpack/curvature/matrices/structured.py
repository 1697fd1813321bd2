"""Matrices with structure: `Diagonal`, `BlockDiagonal` and `LowRank`.

`Diagonal` keeps only the diagonal.

`BlockDiagonal` keeps K diagonal blocks: 1/K of the bytes and of the arithmetic. Block k covers q or q + 1 consecutive
indices, q = n div K; the first n mod K blocks are the longer ones. All blocks are stored as triangles of the same
length; shorter blocks are padded with a last row of zeros, so that one batched product multiplies all of them.

`LowRank` is M = U diag(w) Uᵀ with U of shape (n, r): r/n of the values. It is positive semi-definite
if no weight is negative.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from kfacpack.curvature.matrices.components import InMemoryTensors, pack, row_indices, unpack
from kfacpack.curvature.matrices.matrix import Matrix, Operator, leading_eigenpairs, require_square, width_for
from kfacpack.errors import MatrixError
from kfacpack.format.schema import widest_block


class DiagonalOperator(Operator):
    """Multiplies each row of x by its factor."""

    is_diagonal = True

    def __call__(self, x: Tensor) -> Tensor:
        """Returns M x."""
        (factors,) = self.tensors
        return factors[..., None] * x

    def blocks(self, side: int) -> tuple[Tensor, ...]:
        """Returns the values as n blocks, (n, 1, 1)."""
        (factors,) = self.tensors
        return (factors[:, None, None],)


class Diagonal(Matrix):
    """A diagonal matrix: `data` (n,).

    Example:
        >>> import torch
        >>> import kfacpack as kp
        >>> kp.Diagonal.of(torch.ones(3)).dense().shape
        torch.Size([3, 3])
    """

    form = "diagonal"
    structure = "diagonal"

    @classmethod
    def of(
        cls, diagonal: Tensor, *, psd: bool = True, examples: int | None = None, positions: int | None = None
    ) -> Diagonal:
        """Wraps the diagonal of a matrix without copying it.

        Args:
            diagonal: Floating-point tensor, (n,).
            psd: Whether the matrix is declared to be positive semi-definite.
            examples: Number of examples that the matrix is a mean over, if known.
            positions: Number of positions that the matrix is a mean over, if known.

        Returns:
            The matrix.

        Raises:
            MatrixError: If `diagonal` is not a vector of floats.
        """
        if diagonal.dim() != 1 or not len(diagonal) or not diagonal.is_floating_point():
            raise MatrixError(f"expected a vector of floats, got {diagonal.dtype} of shape {list(diagonal.shape)}")
        return cls(len(diagonal), InMemoryTensors(data=diagonal), psd=psd, examples=examples, positions=positions)

    def _make_operator(self, dtype: torch.dtype, device: torch.device | None = None) -> DiagonalOperator:
        return DiagonalOperator(self.float_values(dtype, device))

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns M as an (n, n) tensor."""
        return self.float_values(dtype).diag()

    @property
    def plain_shape(self) -> tuple[int, ...]:
        """Shape of `plain`."""
        return (self.side,)

    def plain(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the diagonal, (n,)."""
        return self.float_values(dtype)

    def eigenvalues(self) -> Tensor:
        """Returns all eigenvalues, (n,), float64, in descending order."""
        return self.float_values(torch.float64).sort(descending=True).values

    def psd_witnesses(self) -> Iterator[Tensor]:
        """Yields the smallest and the largest value as a diagonal matrix, (2, 2)."""
        # The largest value is included so that the tolerance for the smallest is relative to it.
        yield torch.stack(self.float_values(torch.float64).aminmax()).diag()


class BlockDiagonalOperator(Operator):
    """Multiplies by the longer and by the shorter blocks, each (k, s, s), without padding, in batched products."""

    def __call__(self, x: Tensor) -> Tensor:
        """Returns M x."""
        heights = [blocks.shape[-3] * blocks.shape[-2] for blocks in self.tensors]
        parts = [
            (blocks @ rows.reshape(*blocks.shape[:-1], -1)).reshape(rows.shape)
            for blocks, rows in zip(self.tensors, x.split(heights, dim=-2), strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)

    def blocks(self, side: int) -> tuple[Tensor, ...]:
        """Returns the longer and the shorter blocks."""
        return self.tensors


class BlockDiagonal(Matrix):
    """A block-diagonal matrix: `data` (K, s(s+1)/2), the lower triangles of the blocks, with s the side of the largest.

    Example:
        >>> import torch
        >>> import kfacpack as kp
        >>> kp.BlockDiagonal.from_dense(torch.ones(4, 4), count=2).dense()[0]
        tensor([1., 1., 0., 0.])
    """

    form = "block"

    @classmethod
    def from_dense(cls, matrix: Tensor, count: int, *, psd: bool = True) -> BlockDiagonal:
        """Keeps the diagonal blocks of an (n, n) tensor.

        Args:
            matrix: Square floating-point tensor; only the lower triangles of the blocks are read.
            count: Number of blocks, from 1 to n.
            psd: Whether the matrix is declared to be positive semi-definite.

        Returns:
            The block-diagonal matrix.

        Raises:
            MatrixError: If `matrix` is not square or `count` is out of range.
        """
        side = require_square(matrix)
        if not 1 <= count <= side:
            raise MatrixError(f"expected 1 to {side} diagonal blocks of a matrix of side {side}, got {count}")
        width = widest_block(side, count)
        blocks = matrix.new_zeros((count, width, width))
        for block, (start, stop) in zip(blocks, spans(side, count), strict=True):
            block[: stop - start, : stop - start] = matrix[start:stop, start:stop]
        return cls(side, InMemoryTensors(data=pack(blocks)), psd=psd)

    @property
    def count(self) -> int:
        """Number of blocks."""
        return self.components.specs["data"][1][-2]

    def blocks(self, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """Returns the blocks, (K, s, s), the shorter ones padded with zeros.

        Args:
            dtype: Dtype of the result.
            device: Device of the result. Defaults to that of the components.
        """
        data, scale = self.stored_values(dtype, device)
        return unpack(data, widest_block(self.side, self.count), scale)

    def _make_operator(self, dtype: torch.dtype, device: torch.device | None = None) -> BlockDiagonalOperator:
        blocks, longer = self.blocks(dtype, device), self.side % self.count
        if not longer:
            return BlockDiagonalOperator(blocks)
        return BlockDiagonalOperator(blocks[..., :longer, :, :], blocks[..., longer:, :-1, :-1].contiguous())

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns M as an (n, n) tensor."""
        sizes = (stop - start for start, stop in spans(self.side, self.count))
        parts = (block[:size, :size] for block, size in zip(self.blocks(dtype), sizes, strict=True))
        full: Tensor = torch.block_diag(*parts)
        return full

    def eigenvalues(self) -> Tensor:
        """Returns all eigenvalues, (n,), float64, in descending order."""
        of_blocks = (torch.linalg.eigvalsh(blocks).flatten() for blocks in self.operator(torch.float64).tensors)
        return torch.cat(list(of_blocks)).sort(descending=True).values

    def psd_witnesses(self) -> Iterator[Tensor]:
        """Yields the blocks."""
        yield self.blocks(torch.float64)

    def row_index(self) -> Tensor:
        """Returns the stored row of every value, counted over all blocks."""
        width = widest_block(self.side, self.count)
        return torch.arange(0, self.count * width, width)[:, None] + row_indices(width)

    def violation(self) -> tuple[str, str] | None:
        """Checks that the padding of the shorter blocks is zero."""
        longer = self.side % self.count
        padding = self.components["data"][longer:, -widest_block(self.side, self.count) :]
        if longer and bool(padding.any()):
            return "data", "contains nonzero values in the padding of its shorter blocks"
        return super().violation()


def spans(side: int, count: int) -> list[tuple[int, int]]:
    """Returns the indices that each block covers, as (start, stop)."""
    size, longer = divmod(side, count)
    starts = [k * size + min(k, longer) for k in range(count + 1)]
    return list(pairwise(starts))


class LowRankOperator(Operator):
    """Computes U (w (Uᵀ x)) without forming the (n, n) matrix."""

    def __call__(self, x: Tensor) -> Tensor:
        """Returns M x."""
        u, w = self.tensors
        return u @ (w[..., None] * (u.mT @ x))

    def diagonal(self, side: int) -> Tensor:
        """Returns the diagonal of M without forming M."""
        u, w = self.tensors
        return u.square() @ w


class LowRank(Matrix):
    """M = U diag(w) Uᵀ: `data` is U (n, r), `weights` is w (r,).

    Example:
        >>> import torch
        >>> import kfacpack as kp
        >>> kp.LowRank.from_dense(torch.ones(3, 3), rank=1).dense().round()[0]
        tensor([1., 1., 1.])
    """

    form = "lowrank"
    rounding_keeps_psd = True  # rounding U leaves U diag(w) Uᵀ a sum of squares

    @classmethod
    def from_dense(cls, matrix: Tensor, rank: int, *, psd: bool = True) -> LowRank:
        """Computes the best approximation of a given rank, from the eigenvalues of largest magnitude.

        Args:
            matrix: Symmetric floating-point tensor, (n, n).
            rank: Rank r, from 0 to n.
            psd: Whether the matrix is declared to be positive semi-definite; negative eigenvalues are then set to zero.

        Returns:
            The low-rank matrix.

        Raises:
            MatrixError: If `matrix` is not square or `rank` is out of range.
        """
        side = require_square(matrix)
        if not 0 <= rank <= side:
            raise MatrixError(f"expected a rank from 0 to {side} for a matrix of side {side}, got {rank}")
        values, vectors = leading_eigenpairs(matrix.double(), width_for(side, rank))
        return cls.from_spectrum(values, vectors, rank, matrix.dtype, psd=psd)

    @classmethod
    def from_spectrum(
        cls, values: Tensor, vectors: Tensor, rank: int, dtype: torch.dtype, *, psd: bool = True
    ) -> LowRank:
        """Keeps the first eigenpairs.

        Args:
            values: Eigenvalues (w,), in descending order of magnitude.
            vectors: Eigenvectors (n, w).
            rank: Number of eigenpairs to keep.
            dtype: Dtype of the stored values.
            psd: Whether the matrix is declared to be positive semi-definite; negative eigenvalues are then set to zero.

        Returns:
            The low-rank matrix.
        """
        kept = values[:rank].clamp(min=0) if psd else values[:rank]
        data = vectors[:, :rank].to(dtype).contiguous()
        return cls(len(vectors), InMemoryTensors(data=data, weights=kept.to(dtype)), psd=psd)

    def _make_operator(self, dtype: torch.dtype, device: torch.device | None = None) -> LowRankOperator:
        return LowRankOperator(*self._factors(dtype, device))

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns M as an (n, n) tensor."""
        u, w = self._factors(dtype)
        return (u * w) @ u.T

    def eigenvalues(self) -> Tensor:
        """Returns all eigenvalues, (n,), float64, in descending order."""
        inner = torch.linalg.eigvalsh(self._inner())
        return torch.cat([inner, inner.new_zeros(self.side - len(inner))]).sort(descending=True).values

    def psd_witnesses(self) -> Iterator[Tensor]:
        """Yields a small matrix with the nonzero eigenvalues of M if a weight is negative; otherwise nothing."""
        _, w = self._factors(torch.float64)
        if bool((w < 0).any()):
            yield self._inner()

    def _inner(self) -> Tensor:
        """Returns R diag(w) Rᵀ, where U = Q R: at most (r, r), with the nonzero eigenvalues of M."""
        u, w = self._factors(torch.float64)
        r: Tensor = torch.linalg.qr(u, mode="r").R
        return (r * w) @ r.T

    def row_index(self) -> Tensor:
        """Returns the row of every value of U."""
        return torch.arange(self.side)[:, None]

    def _factors(self, dtype: torch.dtype, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        data, scale = self.stored_values(dtype, device)
        u = data if scale is None else data.to(dtype) * scale[..., None]
        return u, self.components["weights"].to(device=device, dtype=dtype)
