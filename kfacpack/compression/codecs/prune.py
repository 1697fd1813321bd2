"""`prune:P%`: the entries of largest magnitude, by coordinates. Each costs three numbers, so a third is no saving."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfacpack.bundle.layout import triangle
from kfacpack.compression.codecs.base import Codec, Specs, float_type, share, with_counts_of
from kfacpack.curvature.matrices import Sparse
from kfacpack.curvature.matrices.components import FILE_TYPES

if TYPE_CHECKING:
    from kfacpack.curvature.matrices import Matrix


@dataclass(frozen=True)
class Prune(Codec):
    fraction: float

    name = "prune"
    usage = "prune:P%"
    structural = True

    @classmethod
    def parse(cls, argument: str | None) -> Prune:
        if (fraction := share(argument)) is None:
            raise cls.refusal(argument, "the share of entries to keep, such as prune:15%")
        return cls(fraction)

    def __str__(self) -> str:
        return f"prune:{100 * self.fraction:.8g}%"

    def specs(self, matrix: Matrix) -> Specs | None:
        count = round(self.fraction * triangle(matrix.side))
        if not count:
            return None  # a matrix of zeros would be no smaller version of it
        return {
            "data": (FILE_TYPES[float_type(matrix)], (count,)),
            "rows": ("I32", (count,)),
            "columns": ("I32", (count,)),
        }

    def encode(self, matrix: Matrix) -> Matrix:
        return with_counts_of(Sparse.from_dense(matrix.dense(float_type(matrix)), self.fraction), matrix)
