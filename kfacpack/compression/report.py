"""What compression made of a curvature, block by block and as a whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kfacpack.bundle.layout import LAYOUTS
from kfacpack.bundle.manifest import Loss
from kfacpack.compression.measure import Moments, moments

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kfacpack.compression.chain import Chain
    from kfacpack.compression.measure import Side
    from kfacpack.curvature.block import CurvatureBlock
    from kfacpack.curvature.matrices import Matrix

    Made = Mapping[int, tuple[Chain, Matrix]]
    """For the id of a matrix as it was, the steps that were taken and what they made of it."""
    Sides = Mapping[tuple[int, ...], Side]
    """For the ids of the matrices on one side of a block as they were, what is known of them."""

_DIGITS = 6
"""Of a recorded error: more would be noise, and differ from one processor to the next."""


@dataclass(frozen=True)
class BlockReport:
    name: str
    step: str | None
    """The codec, or those of its matrices in turn; None if the block is as it was."""
    kept: tuple[str, ...]
    """The roles of its matrices that are as they were: no step made them smaller."""
    bytes: int
    """Of its matrices in a file, without those that a block before it brings along."""
    dense_bytes: int
    """The same as full float32; diagonals as they are."""
    moments: Moments
    real: tuple[float, float] | None = None
    """`quadratic` on a task vector, before and after."""


@dataclass(frozen=True)
class Report:
    blocks: tuple[BlockReport, ...]

    @property
    def bytes(self) -> int:
        return sum(block.bytes for block in self.blocks)

    @property
    def dense_bytes(self) -> int:
        return sum(block.dense_bytes for block in self.blocks)

    @property
    def moments(self) -> Moments:
        return sum((block.moments for block in self.blocks), Moments())

    @property
    def real(self) -> tuple[float, float] | None:
        values = [block.real for block in self.blocks if block.real is not None]
        return (sum(before for before, _ in values), sum(after for _, after in values)) if values else None


def relative_error(real: tuple[float, float] | None) -> float | None:
    """|q' − q| / |q|; None where q is not known, or zero."""
    return abs(real[1] - real[0]) / abs(real[0]) if real and real[0] else None


def assembled(block: CurvatureBlock, made: Made, sides: Sides, counted: set[int]) -> tuple[CurvatureBlock, BlockReport]:
    """A block of the matrices that were made for it, its loss written into it; `counted` are those others brought."""
    structure = block.structure.replaced(lambda matrix: made[id(matrix)][1])
    found = moments(block.structure.weights, [sides[tuple(map(id, side))] for side in block.structure.sides])
    chains = {role: made[id(matrix)][0] for role, matrix in block.structure.matrices()}
    changed = any(chain.steps for chain in chains.values())
    step = ", ".join(dict.fromkeys(map(str, chains.values()))) if changed else None
    losses = block.losses
    if step:
        losses += (Loss(step=step, frobenius=_rounded(found.frobenius), quadratic=_rounded(found.quadratic)),)
    own = {id(matrix): matrix for _, matrix in structure.matrices() if id(matrix) not in counted}
    counted.update(own)
    report = BlockReport(
        name=block.name,
        step=step,
        kept=tuple(role for role, chain in chains.items() if not chain.steps),
        bytes=sum(matrix.for_storage().nbytes for matrix in own.values()),
        dense_bytes=sum(dense_bytes(matrix) for matrix in own.values()),
        moments=found,
    )
    return replace(block, structure=structure, losses=losses), report


def dense_bytes(matrix: Matrix) -> int:
    """What a matrix would take as full float32; a diagonal as it is."""
    return 4 * LAYOUTS[matrix.form].full(matrix.side)


def _rounded(error: float) -> float:
    return float(f"{error:.{_DIGITS}g}")
