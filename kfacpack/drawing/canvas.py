"""Fields: where a picture's points lie, what covers them, and how layers become pixels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kfacpack.drawing.dice import Dice

SIZE = 28
"""Pixels of a picture's side."""

Field = NDArray[np.float32]


def points(count: int, size: int = SIZE) -> tuple[Field, Field]:
    """The x and y of every pixel of N pictures."""
    axis = (np.arange(size, dtype=np.float32) + np.float32(0.5)) * np.float32(2 / size) - np.float32(1)
    shape = (count, size, size)
    return np.broadcast_to(axis[None, None, :], shape), np.broadcast_to(axis[None, :, None], shape)


def moved(x: Field, y: Field, centre: tuple[Field, Field], extent: Field) -> tuple[Field, Field]:
    """Coordinates in which an object, `extent` (N,) wide on the picture, reaches from -1 to 1 around its centre."""
    half = each(extent) * np.float32(0.5)
    return (x - each(centre[0])) / half, (y - each(centre[1])) / half


def turned(x: Field, y: Field, half_tangent: Field) -> tuple[Field, Field]:
    """Turned by the angle whose half has this tangent (N,): no sine is needed for it."""
    t = each(half_tangent)
    norm = np.float32(1) + t * t
    cosine, sine = (np.float32(1) - t * t) / norm, np.float32(2) * t / norm
    return cosine * x + sine * y, cosine * y - sine * x


def bent(x: Field, y: Field, dice: Dice, strength: Field, knots: int = 4) -> tuple[Field, Field]:
    """Pulled to and fro, smoothly, by up to `strength` (N,)."""
    count = len(x)
    shift = dice.uniform((2, count, knots, knots), -1, 1)
    return (
        x + each(strength) * spread(shift[0], x.shape[-1]),
        y + each(strength) * spread(shift[1], x.shape[-1]),
    )


def spread(knots: Field, size: int = SIZE) -> Field:
    """(N, K, K) values, interpolated over the picture."""
    count = len(knots)
    x, y = points(count, size)
    return sampled(knots, x, y)


def sampled(pictures: Field, x: Field, y: Field) -> Field:
    """Pictures (N, S, S), reaching from -1 to 1, looked up between their pixels; outside, their border goes on."""
    side = pictures.shape[-1]
    scale = np.float32(side / 2)
    column = np.clip((x + np.float32(1)) * scale - np.float32(0.5), 0, side - 1)
    row = np.clip((y + np.float32(1)) * scale - np.float32(0.5), 0, side - 1)
    left, top = np.floor(column), np.floor(row)
    right_share, bottom_share = column - left, row - top
    j, i = left.astype(np.int32), top.astype(np.int32)
    along, down = (j < side - 1).astype(np.int32), (i < side - 1).astype(np.int32) * side
    first = i * side + j + np.arange(len(pictures), dtype=np.int32)[:, None, None] * (side * side)
    numbers = pictures.reshape(-1)

    def mean(place: NDArray[np.int32]) -> Field:
        before = numbers.take(place)
        return np.asarray(before + (numbers.take(place + along) - before) * right_share, dtype=np.float32)

    upper = mean(first)
    return upper + (mean(first + down) - upper) * bottom_share


def stamped(stamps: Field, x: Field, y: Field) -> Field:
    """The coverage of stamps that reach from -1 to 1."""
    inside = (np.abs(x) < 1) & (np.abs(y) < 1)
    return np.asarray(np.where(inside, sampled(stamps, x, y), np.float32(0)), dtype=np.float32)


def soft(distance: Field, pixel: Field | float) -> Field:
    """Coverage from a distance to the edge, positive inside; the edge is one `pixel` wide."""
    return np.clip(distance / pixel + np.float32(0.5), 0, 1)


def wave(position: Field) -> Field:
    """Up and down between 0 and 1, with period 1, in straight lines."""
    part = position - np.floor(position)
    return np.abs(part * np.float32(2) - np.float32(1))


def blurred(field: Field, amount: Field) -> Field:
    """Mixed with its neighbours; `amount` (N,) from 0 (as it was) to 1."""
    share = each(amount) * np.float32(1 / 3)
    for axis in (1, 2):
        before, after = _shifted(field, axis, 1), _shifted(field, axis, -1)
        field = field * (1 - 2 * share) + (before + after) * share
    return field


def thickened(coverage: Field, amount: Field) -> Field:
    """Strokes grown (amount (N,) towards 1) or thinned (towards -1)."""
    smooth = blurred(blurred(coverage, np.ones(len(coverage), np.float32)), np.ones(len(coverage), np.float32))
    return np.clip((smooth - np.float32(0.4) + np.float32(0.3) * each(amount)) * 3 + np.float32(0.4), 0, 1)


def mixed(ground: Field, ink: Field, coverage: Field) -> Field:
    """Colours (N, 1 or size, 1 or size, 3), one over the other."""
    over = coverage[..., None]
    return np.asarray(ground * (1 - over) + ink * over, dtype=np.float32)


def flat(colours: Field) -> Field:
    """(N, 3) -> a colour for the whole of each picture."""
    return colours[:, None, None, :]


def pixels(picture: Field) -> NDArray[np.uint8]:
    """Values from 0 to 1 as bytes."""
    return np.floor(np.clip(picture, 0, 1) * np.float32(255) + np.float32(0.5)).astype(np.uint8)


def each(values: Field) -> Field:
    """(N,), one for each picture, to go with fields."""
    return values[:, None, None]


def _shifted(field: Field, axis: int, by: int) -> Field:
    """Moved by one, the border repeated."""
    index = np.clip(np.arange(field.shape[axis]) - by, 0, field.shape[axis] - 1)
    return np.take(field, index, axis=axis)
