"""The codec for each matrix with which a curvature loses least, at a given size of the file.

`kp.compress`: every matrix of a curvature by a codec, and what that loses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfacpack.compression.budget_search import BudgetSearch
from kfacpack.compression.candidates import Candidates
from kfacpack.compression.chain import CodecChain
from kfacpack.compression.compression_report import assemble_report, compare, dense_bytes, finish_report
from kfacpack.curvature.curvature import Curvature
from kfacpack.curvature.saving import file_size
from kfacpack.errors import KfacpackError
from kfacpack.format.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from kfacpack.compression.budget_search import OptionIndices
    from kfacpack.compression.candidates import Option
    from kfacpack.compression.compression_report import CompressionReport, FactorPair, Measure
    from kfacpack.curvature.blocks import CurvatureBlock
    from kfacpack.curvature.matrices.matrix import Matrix
    from kfacpack.format.units import OnProgress

    Vector = Callable[[str], Tensor]

    """A task vector: a parameter's change, by name."""


_WIDEST_FLOATS = 1.0, 1.0 - 1.23456e-7
"""`quadratic` before and after, for which the relative error takes as many letters as any."""


def choose_codecs(
    curvature: Curvature,
    budget: str | int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    with_vector: bool = False,
) -> tuple[str, Callable[[Matrix], CodecChain]]:
    """The codec of each matrix, so that the file has at most `budget` bytes ("70MB", or "10%" of dense float32).

    And a name for that: the codec, if it is the same for all.
    """
    matrices = {id(matrix): matrix for block in curvature.blocks for _, matrix in block.structure.matrices()}
    limit = parse_size(budget, sum(map(dense_bytes, matrices.values())))
    menu = Candidates.of(curvature, progress)
    search = BudgetSearch(menu)
    files = _Files(curvature, menu, search.single(), with_vector)
    picks = _parse_budget(files, search, limit, budget)
    chosen = {key: option.asked for option in files.options(picks) for key in option.made}
    return files.name(picks), lambda matrix: chosen[id(matrix)]


def _parse_budget(files: _Files, search: BudgetSearch, limit: int, said: str | int) -> OptionIndices:
    """The best picks whose file, with its header, is small enough."""
    single = [picks for picks in files.single if files.size(picks) <= limit]
    header = 0
    while (picks := search.best(limit - header, single)) is not None:
        excess = files.size(picks) - limit
        if excess <= 0:
            return picks
        header += excess
    # Where the header outweighs the matrices, a codec with more tensors may make the file larger.
    sizes = {picks: files.size(picks) for picks in (*single, search.smallest(), search.untouched())}
    if (least := min(sizes.values())) > limit:
        raise KfacpackError(f"budget {said!r}: that is {limit:,} bytes; the smallest file that was found has {least:,}")
    return min((picks for picks in sizes if sizes[picks] <= limit), key=lambda picks: search.total(picks).random)


@dataclass(frozen=True)
class _Files:
    """The files that picks would give."""

    curvature: Curvature
    menu: Candidates
    single: Mapping[OptionIndices, CodecChain]
    with_vector: bool

    def name(self, picks: OptionIndices) -> str:
        return str(self.single[picks]) if picks in self.single else "budget"

    def options(self, picks: OptionIndices) -> Iterator[Option]:
        return (family.options[pick] for family, pick in zip(self.menu.families, picks, strict=True))

    def size(self, picks: OptionIndices) -> int:
        """To the byte: sizes follow from shapes, and the losses that will be recorded are known.

        Those on a task vector are not; room is left for them.
        """
        made: dict[int, tuple[CodecChain, Matrix]] = {}
        sides: dict[tuple[int, ...], FactorPair] = {}
        counted: set[int] = set()
        for option in self.options(picks):
            made |= option.made
            sides |= option.sides
        measure = (lambda before, after: _WIDEST_FLOATS) if self.with_vector else None
        assembled_blocks = (assemble_report(block, made, sides, counted, measure) for block in self.curvature.blocks)
        blocks, reports = zip(*assembled_blocks, strict=True)
        return file_size(finish_report(self.curvature, blocks, reports, self.name(picks))[0])


@dataclass(frozen=True)
class CodecChoice:
    """Which codec each matrix gets, and what the losses of the whole call that."""

    name: str
    chain_for: Callable[[Matrix], CodecChain]


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
    progress: OnProgress = lambda done, total: None,
    *,
    with_vector: bool = False,
) -> CodecChoice:
    """For a budget, all codecs that come into question are tried on every matrix.

    `with_vector` leaves room for the errors on a task vector in the file.
    """
    if spec is not None and budget is None:
        chain = CodecChain.parse(spec)
        return CodecChoice(str(chain), lambda matrix: chain)
    if budget is not None and spec is None:
        return CodecChoice(*choose_codecs(curvature, budget, progress, with_vector=with_vector))
    raise KfacpackError("compress takes either a codec, such as block:8+int8, or a budget, such as 70MB or 10%")


def compress_by(
    curvature: Curvature,
    choice: CodecChoice,
    *,
    vector: Vector | None = None,
    progress: OnProgress = lambda done, total: None,
) -> tuple[Curvature, CompressionReport]:
    """Every matrix by the codec that is chosen for it, one block after the other.

    What is made stays in memory; of the given matrices only those of the block at hand are unpacked. With `vector`, the
    error of `quadratic` is measured on that task vector, too.
    """
    made: dict[int, tuple[CodecChain, Matrix]] = {}
    sides: dict[tuple[int, ...], FactorPair] = {}
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
        smaller, report = assemble_report(block, made, sides, counted, measure)
        blocks.append(smaller)
        reports.append(report)
    progress(len(curvature.blocks), len(curvature.blocks))
    return finish_report(curvature, blocks, reports, choice.name)


def _measuring(curvature: Curvature, vector: Vector) -> Measure:
    """`quadratic` of a block on a task vector, before and after."""
    shapes = {parameter.name: parameter.shape for parameter in curvature.about.base.parameters}

    def measure(before: CurvatureBlock, after: CurvatureBlock) -> tuple[float, float]:
        tau = {name: vector(name) for name in before.parameters}
        return float(before.quadratic(tau, shapes)), float(after.quadratic(tau, shapes))

    return measure
