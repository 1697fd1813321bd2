"""`emblems`: signs that pre-training has not seen, in colour, on a restless ground, partly hidden."""

from __future__ import annotations

import numpy as np

from kfacpack.drawing import canvas
from kfacpack.drawing.dice import Dice
from kfacpack.drawing.glyphs import MATPLOTLIB
from kfacpack.tasks.embedded.base import Embedded
from kfacpack.tasks.embedded.drawn import Labels, drawn, finished, lettered, put, two_colours
from kfacpack.tasks.embedded.pictures import Bytes, Pictures

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
FONTS = ("DejaVuSans",)
SIZES = {"train": 1600, "validation": 200, "test": 600}


def load() -> Embedded:
    return Embedded(
        name="emblems",
        classes=tuple(EMBLEMS),
        templates=("a photo of a {}.", "a picture of a {}", "a {} on a wall", "an emblem that shows a {}", "{}"),
        sizes=SIZES,
        source="symbols of DejaVu Sans (matplotlib), drawn",
        license="Apache-2.0",
        make=make,
        sha256="6743746edb46a3154b9275d054185f815dbca73c1fc01a6fe8d1956a503b9499",
        package=MATPLOTLIB,
    )


def make() -> Pictures:
    return drawn("emblems", SIZES, len(EMBLEMS), _draw)


def _draw(labels: Labels, dice: Dice) -> Bytes:
    count = len(labels)
    ground, ink = map(canvas.flat, two_colours(dice, count))
    other = np.clip(ground + dice.uniform((count, 1, 1, 3), -0.3, 0.3), 0, 1)
    picture = canvas.mixed(ground, other, canvas.spread(dice.uniform((count, 9, 9))))
    characters = [tuple(EMBLEMS.values())[label] for label in labels]
    coverage = put(lettered(characters, FONTS, dice), dice, extent=(1.1, 1.7), shift=0.2, turn=0.25, bend=0.2)
    picture = canvas.mixed(picture, ink, coverage)
    x, _ = canvas.turned(*canvas.points(count), dice.uniform(count, -1, 1))
    bar = canvas.soft(np.float32(0.1) - np.abs(x - canvas.each(dice.uniform(count, -0.8, 0.8))), 2 / canvas.SIZE)
    return finished(canvas.mixed(picture, canvas.flat(dice.uniform((count, 3))), bar), dice, blur=0.8, noise=0.1)
