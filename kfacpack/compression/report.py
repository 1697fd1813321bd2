"""What compression made of a curvature, block by block and as a whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kfacpack.bundle.layout import LAYOUTS
from kfacpack.bundle.manifest import Loss
from kfacpack.compression.measure import Moments, moments
from kfacpack.curvature.curvature import Curvature

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kfacpack.compression.chain import Chain
    from kfacpack.compression.measure import Side
    from kfacpack.curvature.block import CurvatureBlock
    from kfacpack.curvature.matrices import Matrix

    Made = Mapping[int, tuple[Chain, Matrix]]
    """For the id of a matrix as it was, the steps that were taken and what they made of it."""
    Real = tuple[float, float]
    """`quadratic` on a task vector, before and after."""
    Measure = Callable[[CurvatureBlock, CurvatureBlock], Real]
    Sides = Mapping[tuple[int, ...], Side]
    """For the ids of the matrices on one side of a block as they were, what is known of them."""


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
    real: Real | None = None


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
    def real(self) -> Real | None:
        values = [block.real for block in self.blocks if block.real is not None]
        return (sum(before for before, _ in values), sum(after for _, after in values)) if values else None


def relative_error(real: Real | None) -> float | None:
    """|q' − q| / |q|; None where q is not known, or zero."""
    return abs(real[1] - real[0]) / abs(real[0]) if real and real[0] else None


def assembled(
    block: CurvatureBlock, made: Made, sides: Sides, counted: set[int], measure: Measure | None
) -> tuple[CurvatureBlock, BlockReport]:
    """A block of the matrices that were made for it, its loss written into it; `counted` are those others brought."""
    structure = block.structure.replaced(lambda matrix: made[id(matrix)][1])
    real = measure(block, replace(block, structure=structure)) if measure else None
    found = moments(block.structure.weights, [sides[tuple(map(id, side))] for side in block.structure.sides])
    chains = {role: made[id(matrix)][0] for role, matrix in block.structure.matrices()}
    changed = any(chain.steps for chain in chains.values())
    step = ", ".join(dict.fromkeys(map(str, chains.values()))) if changed else None
    own = {id(matrix): matrix for _, matrix in structure.matrices() if id(matrix) not in counted}
    counted.update(own)
    report = BlockReport(
        name=block.name,
        step=step,
        kept=tuple(role for role, chain in chains.items() if not chain.steps),
        bytes=sum(matrix.for_storage().nbytes for matrix in own.values()),
        dense_bytes=sum(dense_bytes(matrix) for matrix in own.values()),
        moments=found,
        real=real,
    )
    losses = (*block.losses, _loss(step, found, real)) if step else block.losses
    return replace(block, structure=structure, losses=losses), report


def concluded(
    before: Curvature, blocks: Sequence[CurvatureBlock], reports: Sequence[BlockReport], name: str
) -> tuple[Curvature, Report]:
    """The whole of what was assembled, with the loss of the whole."""
    report, about = Report(tuple(reports)), before.about
    if any(block.step for block in reports):
        losses = (*about.losses, _loss(name, report.moments, report.real))
        about = about.model_copy(update={"losses": losses})
    return Curvature(blocks, about), report


def _loss(step: str, found: Moments, real: Real | None) -> Loss:
    return Loss.measured(step, frobenius=found.frobenius, quadratic=found.quadratic, vector=relative_error(real))


def dense_bytes(matrix: Matrix) -> int:
    """What a matrix would take as full float32; a diagonal as it is."""
    return 4 * LAYOUTS[matrix.form].full(matrix.side)
