"""The codec for each matrix with which a curvature loses least, at a given size of the file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfacpack.compression.menu import Menu
from kfacpack.compression.report import assembled, concluded, dense_bytes
from kfacpack.compression.search import Search
from kfacpack.compression.size import parse_size
from kfacpack.curvature.saving import file_size
from kfacpack.errors import KfacpackError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kfacpack.compression.chain import Chain
    from kfacpack.compression.measure import Side
    from kfacpack.compression.menu import Option
    from kfacpack.compression.search import Picks
    from kfacpack.curvature.curvature import Curvature
    from kfacpack.curvature.matrices import Matrix


_WIDEST = 1.0, 1.0 - 1.23456e-7
"""`quadratic` before and after, for which the relative error takes as many letters as any."""


def choose(
    curvature: Curvature,
    budget: str | int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    with_vector: bool = False,
) -> tuple[str, Callable[[Matrix], Chain]]:
    """The codec of each matrix, so that the file has at most `budget` bytes ("70MB", or "10%" of dense float32).

    And a name for that: the codec, if it is the same for all.
    """
    matrices = {id(matrix): matrix for block in curvature.blocks for _, matrix in block.structure.matrices()}
    limit = parse_size(budget, sum(map(dense_bytes, matrices.values())))
    menu = Menu.of(curvature, progress)
    search = Search(menu)
    files = _Files(curvature, menu, search.single(), with_vector)
    picks = _within(files, search, limit, budget)
    chosen = {key: option.asked for option in files.options(picks) for key in option.made}
    return files.name(picks), lambda matrix: chosen[id(matrix)]


def _within(files: _Files, search: Search, limit: int, said: str | int) -> Picks:
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
    menu: Menu
    single: Mapping[Picks, Chain]
    with_vector: bool

    def name(self, picks: Picks) -> str:
        return str(self.single[picks]) if picks in self.single else "budget"

    def options(self, picks: Picks) -> Iterator[Option]:
        return (family.options[pick] for family, pick in zip(self.menu.families, picks, strict=True))

    def size(self, picks: Picks) -> int:
        """To the byte: sizes follow from shapes, and the losses that will be recorded are known.

        Those on a task vector are not; room is left for them.
        """
        made: dict[int, tuple[Chain, Matrix]] = {}
        sides: dict[tuple[int, ...], Side] = {}
        counted: set[int] = set()
        for option in self.options(picks):
            made |= option.made
            sides |= option.sides
        measure = (lambda before, after: _WIDEST) if self.with_vector else None
        assembled_blocks = (assembled(block, made, sides, counted, measure) for block in self.curvature.blocks)
        blocks, reports = zip(*assembled_blocks, strict=True)
        return file_size(concluded(self.curvature, blocks, reports, self.name(picks))[0])
