"""`syllabics`: Canadian syllables, which differ by how a shape is turned, between parts of others."""

from __future__ import annotations

from kfacpack.drawing import canvas
from kfacpack.drawing.dice import Dice
from kfacpack.drawing.glyphs import MATPLOTLIB
from kfacpack.tasks.embedded.base import Embedded
from kfacpack.tasks.embedded.drawn import Labels, drawn, finished, lettered, put, two_colours
from kfacpack.tasks.embedded.pictures import Bytes, Pictures

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
FONTS = ("DejaVuSans", "DejaVuSans-Bold")
SIZES = {"train": 3200, "validation": 320, "test": 800}


def load() -> Embedded:
    return Embedded(
        name="syllabics",
        classes=tuple(SYLLABLES),
        templates=("the canadian syllable {}", "a photo of the syllable {}.", "a sign with the syllable {}", "{}"),
        sizes=SIZES,
        source="Canadian Aboriginal syllables of DejaVu Sans (matplotlib), drawn",
        license="Apache-2.0",
        make=make,
        sha256="25c5022be2e9c67655c377de70fb8e8bb7fb39f73c4708507f5f114847df3ef9",
        package=MATPLOTLIB,
    )


def make() -> Pictures:
    return drawn("syllabics", SIZES, len(SYLLABLES), _draw)


def _draw(labels: Labels, dice: Dice) -> Bytes:
    count, characters = len(labels), tuple(SYLLABLES.values())
    ground, ink = map(canvas.flat, two_colours(dice, count))
    picture = canvas.mixed(
        ground, ground + dice.uniform((count, 1, 1, 3), -0.2, 0.2), canvas.spread(dice.uniform((count, 3, 3)))
    )
    for x in (-0.95, 0.95, 0.0):
        shown = labels if x == 0.0 else dice.below(len(characters), count)
        glyphs = lettered([characters[index] for index in shown], FONTS, dice)
        coverage = put(glyphs, dice, extent=(0.9, 1.3), shift=0.15, turn=0.1, bend=0.25, x=x)
        picture = canvas.mixed(picture, ink, coverage)
    return finished(picture, dice, blur=1.0, noise=0.08)
