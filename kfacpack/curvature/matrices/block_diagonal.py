"""K diagonal blocks, everything between them dropped: 1/K of the bytes and of the arithmetic.

Block k covers q or q + 1 consecutive indices, q = n div K; the first n mod K blocks are the longer ones. All are stored
as triangles of the longest, the shorter ones with a last row of zeros, so that one batched product serves them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from kfacpack.bundle.layout import widest_block
from kfacpack.curvature.matrices.base import Matrix, Operator, require_square
from kfacpack.curvature.matrices.components import InMemory
from kfacpack.curvature.matrices.triangle import pack, row_of_each, unpack
from kfacpack.errors import MatrixError


class Batched(Operator):
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
        return cls(side, InMemory(data=pack(blocks)), psd=psd)

    @property
    def count(self) -> int:
        return self.components.specs["data"][1][0]

    def blocks(self, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """(K, s, s), s the widest block's side."""
        data, scale = self.stored_numbers(dtype, device)
        return unpack(data, widest_block(self.side, self.count), scale)

    def operator(self, dtype: torch.dtype, device: torch.device | None = None) -> Batched:
        blocks, longer = self.blocks(dtype, device), self.side % self.count
        if not longer:
            return Batched(blocks)
        return Batched(blocks[:longer], blocks[longer:, :-1, :-1].contiguous())

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
        return torch.arange(0, self.count * width, width)[:, None] + row_of_each(width)

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
