"""`block:K`: K diagonal blocks of each matrix, nothing between them. The diagonal stays, and so does the trace of G."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfacpack.bundle.layout import triangle, widest_block
from kfacpack.compression.codecs.base import Codec, Specs, float_type, whole_number, with_counts_of
from kfacpack.curvature.matrices import BlockDiagonal
from kfacpack.curvature.matrices.components import FILE_TYPES

if TYPE_CHECKING:
    from kfacpack.curvature.matrices import Matrix


@dataclass(frozen=True)
class Block(Codec):
    count: int

    name = "block"
    usage = "block:K"
    structural = True

    @classmethod
    def parse(cls, argument: str | None) -> Block:
        if (count := whole_number(argument)) is None:
            raise cls.refusal(argument, "K the number of diagonal blocks, such as block:8")
        return cls(count)

    def __str__(self) -> str:
        return f"block:{self.count}"

    def specs(self, matrix: Matrix) -> Specs | None:
        if self.count > matrix.side:
            return None
        shape = (self.count, triangle(widest_block(matrix.side, self.count)))
        return {"data": (FILE_TYPES[float_type(matrix)], shape)}

    def encode(self, matrix: Matrix) -> Matrix:
        full = matrix.dense(float_type(matrix))
        return with_counts_of(BlockDiagonal.from_dense(full, self.count, psd=matrix.psd), matrix)
