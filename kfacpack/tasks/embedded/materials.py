"""`materials`: surfaces, cut from the photographs that come with scikit-image.

Each picture is one class, and the splits come from regions of it that have no pixel in common. All are grey: colour
would give most of them away. They are turned by quarters, because a surface has no up.
"""

from __future__ import annotations

from io import BytesIO
from typing import NamedTuple

import numpy as np
from PIL import Image

from kfacpack.drawing.dice import Dice
from kfacpack.tasks.embedded.base import Embedded
from kfacpack.tasks.embedded.faces import SCIKIT_IMAGE
from kfacpack.tasks.embedded.pictures import Bytes, Labelled, Pictures, labelled
from kfacpack.tasks.embedded.pixels import Whole, grey, halved

SIZE = 28
SIZES = {"train": 1260, "validation": 180, "test": 540}

Box = tuple[int, int, int, int]
"""left, top, right, bottom, in pixels of the picture; the last two are outside."""


class Surface(NamedTuple):
    file: str
    half: bool
    """Cut at twice the size and halved, where what makes the material is larger than 28 pixels."""
    regions: dict[str, list[Box]]


BANDS: dict[str, list[Box]] = {
    "train": [(0, 0, 300, 512)],
    "validation": [(300, 0, 364, 512)],
    "test": [(364, 0, 512, 512)],
}
SURFACES = {
    "bricks": Surface("brick", True, BANDS),
    "grass": Surface("grass", False, BANDS),
    "gravel": Surface("gravel", False, BANDS),
    "tissue": Surface("ihc", False, BANDS),
    "the moon": Surface("moon", True, BANDS),
    "fur": Surface(
        "chelsea",
        False,
        {
            "train": [(80, 15, 235, 82), (100, 148, 200, 215)],
            "validation": [(238, 0, 310, 80)],
            "test": [(218, 82, 292, 190)],
        },
    ),
    "wood": Surface(
        "coffee",
        False,
        {"train": [(485, 60, 600, 400)], "validation": [(430, 0, 600, 58)], "test": [(0, 215, 75, 400)]},
    ),
    "coins": Surface(
        "coins",
        True,
        {"train": [(10, 20, 376, 152)], "validation": [(10, 155, 376, 222)], "test": [(10, 226, 376, 294)]},
    ),
    "printed text": Surface(
        "page",
        False,
        {"train": [(0, 45, 225, 135)], "validation": [(225, 45, 275, 135)], "test": [(275, 45, 384, 135)]},
    ),
}


def load() -> Embedded:
    return Embedded(
        name="materials",
        classes=tuple(SURFACES),
        templates=("a photo of {}.", "a close-up photo of {}.", "the texture of {}.", "a grey picture of {}.", "{}"),
        sizes=SIZES,
        source="nine photographs, cut into patches, with scikit-image",
        license="CC0, no known restrictions, or BSD-3-Clause",
        make=make,
        sha256="afaae590a3b1949bb59857949c964728c8eefc9da8760c96001d6a426cfa9ef3",
        package=SCIKIT_IMAGE,
    )


def make() -> Pictures:
    pictures = {surface.file: SCIKIT_IMAGE.read(f"data/{surface.file}.png", _read) for surface in SURFACES.values()}
    return {split: _split(split, pictures) for split in SIZES}


def _read(data: bytes) -> Whole:
    """(height, width), grey."""
    pixels = np.asarray(Image.open(BytesIO(data))).astype(np.int64)
    return grey(pixels) if pixels.ndim == 3 else pixels


def _split(split: str, pictures: dict[str, Whole]) -> Labelled:
    each = SIZES[split] // len(SURFACES)
    patches = []
    for name, surface in SURFACES.items():
        dice = Dice(f"tasks/materials/{split}/{name}")
        patches.append(_patches(pictures[surface.file], surface, split, each, dice))
    order = Dice(f"tasks/materials/{split}").order(SIZES[split])
    everything = labelled(np.concatenate(patches), np.repeat(np.arange(len(SURFACES)), each))
    return Labelled(everything.images[order], everything.labels[order])


def _patches(picture: Whole, surface: Surface, split: str, count: int, dice: Dice) -> Bytes:
    """(count, 28, 28), from as many different places."""
    side = 2 * SIZE if surface.half else SIZE
    corners = np.concatenate([_corners(box, side) for box in surface.regions[split]])
    chosen = corners[dice.order(len(corners))[:count]]
    cut = np.stack([picture[top : top + side, left : left + side] for top, left in chosen])
    patches = halved(cut) if surface.half else cut
    turned = [np.rot90(patch, turn) for patch, turn in zip(patches, dice.below(4, count), strict=True)]
    return np.stack(turned).astype(np.uint8)


def _corners(box: Box, side: int) -> Whole:
    """(K, 2): row and column of every square of that side in the box."""
    left, top, right, bottom = box
    rows, columns = np.indices((bottom - top - side + 1, right - left - side + 1))
    return np.stack([rows.ravel() + top, columns.ravel() + left], axis=1)
