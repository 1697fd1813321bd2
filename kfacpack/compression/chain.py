"""Codec chains such as "block:8+int8", and the registry of codecs. A new codec is a class and its entry in `CODECS`."""

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
    codec.name: codec for codec in (BlockCodec, SvdCodec, PruneCodec, Int8Codec, Fp16Codec, Bf16Codec)
}
"""Codecs by name."""

EXAMPLES = "block:8+int8, svd:32+fp16, prune:15%, int8"
"""Examples of specs for help and error messages."""


@dataclass(frozen=True)
class CodecChain:
    """At most one structural codec, followed by at most one number codec. An empty chain changes nothing."""

    steps: tuple[Codec, ...] = ()
    """The codecs, in the order in which they are applied."""

    @classmethod
    def parse(cls, spec: str) -> CodecChain:
        """Parses a spec such as "block:8+int8".

        Args:
            spec: Codecs joined by +.

        Returns:
            The chain.

        Raises:
            KfacpackError: If the spec is not a string, or has an unknown codec, an invalid argument or an invalid
                combination.
        """
        if not isinstance(spec, str):
            raise KfacpackError(f"expected a codec as a string such as {EXAMPLES}, got {type(spec).__name__}")
        supported = ", ".join(codec.usage for codec in CODECS.values())
        steps = []
        for part in spec.strip().split("+"):
            name, colon, argument = part.strip().partition(":")
            if name not in CODECS:
                raise KfacpackError(
                    f"unknown codec {part!r} in {spec!r}: expected one of {supported}, joined by +, such as {EXAMPLES}"
                )
            steps.append(CODECS[name].parse(argument if colon else None))
        if [step.structural for step in steps] not in ([True], [False], [True, False]):
            structures, numbers = (
                ", ".join(codec.usage for codec in CODECS.values() if codec.structural is structural)
                for structural in (True, False)
            )
            expected = f"expected at most one of {structures}, then at most one of {numbers}"
            raise KfacpackError(f"codec {spec!r}: {expected}")
        return cls(tuple(steps))

    def __str__(self) -> str:
        return "+".join(map(str, self.steps)) or "none"

    @property
    def structure(self) -> Codec | None:
        """The structural codec, if there is one."""
        return next((step for step in self.steps if step.structural), None)

    def encode(self, matrix: Matrix) -> tuple[CodecChain, Matrix]:
        """Compresses a matrix.

        Steps that do not make the matrix smaller are skipped, as are structural codecs of a diagonal matrix.

        Args:
            matrix: The matrix to compress.

        Returns:
            The steps that were applied and the compressed matrix, which is `matrix` itself if there were none.
        """
        encoded, applied = matrix, []
        for step in self.steps:
            if step.structural and matrix.structure == "diagonal":
                continue
            stored = encoded.for_storage()
            specs = step.specs(stored)
            if specs is not None and _nbytes(specs) < stored.nbytes:
                encoded = step.encode(encoded)
                applied.append(step)
        return CodecChain(tuple(applied)), encoded


def _nbytes(specs: Specs) -> int:
    return sum(map(nbytes_of, specs.values()))
