"""`int8`: whole numbers from -127 to 127, times one factor for each stored row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfacpack.bundle.layout import LAYOUTS
from kfacpack.compression.codecs.base import Codec, Specs

if TYPE_CHECKING:
    from kfacpack.curvature.matrices import Matrix


@dataclass(frozen=True)
class Int8(Codec):
    name = "int8"
    usage = "int8"
    structural = False

    @classmethod
    def parse(cls, argument: str | None) -> Int8:
        return cls.without_argument(argument)

    def __str__(self) -> str:
        return "int8"

    def specs(self, matrix: Matrix) -> Specs | None:
        if not matrix.may_be_int8:
            return None
        shape = matrix.components.specs["data"][1]
        scale = LAYOUTS[matrix.form].shapes(matrix.side, shape)["scale"]
        return {**matrix.components.specs, "data": ("I8", shape), "scale": ("F32", scale)}

    def encode(self, matrix: Matrix) -> Matrix:
        return matrix.for_storage().quantized()
