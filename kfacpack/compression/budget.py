"""The codec for each matrix with which a curvature loses least, at a given size of the file."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kfacpack.compression.menu import Menu
from kfacpack.compression.report import assembled, dense_bytes
from kfacpack.compression.search import Search
from kfacpack.compression.size import parse_size
from kfacpack.curvature.curvature import Curvature
from kfacpack.curvature.saving import file_size
from kfacpack.errors import KfacpackError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfacpack.compression.chain import Chain
    from kfacpack.compression.measure import Side
    from kfacpack.compression.menu import Option
    from kfacpack.compression.search import Picks
    from kfacpack.curvature.matrices import Matrix


def choose(
    curvature: Curvature, budget: str | int, progress: Callable[[int, int], None] = lambda done, total: None
) -> Callable[[Matrix], Chain]:
    """The codec of each matrix, so that the file has at most `budget` bytes ("70MB", or "10%" of dense float32)."""
    matrices = {id(matrix): matrix for block in curvature.blocks for _, matrix in block.structure.matrices()}
    limit = parse_size(budget, sum(map(dense_bytes, matrices.values())))
    menu = Menu.of(curvature, progress)
    picks = _within(curvature, menu, limit, budget)
    chosen = {key: option.asked for option in _options(menu, picks) for key in option.made}
    return lambda matrix: chosen[id(matrix)]


def _within(curvature: Curvature, menu: Menu, limit: int, said: str | int) -> Picks:
    """The best picks whose file, with its header, is small enough."""
    search = Search(menu)
    single = [picks for picks in search.single() if _file_size(curvature, menu, picks) <= limit]
    header = 0
    while (picks := search.best(limit - header, single)) is not None:
        excess = _file_size(curvature, menu, picks) - limit
        if excess <= 0:
            return picks
        header += excess
    # Where the header outweighs the matrices, a codec with more tensors may make the file larger.
    sizes = {picks: _file_size(curvature, menu, picks) for picks in (*single, search.smallest(), search.untouched())}
    if (least := min(sizes.values())) > limit:
        raise KfacpackError(f"budget {said!r}: that is {limit:,} bytes; the smallest file that was found has {least:,}")
    return min((picks for picks in sizes if sizes[picks] <= limit), key=lambda picks: search.total(picks).random)


def _options(menu: Menu, picks: Picks) -> Iterator[Option]:
    return (family.options[pick] for family, pick in zip(menu.families, picks, strict=True))


def _file_size(curvature: Curvature, menu: Menu, picks: Picks) -> int:
    """To the byte: sizes follow from shapes, and the losses that will be recorded are known."""
    made: dict[int, tuple[Chain, Matrix]] = {}
    sides: dict[tuple[int, ...], Side] = {}
    counted: set[int] = set()
    for option in _options(menu, picks):
        made |= option.made
        sides |= option.sides
    blocks = [assembled(block, made, sides, counted)[0] for block in curvature.blocks]
    return file_size(Curvature(blocks, curvature.about))
