"""`kp.compress`: every matrix of a curvature by a codec, and what that loses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfacpack.compression.budget import choose
from kfacpack.compression.chain import Chain
from kfacpack.compression.measure import compare
from kfacpack.compression.report import assembled, concluded
from kfacpack.curvature.curvature import Curvature
from kfacpack.errors import KfacpackError

if TYPE_CHECKING:
    from torch import Tensor

    from kfacpack.compression.measure import Side
    from kfacpack.compression.report import Measure, Report
    from kfacpack.curvature.block import CurvatureBlock
    from kfacpack.curvature.matrices import Matrix

    Progress = Callable[[int, int], None]
    """Called with how many blocks are done, and how many there are."""
    Vector = Callable[[str], Tensor]
    """A task vector: a parameter's change, by name."""


@dataclass(frozen=True)
class Choice:
    """Which codec each matrix gets, and what the losses of the whole call that."""

    name: str
    chain_for: Callable[[Matrix], Chain]


def compress(curvature: Curvature, spec: str | None = None, *, budget: str | int | None = None) -> Curvature:
    """A smaller curvature, with its losses written into its blocks.

    `spec` is one of block:K, svd:R, svd:P% and prune:P%, or one of int8, fp16 and bf16, or one of each joined by +,
    such as "block:8+int8". It is applied to every matrix that it makes smaller. With `budget` instead ("70MB", "10%" of
    dense float32, or a number of bytes) each matrix gets its own, so that the whole loses least at that size of a saved
    bundle. A matrix that blocks share stays shared.
    """
    if not isinstance(curvature, Curvature):
        raise KfacpackError(f"expected a curvature, such as kp.load(path), found {type(curvature).__name__}")
    return compress_by(curvature, choice_of(curvature, spec, budget))[0]


def choice_of(
    curvature: Curvature,
    spec: str | None,
    budget: str | int | None,
    progress: Progress = lambda done, total: None,
    *,
    with_vector: bool = False,
) -> Choice:
    """For a budget, all codecs that come into question are tried on every matrix.

    `with_vector` leaves room for the errors on a task vector in the file.
    """
    if spec is not None and budget is None:
        chain = Chain.parse(spec)
        return Choice(str(chain), lambda matrix: chain)
    if budget is not None and spec is None:
        return Choice(*choose(curvature, budget, progress, with_vector=with_vector))
    raise KfacpackError("compress takes either a codec, such as block:8+int8, or a budget, such as 70MB or 10%")


def compress_by(
    curvature: Curvature,
    choice: Choice,
    *,
    vector: Vector | None = None,
    progress: Progress = lambda done, total: None,
) -> tuple[Curvature, Report]:
    """Every matrix by the codec that is chosen for it, one block after the other.

    What is made stays in memory; of the given matrices only those of the block at hand are unpacked. With `vector`, the
    error of `quadratic` is measured on that task vector, too.
    """
    made: dict[int, tuple[Chain, Matrix]] = {}
    sides: dict[tuple[int, ...], Side] = {}
    counted: set[int] = set()
    measure = _measuring(curvature, vector) if vector else None
    blocks, reports = [], []
    for number, block in enumerate(curvature.blocks):
        progress(number, len(curvature.blocks))
        for side in block.structure.sides:
            for matrix in side:
                if id(matrix) not in made:
                    made[id(matrix)] = choice.chain_for(matrix).encode(matrix)
            key = tuple(map(id, side))
            if key not in sides:
                sides[key] = compare(side, [made[each][1] for each in key])
        smaller, report = assembled(block, made, sides, counted, measure)
        blocks.append(smaller)
        reports.append(report)
    progress(len(curvature.blocks), len(curvature.blocks))
    return concluded(curvature, blocks, reports, choice.name)


def _measuring(curvature: Curvature, vector: Vector) -> Measure:
    """`quadratic` of a block on a task vector, before and after."""
    shapes = {parameter.name: parameter.shape for parameter in curvature.about.base.parameters}

    def measure(before: CurvatureBlock, after: CurvatureBlock) -> tuple[float, float]:
        tau = {name: vector(name) for name in before.parameters}
        return float(before.quadratic(tau, shapes)), float(after.quadratic(tau, shapes))

    return measure
