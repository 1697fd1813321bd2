"""`digits`: the 8×8 digits of scikit-learn, enlarged; the smallest pictures of digits there are."""

from __future__ import annotations

from gzip import decompress

import numpy as np
from numpy.typing import NDArray

from kfacpack.packages import Package
from kfacpack.tasks.embedded.base import Embedded
from kfacpack.tasks.embedded.pictures import Pictures, divided, labelled
from kfacpack.tasks.embedded.pixels import enlarged

CLASSES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEMPLATES = (
    "a photo of the digit {}.",
    "a photo of the number {}.",
    "the digit {}",
    "the number {}",
    "a handwritten digit {}.",
    "a handwritten {}.",
    "{}",
)
SCIKIT_LEARN = Package("scikit-learn", "sklearn", tested="1.7.2")
SIZES = {"train": 1000, "validation": 200, "test": 597}
INK = 16
"""The largest value in the file."""


def load() -> Embedded:
    return Embedded(
        name="digits",
        classes=CLASSES,
        templates=TEMPLATES,
        sizes=SIZES,
        source="UCI's handwritten digits (Optdigits, test set), with scikit-learn",
        license="CC BY 4.0",
        make=make,
        sha256="31ff53494c104ac2708f569a9e5d1548858195eb1a1bd31816d5346f05280372",
        package=SCIKIT_LEARN,
    )


def make() -> Pictures:
    rows = SCIKIT_LEARN.read("datasets/data/digits.csv.gz", lambda data: table(decompress(data), 65))
    glyphs = np.pad(rows[:, :64].reshape(-1, 8, 8).astype(np.int64), ((0, 0), (1, 1), (1, 1)))
    return divided(labelled(enlarged(glyphs, 28, INK), rows[:, 64]), SIZES, "digits")


def table(text: bytes, columns: int) -> NDArray[np.uint8]:
    """(rows, columns) of whole numbers below 256, separated by commas. Far faster than a reader of CSV."""
    return np.fromstring(text.replace(b"\n", b",").decode("ascii"), dtype=np.uint8, sep=",").reshape(-1, columns)
