"""`svd:R`, `svd:P%`: the R largest eigenvalues of each matrix and their vectors, the best there is of that rank."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

import torch

from kfacpack.compression.codecs.base import Codec, Specs, share, whole_number, with_counts_of
from kfacpack.curvature.matrices import LowRank
from kfacpack.curvature.matrices.components import FILE_TYPES
from kfacpack.curvature.matrices.spectrum import width_for

if TYPE_CHECKING:
    from kfacpack.curvature.matrices import Matrix


@dataclass(frozen=True)
class Svd(Codec):
    asked: int | float
    """The rank, or as a float the rank's share of the side."""

    name = "svd"
    usage = "svd:R or svd:P%"
    structural = True

    @classmethod
    def parse(cls, argument: str | None) -> Svd:
        asked = whole_number(argument) or share(argument)
        if asked is None:
            raise cls.refusal(argument, "a rank or its share of the side, such as svd:32 or svd:25%")
        return cls(asked)

    def __str__(self) -> str:
        return f"svd:{self.asked}" if isinstance(self.asked, int) else f"svd:{100 * self.asked:.8g}%"

    def rank(self, side: int) -> int:
        return self.asked if isinstance(self.asked, int) else ceil(self.asked * side)

    def specs(self, matrix: Matrix) -> Specs | None:
        rank = self.rank(matrix.side)
        if rank > matrix.side:
            return None
        dtype = FILE_TYPES[_type(matrix)]
        return {"data": (dtype, (matrix.side, rank)), "weights": (dtype, (rank,))}

    def encode(self, matrix: Matrix) -> Matrix:
        rank = self.rank(matrix.side)
        values, vectors = matrix.leading(width_for(matrix.side, rank))
        return with_counts_of(LowRank.from_spectrum(values, vectors, rank, _type(matrix), psd=matrix.psd), matrix)


def _type(matrix: Matrix) -> torch.dtype:
    """Vectors are computed, not picked: in float32 at least."""
    return torch.float64 if matrix.dtype is torch.float64 else torch.float32
