"""Pictures whose pixels have more than eight bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

WHITE = 2**16 - 1
SIXTEEN_BITS = ("PNG", "PPM")
"""Formats whose numbers have at most as many, though Pillow holds them in more."""


def eight_bit(picture: Image) -> Image:
    """The same picture, with grey of 16 bits scaled to 8; a ValueError for numbers of which nobody says what is white.

    Pillow's own conversion to RGB cuts such pixels off at 255, which turns the whole picture white.
    """
    if picture.mode not in ("I", "F") and not picture.mode.startswith("I;16"):
        return picture
    from PIL import Image

    if picture.mode == "F" or (picture.mode == "I" and picture.format not in SIXTEEN_BITS):
        kind = "floating-point" if picture.mode == "F" else "32-bit"
        raise ValueError(f"its pixels are {kind} numbers, expected 8 or 16 bits; store it as PNG or JPEG")
    made = Image.fromarray((np.asarray(picture) // (WHITE // 255)).astype(np.uint8))
    made.format = picture.format
    return made
