"""Two bytes a number: what `fp16` and `bf16` share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfacpack.compression.codecs.base import Codec, Specs

if TYPE_CHECKING:
    from typing_extensions import Self

    from kfacpack.curvature.matrices import Matrix


class Half(Codec):
    structural = False
    file_type: str

    @classmethod
    def parse(cls, argument: str | None) -> Self:
        return cls.without_argument(argument)

    def __str__(self) -> str:
        return self.name

    def specs(self, matrix: Matrix) -> Specs | None:
        kept = {name: spec for name, spec in matrix.components.specs.items() if name != "scale"}
        return {**kept, "data": (self.file_type, kept["data"][1])}
