"""`hebrew`: letters of an alphabet that pre-training has not seen, as ink on lined paper."""

from __future__ import annotations

import numpy as np

from kfacpack.drawing import canvas
from kfacpack.drawing.dice import Dice
from kfacpack.drawing.glyphs import MATPLOTLIB
from kfacpack.tasks.embedded.base import Embedded
from kfacpack.tasks.embedded.drawn import Labels, drawn, finished, lettered, put
from kfacpack.tasks.embedded.pictures import Bytes, Pictures

LETTERS = {
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
FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique")
SIZES = {"train": 2200, "validation": 220, "test": 660}


def load() -> Embedded:
    return Embedded(
        name="hebrew",
        classes=tuple(LETTERS),
        templates=("the hebrew letter {}", "a photo of the hebrew letter {}.", "hebrew letter {} on paper", "{}"),
        sizes=SIZES,
        source="Hebrew letters of DejaVu Sans (matplotlib), drawn",
        license="Apache-2.0",
        make=make,
        sha256="42b719ef05964f17b294743351066e5c78376cacc3f7604a14e0019fab2e831f",
        package=MATPLOTLIB,
    )


def make() -> Pictures:
    return drawn("hebrew", SIZES, len(LETTERS), _draw)


def _draw(labels: Labels, dice: Dice) -> Bytes:
    count = len(labels)
    characters = [tuple(LETTERS.values())[label] for label in labels]
    ink = put(lettered(characters, FONTS, dice), dice, extent=(0.8, 1.4), shift=0.25, turn=0.2, bend=0.3)
    _, y = canvas.points(count)
    rule = canvas.wave(y * canvas.each(dice.uniform(count, 1.0, 1.8)) + canvas.each(dice.uniform(count)))
    lines = canvas.soft(rule - np.float32(0.86), 0.25)
    paper = canvas.flat(dice.uniform((count, 3), 0.75, 1.0))
    page = canvas.mixed(paper, canvas.flat(dice.uniform((count, 3), 0.35, 0.7)), lines)
    return finished(
        canvas.mixed(page, canvas.flat(dice.uniform((count, 3), 0.0, 0.35)), ink), dice, blur=0.8, noise=0.1
    )
