"""Tasks whose images are drawn by code, with classes that `tiny` was not pretrained on.

`hebrew`: letters in ink on lined paper. `syllabics`: Canadian Aboriginal syllables, each next to fragments of other
syllables; many syllables are rotations of the same shape. `emblems`: partly hidden coloured symbols on an uneven
background. `weaves`: repeating patterns in two random colours; each pattern is scaled, rotated and bent at random.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from kfacpack._random import CounterRandom
from kfacpack.demo import canvas
from kfacpack.demo.canvas import MATPLOTLIB, Field, wave
from kfacpack.demo.embedded_task import (
    ByteArray,
    EmbeddedTask,
    Labels,
    draw_splits,
    finish_image,
    place_glyph,
    random_colours,
    random_glyphs,
)
from kfacpack.tasks.data_files import PackageData


def _drawn_task(
    name: str,
    classes: tuple[str, ...],
    sizes: dict[str, int],
    draw: Callable[[Labels, CounterRandom], ByteArray],
    *,
    templates: tuple[str, ...],
    source: str,
    sha256: str,
    package: PackageData | None = MATPLOTLIB,
) -> EmbeddedTask:
    """Returns a task whose images are drawn by `draw`; see `draw_splits` and `EmbeddedTask` for the arguments."""
    make = partial(draw_splits, name, sizes, len(classes), draw)
    return EmbeddedTask(name, classes, templates, sizes, source, "Apache-2.0", make, sha256, package)


HEBREW_LETTERS = {
    "alef": "א",
    "bet": "ב",
    "gimel": "ג",
    "dalet": "ד",
    "he": "ה",
    "vav": "ו",
    "zayin": "ז",
    "het": "ח",
    "tet": "ט",
    "yod": "י",
    "kaf": "כ",
    "lamed": "ל",
    "mem": "מ",
    "nun": "נ",
    "samekh": "ס",
    "ayin": "ע",
    "pe": "פ",
    "tsadi": "צ",
    "qof": "ק",
    "resh": "ר",
    "shin": "ש",
    "tav": "ת",
}
HEBREW_FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique")


def load_hebrew() -> EmbeddedTask:
    """Returns the task `hebrew`: Hebrew letters in ink on lined paper."""
    return _drawn_task(
        "hebrew",
        tuple(HEBREW_LETTERS),
        {"train": 2200, "validation": 220, "test": 660},
        _draw_hebrew,
        templates=("the hebrew letter {}", "a photo of the hebrew letter {}.", "hebrew letter {} on paper", "{}"),
        source="Hebrew letters drawn with DejaVu Sans, a font included in matplotlib",
        sha256="42b719ef05964f17b294743351066e5c78376cacc3f7604a14e0019fab2e831f",
    )


def _draw_hebrew(labels: Labels, rng: CounterRandom) -> ByteArray:
    count = len(labels)
    characters = [tuple(HEBREW_LETTERS.values())[label] for label in labels]
    ink = place_glyph(
        random_glyphs(characters, HEBREW_FONTS, rng), rng, extent=(0.8, 1.4), shift=0.25, turn=0.2, bend=0.3
    )
    _, y = canvas.grid_points(count)
    rule = canvas.wave(y * canvas.per_image(rng.uniform(count, 1.0, 1.8)) + canvas.per_image(rng.uniform(count)))
    lines = canvas.smooth_step(rule - np.float32(0.86), 0.25)
    paper = canvas.constant_field(rng.uniform((count, 3), 0.75, 1.0))
    page = canvas.blend(paper, canvas.constant_field(rng.uniform((count, 3), 0.35, 0.7)), lines)
    return finish_image(
        canvas.blend(page, canvas.constant_field(rng.uniform((count, 3), 0.0, 0.35)), ink), rng, blur=0.8, noise=0.1
    )


CONSONANTS = {
    "k": "ᑫᑭᑯᑲ",
    "ch": "ᒉᒋᒍᒐ",
    "n": "ᓀᓂᓄᓇ",
    "s": "ᓭᓯᓱᓴ",
    "y": "ᔦᔨᔪᔭ",
    "l": "ᓓᓕᓗᓚ",
    "sh": "ᔐᔑᔓᔕ",
    "r": "ᕂᕆᕈᕋ",
}
SYLLABLES = {
    f"{consonant}{vowel}": character
    for consonant, row in CONSONANTS.items()
    for vowel, character in zip("eioa", row, strict=True)
}
SYLLABICS_FONTS = ("DejaVuSans", "DejaVuSans-Bold")


def load_syllabics() -> EmbeddedTask:
    """Returns the task `syllabics`: Canadian Aboriginal syllables."""
    return _drawn_task(
        "syllabics",
        tuple(SYLLABLES),
        {"train": 3200, "validation": 320, "test": 800},
        _draw_syllable,
        templates=("the canadian syllable {}", "a photo of the syllable {}.", "a sign with the syllable {}", "{}"),
        source="Canadian Aboriginal syllables drawn with DejaVu Sans, a font included in matplotlib",
        sha256="25c5022be2e9c67655c377de70fb8e8bb7fb39f73c4708507f5f114847df3ef9",
    )


def _draw_syllable(labels: Labels, rng: CounterRandom) -> ByteArray:
    count, characters = len(labels), tuple(SYLLABLES.values())
    ground, ink = map(canvas.constant_field, random_colours(rng, count))
    image = canvas.blend(
        ground, ground + rng.uniform((count, 1, 1, 3), -0.2, 0.2), canvas.interpolate(rng.uniform((count, 3, 3)))
    )
    for x in (-0.95, 0.95, 0.0):
        drawn = labels if x == 0.0 else rng.integers(len(characters), count)
        glyphs = random_glyphs([characters[index] for index in drawn], SYLLABICS_FONTS, rng)
        coverage = place_glyph(glyphs, rng, extent=(0.9, 1.3), shift=0.15, turn=0.1, bend=0.25, x=x)
        image = canvas.blend(image, ink, coverage)
    return finish_image(image, rng, blur=1.0, noise=0.08)


EMBLEMS = {
    "heart": "♥",
    "spade": "♠",
    "club": "♣",
    "umbrella": "☂",
    "telephone": "☎",
    "scissors": "✂",
    "airplane": "✈",
    "envelope": "✉",
    "knight": "♞",
    "rook": "♜",
    "queen": "♛",
    "anchor": "⚓",
    "skull": "☠",
    "radiation sign": "☢",
    "yin yang": "☯",
    "flag": "⚑",
    "snowflake": "❄",
    "flower": "✿",
    "pencil": "✏",
    "moon": "☾",
}
EMBLEMS_FONTS = ("DejaVuSans",)


def load_emblems() -> EmbeddedTask:
    """Returns the task `emblems`: partly hidden coloured symbols."""
    return _drawn_task(
        "emblems",
        tuple(EMBLEMS),
        {"train": 1600, "validation": 200, "test": 600},
        _draw_emblem,
        templates=("a photo of a {}.", "a picture of a {}", "a {} on a wall", "an emblem that shows a {}", "{}"),
        source="symbols drawn with DejaVu Sans, a font included in matplotlib",
        sha256="6743746edb46a3154b9275d054185f815dbca73c1fc01a6fe8d1956a503b9499",
    )


def _draw_emblem(labels: Labels, rng: CounterRandom) -> ByteArray:
    count = len(labels)
    ground, ink = map(canvas.constant_field, random_colours(rng, count))
    other = np.clip(ground + rng.uniform((count, 1, 1, 3), -0.3, 0.3), 0, 1)
    image = canvas.blend(ground, other, canvas.interpolate(rng.uniform((count, 9, 9))))
    characters = [tuple(EMBLEMS.values())[label] for label in labels]
    coverage = place_glyph(
        random_glyphs(characters, EMBLEMS_FONTS, rng), rng, extent=(1.1, 1.7), shift=0.2, turn=0.25, bend=0.2
    )
    image = canvas.blend(image, ink, coverage)
    x, _ = canvas.rotate(*canvas.grid_points(count), rng.uniform(count, -1, 1))
    bar = canvas.smooth_step(
        np.float32(0.1) - np.abs(x - canvas.per_image(rng.uniform(count, -0.8, 0.8))), 2 / canvas.SIZE
    )
    return finish_image(
        canvas.blend(image, canvas.constant_field(rng.uniform((count, 3))), bar), rng, blur=0.8, noise=0.1
    )


HALF = np.float32(0.5)


def zigzag(x: Field, y: Field) -> Field:
    """Pattern of zigzag lines; see `WEAVES`."""
    return wave(y + wave(x)) - HALF


def bricks(x: Field, y: Field) -> Field:
    """Pattern of bricks in mortar, with every other course shifted by half a brick; see `WEAVES`."""
    shifted = x * HALF + np.floor(y) * HALF
    return np.float32(0.72) - np.maximum(wave(y), (wave(shifted) - HALF) * 2 * np.float32(0.86))


def scales(x: Field, y: Field) -> Field:
    """Pattern of rows of arcs, in which each row overlaps the row above; see `WEAVES`."""
    u = wave(x + np.floor(y) * HALF)
    v = y - np.floor(y)
    return np.float32(0.3) - np.abs(np.sqrt(u * u + v * v) - np.float32(0.8))


def basket(x: Field, y: Field) -> Field:
    """Pattern of squares that alternate between horizontal and vertical strands; see `WEAVES`."""
    vertical = (np.floor(x) + np.floor(y)) % 2 == 0
    return np.where(vertical, wave(x * 2), wave(y * 2)) - HALF


def honeycomb(x: Field, y: Field) -> Field:
    """Pattern of hexagonal cells; see `WEAVES`.

    The centres of the cells form two rectangular grids. A point belongs to the cell whose centre is nearest.
    """
    high = np.float32(1.7320508)
    first = (np.abs(x - np.floor(x) - HALF), np.abs(y / high - np.floor(y / high) - HALF) * high)
    second = (HALF - first[0], high * HALF - first[1])
    first_is_nearer = first[0] * first[0] + first[1] * first[1] < second[0] * second[0] + second[1] * second[1]
    u, v = np.where(first_is_nearer, first[0], second[0]), np.where(first_is_nearer, first[1], second[1])
    return np.float32(0.4) - np.maximum(u, u * HALF + v * high * HALF)


def crosses(x: Field, y: Field) -> Field:
    """Pattern of small crosses; see `WEAVES`."""
    u, v = 1 - wave(x), 1 - wave(y)
    return np.maximum(
        np.minimum(np.float32(0.22) - np.abs(u - HALF), np.float32(0.45) - np.abs(v - HALF)),
        np.minimum(np.float32(0.22) - np.abs(v - HALF), np.float32(0.45) - np.abs(u - HALF)),
    )


def steps(x: Field, y: Field) -> Field:
    """Pattern of stairs: horizontal stripes that are shifted at every integer x; see `WEAVES`."""
    return wave(y * HALF + np.floor(x) * np.float32(0.25)) - HALF


def triangles(x: Field, y: Field) -> Field:
    """Pattern of rows of triangles; see `WEAVES`."""
    part = y - np.floor(y)
    return part - wave(x + np.floor(y) * HALF)


def plaid(x: Field, y: Field) -> Field:
    """Pattern of broad horizontal and vertical bands with thin bands between them; see `WEAVES`."""
    bands = [np.maximum(wave(axis) - np.float32(0.6), np.float32(0.12) - wave(axis)) for axis in (x, y)]
    return np.maximum(*bands)


def waves(x: Field, y: Field) -> Field:
    """Pattern of wavy lines made of parabolic arcs; see `WEAVES`."""
    u = wave(x) * 2 - 1
    return wave(y + np.float32(0.7) * u * (2 - np.abs(u)) * HALF) - HALF


WEAVES: dict[str, Callable[[Field, Field], Field]] = {
    "zigzag": zigzag,
    "brickwork": bricks,
    "fish scales": scales,
    "basket weave": basket,
    "honeycomb": honeycomb,
    "little crosses": crosses,
    "stairs": steps,
    "triangles in rows": triangles,
    "plaid": plaid,
    "wavy lines": waves,
}
"""Patterns by class name.

A pattern is a function that maps coordinates x and y, measured in periods of the pattern, to the signed distance from
the border between the two colours. The distance is positive in areas of the second colour.
"""


def load_weaves() -> EmbeddedTask:
    """Returns the task `weaves`: repeating patterns in two colours."""
    return _drawn_task(
        "weaves",
        tuple(WEAVES),
        {"train": 640, "validation": 160, "test": 480},
        _draw_weave,
        templates=("a {} pattern", "a photo of {}.", "a texture of {}", "cloth with {}", "{}"),
        source="repeating patterns drawn by kfacpack",
        sha256="13e96b92580ea1a86b5cd67694b3e2dd6563d4d0ebcd0cc81dafcdc895ff06e7",
        package=None,
    )


def _draw_weave(labels: Labels, rng: CounterRandom) -> ByteArray:
    count = len(labels)
    frequency = rng.uniform(count, 1.4, 2.6)
    x, y = canvas.rotate(*canvas.grid_points(count), rng.uniform(count, -0.2, 0.2))
    x, y = canvas.bend(x, y, rng, rng.uniform(count, 0, 0.15))
    x = (x + 3) * canvas.per_image(frequency) + canvas.per_image(rng.uniform(count))
    y = (y + 3) * canvas.per_image(frequency) + canvas.per_image(rng.uniform(count))
    coverage = np.empty_like(x)
    for label, pattern in enumerate(WEAVES.values()):
        mask = labels == label
        coverage[mask] = pattern(x[mask], y[mask])
    coverage = canvas.smooth_step(coverage, canvas.per_image(frequency) * np.float32(4 / canvas.SIZE))
    first, second = map(canvas.constant_field, random_colours(rng, count))
    return finish_image(canvas.blend(first, second, coverage), rng, blur=0.8, noise=0.12)
