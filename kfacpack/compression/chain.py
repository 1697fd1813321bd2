"""The codecs, one file each. A new one is a file and its line here.

Codecs in a row: which numbers of a matrix are kept, then how each is held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfacpack.compression.codecs import Bf16Codec, BlockCodec, Codec, Fp16Codec, Int8Codec, PruneCodec, SvdCodec
from kfacpack.curvature.matrices.components import nbytes_of
from kfacpack.errors import KfacpackError

if TYPE_CHECKING:
    from kfacpack.compression.codecs import Specs
    from kfacpack.curvature.matrices.matrix import Matrix


CODECS: dict[str, type[Codec]] = {
    each.name: each
    for each in (
        BlockCodec,
        SvdCodec,
        PruneCodec,
        Int8Codec,
        Fp16Codec,
        Bf16Codec,
    )
}


EXAMPLES = "block:8+int8, svd:32+fp16, prune:15%, int8"


@dataclass(frozen=True)
class CodecChain:
    """At most one codec of structure and at most one type of numbers, in this order. Without any, nothing changes."""

    steps: tuple[Codec, ...] = ()

    @classmethod
    def parse(cls, spec: str) -> CodecChain:
        """From words such as block:8+int8."""
        if not isinstance(spec, str):
            raise KfacpackError(f"a codec is given as a text such as {EXAMPLES}, found {type(spec).__name__}")
        known = ", ".join(each.usage for each in CODECS.values())
        steps = []
        for word in spec.strip().split("+"):
            name, colon, argument = word.strip().partition(":")
            if name not in CODECS:
                raise KfacpackError(f"codec {word!r} in {spec!r}: expected one of {known}, joined by +: {EXAMPLES}")
            steps.append(CODECS[name].parse(argument if colon else None))
        if [step.structural for step in steps] not in ([True], [False], [True, False]):
            kinds = [[each.usage for each in CODECS.values() if each.structural is kind] for kind in (True, False)]
            known = "; then ".join(map(", ".join, kinds))
            problem = "expected at most one of structure, then at most one type of numbers"
            raise KfacpackError(f"codec {spec!r}: {problem}: {known}")
        return cls(tuple(steps))

    def __str__(self) -> str:
        return "+".join(map(str, self.steps)) or "none"

    @property
    def structure(self) -> Codec | None:
        return next((step for step in self.steps if step.structural), None)

    def encode(self, matrix: Matrix) -> tuple[CodecChain, Matrix]:
        """The steps that make the matrix smaller, and what they make of it.

        A diagonal has no structure to choose from. Where no step makes it smaller, the matrix itself comes back.
        """
        found, taken = matrix, []
        for step in self.steps:
            if step.structural and matrix.structure == "diagonal":
                continue
            stored = found.for_storage()
            specs = step.specs(stored)
            if specs is not None and _nbytes(specs) < stored.nbytes:
                found = step.encode(found)
                taken.append(step)
        return CodecChain(tuple(taken)), found


def _nbytes(specs: Specs) -> int:
    return sum(map(nbytes_of, specs.values()))
