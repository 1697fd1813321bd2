"""`weaves`: patterns that pre-training has not seen, in any two colours, coarse or fine, turned and bent."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kfacpack.drawing import canvas
from kfacpack.drawing.canvas import Field, wave
from kfacpack.drawing.dice import Dice
from kfacpack.tasks.embedded.base import Embedded
from kfacpack.tasks.embedded.drawn import Labels, drawn, finished, two_colours
from kfacpack.tasks.embedded.pictures import Bytes, Pictures

SIZES = {"train": 640, "validation": 160, "test": 480}
HALF = np.float32(0.5)


def zigzag(x: Field, y: Field) -> Field:
    return wave(y + wave(x)) - HALF


def bricks(x: Field, y: Field) -> Field:
    """Mortar around stones, every other course shifted by half a stone."""
    shifted = x * HALF + np.floor(y) * HALF
    return np.float32(0.72) - np.maximum(wave(y), (wave(shifted) - HALF) * 2 * np.float32(0.86))


def scales(x: Field, y: Field) -> Field:
    """Arcs, each course over the one above it."""
    u = wave(x + np.floor(y) * HALF)
    v = y - np.floor(y)
    return np.float32(0.3) - np.abs(np.sqrt(u * u + v * v) - np.float32(0.8))


def basket(x: Field, y: Field) -> Field:
    """Squares of strands, lying and standing by turns."""
    standing = (np.floor(x) + np.floor(y)) % 2 == 0
    return np.where(standing, wave(x * 2), wave(y * 2)) - HALF


def honeycomb(x: Field, y: Field) -> Field:
    """Two grids of cells, each point in that whose centre is nearer, and how far it is from the walls there."""
    high = np.float32(1.7320508)
    first = (np.abs(x - np.floor(x) - HALF), np.abs(y / high - np.floor(y / high) - HALF) * high)
    second = (HALF - first[0], high * HALF - first[1])
    nearer = first[0] * first[0] + first[1] * first[1] < second[0] * second[0] + second[1] * second[1]
    u, v = np.where(nearer, first[0], second[0]), np.where(nearer, first[1], second[1])
    return np.float32(0.4) - np.maximum(u, u * HALF + v * high * HALF)


def crosses(x: Field, y: Field) -> Field:
    u, v = 1 - wave(x), 1 - wave(y)
    return np.maximum(
        np.minimum(np.float32(0.22) - np.abs(u - HALF), np.float32(0.45) - np.abs(v - HALF)),
        np.minimum(np.float32(0.22) - np.abs(v - HALF), np.float32(0.45) - np.abs(u - HALF)),
    )


def steps(x: Field, y: Field) -> Field:
    """Stairs: stripes that go down by one where they meet a whole number."""
    return wave(y * HALF + np.floor(x) * np.float32(0.25)) - HALF


def triangles(x: Field, y: Field) -> Field:
    part = y - np.floor(y)
    return part - wave(x + np.floor(y) * HALF)


def plaid(x: Field, y: Field) -> Field:
    """Broad bands with a thin one between them, both ways."""
    along, down = (np.maximum(wave(one) - np.float32(0.6), np.float32(0.12) - wave(one)) for one in (x, y))
    return np.maximum(along, down)


def waves(x: Field, y: Field) -> Field:
    """Round ones, of parabolas."""
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
"""Class -> x, y in repetitions -> how far inside, positive where the second colour is."""


def load() -> Embedded:
    return Embedded(
        name="weaves",
        classes=tuple(WEAVES),
        templates=("a {} pattern", "a photo of {}.", "a texture of {}", "cloth with {}", "{}"),
        sizes=SIZES,
        source="repeating patterns, drawn",
        license="Apache-2.0",
        make=make,
        sha256="13e96b92580ea1a86b5cd67694b3e2dd6563d4d0ebcd0cc81dafcdc895ff06e7",
    )


def make() -> Pictures:
    return drawn("weaves", SIZES, len(WEAVES), _draw)


def _draw(labels: Labels, dice: Dice) -> Bytes:
    count = len(labels)
    often = dice.uniform(count, 1.4, 2.6)
    x, y = canvas.turned(*canvas.points(count), dice.uniform(count, -0.2, 0.2))
    x, y = canvas.bent(x, y, dice, dice.uniform(count, 0, 0.15))
    x = (x + 3) * canvas.each(often) + canvas.each(dice.uniform(count))
    y = (y + 3) * canvas.each(often) + canvas.each(dice.uniform(count))
    coverage = np.empty_like(x)
    for label, inside in enumerate(WEAVES.values()):
        chosen = labels == label
        coverage[chosen] = inside(x[chosen], y[chosen])
    coverage = canvas.soft(coverage, canvas.each(often) * np.float32(4 / canvas.SIZE))
    first, second = map(canvas.flat, two_colours(dice, count))
    return finished(canvas.mixed(first, second, coverage), dice, blur=0.8, noise=0.12)
