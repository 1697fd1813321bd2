"""Resizing in whole numbers: a library's filters differ in the last bit from machine to machine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Whole = NDArray[np.int64]


def enlarged(pictures: Whole, size: int, most: int) -> Whole:
    """(N, S, S) with values up to `most` -> (N, size, size) up to 255, bilinear, rounded once; the border goes on."""
    side = pictures.shape[-1]
    # Pixel i of the new picture lies at (2 i + 1) S / (2 size) - 1/2 of the old one, which is whole in parts of 2 size.
    parts = 2 * size
    place = np.clip((2 * np.arange(size) + 1) * side - size, 0, (side - 1) * parts)
    first, share = place // parts, place % parts
    second = np.minimum(first + 1, side - 1)
    rows = pictures[:, first] * (parts - share)[:, None] + pictures[:, second] * share[:, None]
    both = rows[:, :, first] * (parts - share) + rows[:, :, second] * share
    whole = parts * parts * most
    return np.asarray((both * 255 + whole // 2) // whole)


def halved(pictures: Whole) -> Whole:
    """(N, 2 H, 2 W) -> (N, H, W): the mean of every four pixels, rounded."""
    four = pictures[:, ::2, ::2] + pictures[:, ::2, 1::2] + pictures[:, 1::2, ::2] + pictures[:, 1::2, 1::2]
    return np.asarray((four + 2) // 4)


def grey(colours: Whole) -> Whole:
    """(…, 3) -> (…): the luma of ITU-R 601, rounded."""
    red, green, blue = colours[..., 0], colours[..., 1], colours[..., 2]
    return np.asarray((299 * red + 587 * green + 114 * blue + 500) // 1000)
