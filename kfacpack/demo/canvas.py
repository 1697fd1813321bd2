"""Functions for drawing images that are identical, byte for byte, on every machine.

The functions process N images at a time. A field is a float32 array of shape (N, size, size). Coordinates range from -1
to 1 across an image; x points right and y points down. A coverage is a field with values from 0 (background) to 1
(ink).

On floats, the functions use only +, -, *, /, sqrt, rounding and comparisons, element by element. Unlike sines, sums
over arrays and font rasterisers, these operations give the same bits on every machine. Glyph outlines come from
matplotlib's fonts: fontTools reads them as integers, and this module fills them. FreeType is not used, because its
results differ between versions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfacpack._compat import require
from kfacpack._random import CounterRandom
from kfacpack.errors import KfacpackError
from kfacpack.tasks.data_files import PackageData

SIZE = 28
"""Width and height of an image in pixels."""

Field = NDArray[np.float32]


def grid_points(count: int, size: int = SIZE) -> tuple[Field, Field]:
    """Returns the x and y coordinates of the pixel centres of `count` images."""
    axis = (np.arange(size, dtype=np.float32) + np.float32(0.5)) * np.float32(2 / size) - np.float32(1)
    shape = (count, size, size)
    return np.broadcast_to(axis[None, None, :], shape), np.broadcast_to(axis[None, :, None], shape)


def translate(x: Field, y: Field, centre: tuple[Field, Field], extent: Field) -> tuple[Field, Field]:
    """Converts image coordinates to coordinates in which an object extends from -1 to 1 along each axis.

    Args:
        x: Field of x coordinates.
        y: Field of y coordinates.
        centre: x and y coordinates of the object's centre, (N,) each.
        extent: Width of the object in image coordinates, (N,).
    """
    half = per_image(extent) * np.float32(0.5)
    return (x - per_image(centre[0])) / half, (y - per_image(centre[1])) / half


def rotate(x: Field, y: Field, half_tangent: Field) -> tuple[Field, Field]:
    """Rotates coordinates. `half_tangent`, (N,), is the tangent of half the rotation angle, so no sine is computed."""
    t = per_image(half_tangent)
    norm = np.float32(1) + t * t
    cosine, sine = (np.float32(1) - t * t) / norm, np.float32(2) * t / norm
    return cosine * x + sine * y, cosine * y - sine * x


def bend(x: Field, y: Field, rng: CounterRandom, strength: Field, knots: int = 4) -> tuple[Field, Field]:
    """Adds smooth random offsets to coordinates. `strength`, (N,), is the largest possible offset along each axis."""
    count = len(x)
    shift = rng.uniform((2, count, knots, knots), -1, 1)
    return (
        x + per_image(strength) * interpolate(shift[0], x.shape[-1]),
        y + per_image(strength) * interpolate(shift[1], x.shape[-1]),
    )


def interpolate(knots: Field, size: int = SIZE) -> Field:
    """Interpolates coarse grids of values, (N, K, K), at every pixel of the images."""
    count = len(knots)
    x, y = grid_points(count, size)
    return sample_field(knots, x, y)


def sample_field(images: Field, x: Field, y: Field) -> Field:
    """Samples images bilinearly at given coordinates.

    Args:
        images: Images, (N, S, S), which cover coordinates from -1 to 1. Outside this range, border pixels are repeated.
        x: Field of x coordinates.
        y: Field of y coordinates.
    """
    side = images.shape[-1]
    scale = np.float32(side / 2)
    column = np.clip((x + np.float32(1)) * scale - np.float32(0.5), 0, side - 1)
    row = np.clip((y + np.float32(1)) * scale - np.float32(0.5), 0, side - 1)
    left, top = np.floor(column), np.floor(row)
    right_share, bottom_share = column - left, row - top
    j, i = left.astype(np.int32), top.astype(np.int32)
    to_right, to_bottom = (j < side - 1).astype(np.int32), (i < side - 1).astype(np.int32) * side
    first = i * side + j + np.arange(len(images), dtype=np.int32)[:, None, None] * (side * side)
    values = images.reshape(-1)

    def along_row(index: NDArray[np.int32]) -> Field:
        before = values.take(index)
        return np.asarray(before + (values.take(index + to_right) - before) * right_share, dtype=np.float32)

    upper = along_row(first)
    return upper + (along_row(first + to_bottom) - upper) * bottom_share


def stamp_glyph(stamps: Field, x: Field, y: Field) -> Field:
    """Samples glyph images at given coordinates and returns the coverage.

    Args:
        stamps: Glyph images, (N, S, S), which cover coordinates from -1 to 1. Outside this range, the coverage is 0.
        x: Field of x coordinates.
        y: Field of y coordinates.
    """
    inside = (np.abs(x) < 1) & (np.abs(y) < 1)
    return np.asarray(np.where(inside, sample_field(stamps, x, y), np.float32(0)), dtype=np.float32)


def smooth_step(distance: Field, pixel: Field | float) -> Field:
    """Converts signed distances from an edge to a coverage.

    The coverage is 0 outside the edge (negative distances) and 1 inside (positive distances).

    Args:
        distance: Field of signed distances.
        pixel: Width of the transition from 0 to 1, in the unit of `distance`.
    """
    return np.clip(distance / pixel + np.float32(0.5), 0, 1)


def wave(position: Field) -> Field:
    """Returns a triangle wave between 0 and 1 with period 1."""
    part = position - np.floor(position)
    return np.abs(part * np.float32(2) - np.float32(1))


def blur(field: Field, amount: Field) -> Field:
    """Averages each pixel with its neighbours; `amount`, (N,), ranges from 0 (unchanged) to 1 (mean of 3×3 pixels)."""
    share = per_image(amount) * np.float32(1 / 3)
    for axis in (1, 2):
        before, after = _shifted(field, axis, 1), _shifted(field, axis, -1)
        field = field * (1 - 2 * share) + (before + after) * share
    return field


def dilate(coverage: Field, amount: Field) -> Field:
    """Changes the width of strokes; `amount`, (N,), ranges from -1 (thinner) to 1 (thicker)."""
    smooth = blur(blur(coverage, np.ones(len(coverage), np.float32)), np.ones(len(coverage), np.float32))
    return np.clip((smooth - np.float32(0.4) + np.float32(0.3) * per_image(amount)) * 3 + np.float32(0.4), 0, 1)


def blend(ground: Field, ink: Field, coverage: Field) -> Field:
    """Returns `ink` where the coverage is 1, `ground` where it is 0, and a weighted mean of both in between.

    Args:
        ground: Colours of the background, (N, 1 or size, 1 or size, 3).
        ink: Colours of the ink, (N, 1 or size, 1 or size, 3).
        coverage: The coverage, (N, size, size).
    """
    over = coverage[..., None]
    return np.asarray(ground * (1 - over) + ink * over, dtype=np.float32)


def constant_field(colours: Field) -> Field:
    """Reshapes colours, one per image, (N, 3), so that they broadcast over the pixels of the images."""
    return colours[:, None, None, :]


def pixels(image: Field) -> NDArray[np.uint8]:
    """Converts values between 0 and 1 to bytes, with rounding and clipping."""
    return np.floor(np.clip(image, 0, 1) * np.float32(255) + np.float32(0.5)).astype(np.uint8)


def per_image(values: Field) -> Field:
    """Reshapes values, one per image, (N,), so that they broadcast over the pixels of a field."""
    return values[:, None, None]


def _shifted(field: Field, axis: int, by: int) -> Field:
    """Shifts a field by a number of pixels along an axis. Pixels at the border are repeated."""
    index = np.clip(np.arange(field.shape[axis]) - by, 0, field.shape[axis] - 1)
    return np.take(field, index, axis=axis)


MATPLOTLIB = PackageData("matplotlib", "matplotlib", tested="3.10.0")
GLYPH_SIZE = 40
"""Width and height of a glyph image in pixels."""
MARGIN = 2
"""Width in pixels of the empty border around a glyph."""
SAMPLES = 4
"""Number of samples per pixel of a glyph image along each axis."""
CURVE_SEGMENTS = 6
"""Number of line segments that approximate a curve."""
OutlinePoint = tuple[float, float]


@cache
def render_glyph(character: str, font: str) -> NDArray[np.float32]:
    """Draws a character, centred and scaled to fit the image, and returns its coverage, (GLYPH_SIZE, GLYPH_SIZE).

    Args:
        character: Character to draw.
        font: File name, without suffix, of a font that is included in matplotlib, such as "DejaVuSans" or "cmr10".

    Raises:
        KfacpackError: If the font does not contain the character, or the character is blank.
    """
    edges = _outline(character, font)
    low, high = edges.min(axis=(0, 1)), edges.max(axis=(0, 1))
    extent = max(high - low)
    available = (GLYPH_SIZE - 2 * MARGIN) * SAMPLES
    scaled = (edges - (low + high) / 2) * (available / extent) + GLYPH_SIZE * SAMPLES / 2
    scaled[..., 1] = GLYPH_SIZE * SAMPLES - scaled[..., 1]
    return _fill(scaled)


def render_glyphs(pairs: Iterable[tuple[str, str]]) -> NDArray[np.float32]:
    """Draws the characters of N (character, font) pairs and returns their coverage, (N, GLYPH_SIZE, GLYPH_SIZE)."""
    return np.stack([render_glyph(character, font) for character, font in pairs])


def has_glyph(character: str, font: str) -> bool:
    """Returns whether a font contains a character."""
    return ord(character) in _font(font)[0]


def _fill(edges: NDArray[np.float64]) -> NDArray[np.float32]:
    """Fills the area enclosed by edges, (E, 2 ends, 2), with the non-zero winding rule, and returns its coverage."""
    size = GLYPH_SIZE * SAMPLES
    winding = np.zeros((size, size + 1), dtype=np.int64)
    middle = np.arange(size) + 0.5
    (x0, y0), (x1, y1) = edges[:, 0].T, edges[:, 1].T
    rows, crossing = np.nonzero((y0 <= middle[:, None]) != (y1 <= middle[:, None]))
    slope = (x1[crossing] - x0[crossing]) / (y1[crossing] - y0[crossing])
    x = x0[crossing] + (middle[rows] - y0[crossing]) * slope
    first = np.clip(np.ceil(x - 0.5), 0, size).astype(np.int64)
    np.add.at(winding, (rows, first), np.where(y1[crossing] > y0[crossing], 1, -1))
    inside = (np.cumsum(winding[:, :size], axis=1) != 0).astype(np.int64)
    counts = inside.reshape(GLYPH_SIZE, SAMPLES, GLYPH_SIZE, SAMPLES).sum(axis=(1, 3))
    return counts.astype(np.float32) / np.float32(SAMPLES * SAMPLES)


def _outline(character: str, font: str) -> NDArray[np.float64]:
    """Returns the edges of all contours of a character, (E, 2 ends, 2), with the y axis pointing up."""
    if not has_glyph(character, font):
        raise KfacpackError(f"font {font} has no glyph for {character!r}; try another version of matplotlib")
    names, glyphs = _font(font)
    from fontTools.pens.basePen import BasePen

    class Edges(BasePen):
        """A fontTools pen that collects line segments. Each curve is approximated by several line segments."""

        def __init__(self, glyphs: Any):
            super().__init__(glyphs)
            self.edges: list[tuple[OutlinePoint, OutlinePoint]] = []
            self.start: OutlinePoint = (0.0, 0.0)

        def _moveTo(self, point: OutlinePoint) -> None:  # noqa: N802 - the names are those of fontTools
            self.start = point

        def _lineTo(self, point: OutlinePoint) -> None:  # noqa: N802
            self.edges.append((self._getCurrentPoint(), point))

        def _qCurveToOne(self, handle: OutlinePoint, end: OutlinePoint) -> None:  # noqa: N802
            begin = before = self._getCurrentPoint()
            for step in range(1, CURVE_SEGMENTS + 1):
                t = step / CURVE_SEGMENTS
                a, b, c = (1 - t) * (1 - t), 2 * t * (1 - t), t * t
                point = (
                    a * begin[0] + b * handle[0] + c * end[0],
                    a * begin[1] + b * handle[1] + c * end[1],
                )
                self.edges.append((before, point))
                before = point

        def _closePath(self) -> None:  # noqa: N802
            self.edges.append((self._getCurrentPoint(), self.start))

    pen = Edges(glyphs)
    glyphs[names[ord(character)]].draw(pen)
    if not pen.edges:
        raise KfacpackError(f"character {character!r} is blank in font {font}")
    return np.array(pen.edges, dtype=np.float64)


@cache
def _font(name: str) -> tuple[dict[int, str], Any]:
    """Returns a font as two mappings: glyph names by code point, and glyphs by glyph name."""
    require("fonttools", "matplotlib", extra="demo", feature="this task")
    from fontTools.ttLib import TTFont

    def parse(data: bytes) -> tuple[dict[int, str], Any]:
        font = TTFont(BytesIO(data), lazy=True)
        return font.getBestCmap(), font.getGlyphSet()

    # Whenever Computer Modern is loaded, fontTools warns about its invalid date, 1904.
    logger = logging.getLogger("fontTools")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return MATPLOTLIB.read(f"mpl-data/fonts/ttf/{name}.ttf", parse)
    finally:
        logger.setLevel(level)
