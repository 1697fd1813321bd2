"""Fields: where a picture's points lie, what covers them, and how layers become pixels.

Characters as stamps: outlines from matplotlib's fonts, filled here.

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

from kfacpack._random import CounterRandom
from kfacpack.errors import KfacpackError
from kfacpack.tasks.data_files import PackageData

SIZE = 28
"""Pixels of a picture's side."""

Field = NDArray[np.float32]


def grid_points(count: int, size: int = SIZE) -> tuple[Field, Field]:
    """The x and y of every pixel of N pictures."""
    axis = (np.arange(size, dtype=np.float32) + np.float32(0.5)) * np.float32(2 / size) - np.float32(1)
    shape = (count, size, size)
    return np.broadcast_to(axis[None, None, :], shape), np.broadcast_to(axis[None, :, None], shape)


def translate(x: Field, y: Field, centre: tuple[Field, Field], extent: Field) -> tuple[Field, Field]:
    """Coordinates in which an object, `extent` (N,) wide on the picture, reaches from -1 to 1 around its centre."""
    half = per_image(extent) * np.float32(0.5)
    return (x - per_image(centre[0])) / half, (y - per_image(centre[1])) / half


def rotate(x: Field, y: Field, half_tangent: Field) -> tuple[Field, Field]:
    """Turned by the angle whose half has this tangent (N,): no sine is needed for it."""
    t = per_image(half_tangent)
    norm = np.float32(1) + t * t
    cosine, sine = (np.float32(1) - t * t) / norm, np.float32(2) * t / norm
    return cosine * x + sine * y, cosine * y - sine * x


def bend(x: Field, y: Field, dice: CounterRandom, strength: Field, knots: int = 4) -> tuple[Field, Field]:
    """Pulled to and fro, smoothly, by up to `strength` (N,)."""
    count = len(x)
    shift = dice.uniform((2, count, knots, knots), -1, 1)
    return (
        x + per_image(strength) * spread(shift[0], x.shape[-1]),
        y + per_image(strength) * spread(shift[1], x.shape[-1]),
    )


def spread(knots: Field, size: int = SIZE) -> Field:
    """(N, K, K) values, interpolated over the picture."""
    count = len(knots)
    x, y = grid_points(count, size)
    return sample_field(knots, x, y)


def sample_field(pictures: Field, x: Field, y: Field) -> Field:
    """Pictures (N, S, S), reaching from -1 to 1, looked up between their pixels; outside, their border goes on."""
    side = pictures.shape[-1]
    scale = np.float32(side / 2)
    column = np.clip((x + np.float32(1)) * scale - np.float32(0.5), 0, side - 1)
    row = np.clip((y + np.float32(1)) * scale - np.float32(0.5), 0, side - 1)
    left, top = np.floor(column), np.floor(row)
    right_share, bottom_share = column - left, row - top
    j, i = left.astype(np.int32), top.astype(np.int32)
    along, down = (j < side - 1).astype(np.int32), (i < side - 1).astype(np.int32) * side
    first = i * side + j + np.arange(len(pictures), dtype=np.int32)[:, None, None] * (side * side)
    numbers = pictures.reshape(-1)

    def mean(place: NDArray[np.int32]) -> Field:
        before = numbers.take(place)
        return np.asarray(before + (numbers.take(place + along) - before) * right_share, dtype=np.float32)

    upper = mean(first)
    return upper + (mean(first + down) - upper) * bottom_share


def stamp_glyph(stamps: Field, x: Field, y: Field) -> Field:
    """The coverage of stamps that reach from -1 to 1."""
    inside = (np.abs(x) < 1) & (np.abs(y) < 1)
    return np.asarray(np.where(inside, sample_field(stamps, x, y), np.float32(0)), dtype=np.float32)


def smooth_step(distance: Field, pixel: Field | float) -> Field:
    """Coverage from a distance to the edge, positive inside; the edge is one `pixel` wide."""
    return np.clip(distance / pixel + np.float32(0.5), 0, 1)


def wave(position: Field) -> Field:
    """Up and down between 0 and 1, with period 1, in straight lines."""
    part = position - np.floor(position)
    return np.abs(part * np.float32(2) - np.float32(1))


def blur(field: Field, amount: Field) -> Field:
    """Mixed with its neighbours; `amount` (N,) from 0 (as it was) to 1."""
    share = per_image(amount) * np.float32(1 / 3)
    for axis in (1, 2):
        before, after = _shifted(field, axis, 1), _shifted(field, axis, -1)
        field = field * (1 - 2 * share) + (before + after) * share
    return field


def dilate(coverage: Field, amount: Field) -> Field:
    """Strokes grown (amount (N,) towards 1) or thinned (towards -1)."""
    smooth = blur(blur(coverage, np.ones(len(coverage), np.float32)), np.ones(len(coverage), np.float32))
    return np.clip((smooth - np.float32(0.4) + np.float32(0.3) * per_image(amount)) * 3 + np.float32(0.4), 0, 1)


def blend(ground: Field, ink: Field, coverage: Field) -> Field:
    """Colours (N, 1 or size, 1 or size, 3), one over the other."""
    over = coverage[..., None]
    return np.asarray(ground * (1 - over) + ink * over, dtype=np.float32)


def constant_field(colours: Field) -> Field:
    """(N, 3) -> a colour for the whole of each picture."""
    return colours[:, None, None, :]


def pixels(picture: Field) -> NDArray[np.uint8]:
    """Values from 0 to 1 as bytes."""
    return np.floor(np.clip(picture, 0, 1) * np.float32(255) + np.float32(0.5)).astype(np.uint8)


def per_image(values: Field) -> Field:
    """(N,), one for each picture, to go with fields."""
    return values[:, None, None]


def _shifted(field: Field, axis: int, by: int) -> Field:
    """Moved by one, the border repeated."""
    index = np.clip(np.arange(field.shape[axis]) - by, 0, field.shape[axis] - 1)
    return np.take(field, index, axis=axis)


MATPLOTLIB = PackageData("matplotlib", "matplotlib", tested="3.10.0")
SIDE = 40
"""Pixels of a stamp."""
MARGIN = 2
FINE = 4
"""Samples in a pixel, each way."""
CURVE = 6
"""Lines that stand for a curve."""
OutlinePoint = tuple[float, float]


@cache
def render_glyph(character: str, font: str) -> NDArray[np.float32]:
    """The coverage of a character, (SIDE, SIDE): as large as fits into it, and centred. `font`: DejaVuSans, cmr10, …"""
    edges = _outline(character, font)
    low, high = edges.min(axis=(0, 1)), edges.max(axis=(0, 1))
    extent = max(high - low)
    room = (SIDE - 2 * MARGIN) * FINE
    scaled = (edges - (low + high) / 2) * (room / extent) + SIDE * FINE / 2
    scaled[..., 1] = SIDE * FINE - scaled[..., 1]
    return _filled(scaled)


def render_glyphs(pairs: Iterable[tuple[str, str]]) -> NDArray[np.float32]:
    """(character, font) of each picture -> (N, SIDE, SIDE)."""
    return np.stack([render_glyph(character, font) for character, font in pairs])


def has_glyph(character: str, font: str) -> bool:
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
            self.edges: list[tuple[OutlinePoint, OutlinePoint]] = []
            self.start: OutlinePoint = (0.0, 0.0)

        def _moveTo(self, point: OutlinePoint) -> None:  # noqa: N802 - fontTools calls them by these names
            self.start = point

        def _lineTo(self, point: OutlinePoint) -> None:  # noqa: N802
            self.edges.append((self._getCurrentPoint(), point))

        def _qCurveToOne(self, handle: OutlinePoint, end: OutlinePoint) -> None:  # noqa: N802
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

    if not has_glyph(character, font):
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
