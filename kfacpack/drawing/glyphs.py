"""Characters as stamps: outlines from matplotlib's fonts, filled here.

FreeType would fill them too, with other bytes in each of its versions; fontTools reads the outlines as the whole
numbers they are stored as.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfacpack.errors import KfacpackError
from kfacpack.packages import Package

MATPLOTLIB = Package("matplotlib", "matplotlib", tested="3.10.0")
SIDE = 40
"""Pixels of a stamp."""
MARGIN = 2
FINE = 4
"""Samples in a pixel, each way."""
CURVE = 6
"""Lines that stand for a curve."""
Point = tuple[float, float]


@cache
def stamp(character: str, font: str) -> NDArray[np.float32]:
    """The coverage of a character, (SIDE, SIDE): as large as fits into it, and centred. `font`: DejaVuSans, cmr10, …"""
    edges = _outline(character, font)
    low, high = edges.min(axis=(0, 1)), edges.max(axis=(0, 1))
    extent = max(high - low)
    room = (SIDE - 2 * MARGIN) * FINE
    scaled = (edges - (low + high) / 2) * (room / extent) + SIDE * FINE / 2
    scaled[..., 1] = SIDE * FINE - scaled[..., 1]
    return _filled(scaled)


def stamps(pairs: Iterable[tuple[str, str]]) -> NDArray[np.float32]:
    """(character, font) of each picture -> (N, SIDE, SIDE)."""
    return np.stack([stamp(character, font) for character, font in pairs])


def has(character: str, font: str) -> bool:
    return ord(character) in _font(font)[0]


def _filled(edges: NDArray[np.float64]) -> NDArray[np.float32]:
    """Edges (E, 2 ends, 2) in samples -> coverage. Inside is what the outline goes round, by the non-zero rule."""
    size = SIDE * FINE
    turns = np.zeros((size, size + 1), dtype=np.int64)
    middle = np.arange(size) + 0.5
    (x0, y0), (x1, y1) = edges[:, 0].T, edges[:, 1].T
    rows, crossing = np.nonzero((y0 <= middle[:, None]) != (y1 <= middle[:, None]))
    slope = (x1[crossing] - x0[crossing]) / (y1[crossing] - y0[crossing])
    x = x0[crossing] + (middle[rows] - y0[crossing]) * slope
    first = np.clip(np.ceil(x - 0.5), 0, size).astype(np.int64)
    np.add.at(turns, (rows, first), np.where(y1[crossing] > y0[crossing], 1, -1))
    inside = (np.cumsum(turns[:, :size], axis=1) != 0).astype(np.int64)
    counts = inside.reshape(SIDE, FINE, SIDE, FINE).sum(axis=(1, 3))
    return counts.astype(np.float32) / np.float32(FINE * FINE)


def _outline(character: str, font: str) -> NDArray[np.float64]:
    """The edges of all contours, (E, 2 ends, 2), y upwards."""
    from fontTools.pens.basePen import BasePen

    class Edges(BasePen):
        """Lines as they are, curves as a few lines."""

        def __init__(self, glyphs: Any):
            super().__init__(glyphs)
            self.edges: list[tuple[Point, Point]] = []
            self.start: Point = (0.0, 0.0)

        def _moveTo(self, point: Point) -> None:  # noqa: N802 - fontTools calls them by these names
            self.start = point

        def _lineTo(self, point: Point) -> None:  # noqa: N802
            self.edges.append((self._getCurrentPoint(), point))

        def _qCurveToOne(self, handle: Point, end: Point) -> None:  # noqa: N802
            begin = before = self._getCurrentPoint()
            for step in range(1, CURVE + 1):
                t = step / CURVE
                a, b, c = (1 - t) * (1 - t), 2 * t * (1 - t), t * t
                point = (
                    a * begin[0] + b * handle[0] + c * end[0],
                    a * begin[1] + b * handle[1] + c * end[1],
                )
                self.edges.append((before, point))
                before = point

        def _closePath(self) -> None:  # noqa: N802
            self.edges.append((self._getCurrentPoint(), self.start))

    if not has(character, font):
        raise KfacpackError(
            f"the font {font} has no character {character!r}; another version of matplotlib may have it"
        )
    names, glyphs = _font(font)
    pen = Edges(glyphs)
    glyphs[names[ord(character)]].draw(pen)
    if not pen.edges:
        raise KfacpackError(f"the character {character!r} is blank in the font {font}")
    return np.array(pen.edges, dtype=np.float64)


@cache
def _font(name: str) -> tuple[dict[int, str], Any]:
    """Code point -> the name of its glyph; and the glyphs by name."""
    from fontTools.ttLib import TTFont

    def opened(data: bytes) -> tuple[dict[int, str], Any]:
        font = TTFont(BytesIO(data), lazy=True)
        return font.getBestCmap(), font.getGlyphSet()

    # Computer Modern says it is from 1904, and fontTools warns of that each time.
    logger = logging.getLogger("fontTools")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return MATPLOTLIB.read(f"mpl-data/fonts/ttf/{name}.ttf", opened)
    finally:
        logger.setLevel(level)
