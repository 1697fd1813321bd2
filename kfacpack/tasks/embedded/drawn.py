"""What tasks that are drawn have in common: which class each picture shows, and glyphs put on a canvas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kfacpack.drawing import canvas
from kfacpack.drawing.canvas import Field, each
from kfacpack.drawing.dice import Dice
from kfacpack.drawing.glyphs import stamps
from kfacpack.tasks.embedded.pictures import Bytes, Pictures, labelled

AT_ONCE = 128
"""Pictures drawn together, so few that their fields fit into a processor's cache. Each lot has a stream of its own, so
another number would be other pictures."""

Labels = NDArray[np.int64]


def stream(task: str, split: str) -> str:
    """The name of the random numbers that draw a split."""
    return f"tasks/{task}/{split}"


def drawn(task: str, sizes: Mapping[str, int], classes: int, draw: Callable[[Labels, Dice], Bytes]) -> Pictures:
    """Every class equally often, in random order. `draw`: the label of each picture, dice -> pictures."""
    pictures = {}
    for split, size in sizes.items():
        labels = Dice(stream(task, split)).order(size) % classes
        parts = [
            draw(labels[start : start + AT_ONCE], Dice(stream(task, split), number))
            for number, start in enumerate(range(0, size, AT_ONCE), start=1)
        ]
        pictures[split] = labelled(np.concatenate(parts), labels)
    return pictures


def lettered(characters: Sequence[str], fonts: Sequence[str], dice: Dice) -> Field:
    """A stamp for each character, each in one of the fonts."""
    chosen = dice.below(len(fonts), len(characters))
    return stamps((character, fonts[font]) for character, font in zip(characters, chosen.tolist(), strict=True))


def put(
    glyphs: Field, dice: Dice, *, extent: tuple[float, float], shift: float, turn: float, bend: float, x: float = 0.0
) -> Field:
    """Coverage of stamps, each of a random extent, around `x` and half-way down; `turn`: tangent of half the angle."""
    count = len(glyphs)
    u, v = canvas.points(count)
    centre = (dice.uniform(count, x - shift, x + shift), dice.uniform(count, -shift, shift))
    u, v = canvas.moved(u, v, centre, dice.uniform(count, *extent))
    u, v = canvas.turned(u, v, dice.uniform(count, -turn, turn))
    u, v = canvas.bent(u, v, dice, dice.uniform(count, 0, bend))
    return canvas.stamped(glyphs, u, v)


def finished(picture: Field, dice: Dice, *, blur: float, noise: float) -> Bytes:
    """(N, 28, 28, 3) blurred and with grain, as bytes."""
    count = len(picture)
    amount, grain = dice.uniform(count, 0, blur), dice.uniform(count, 0, noise)
    channels = [canvas.blurred(picture[..., channel], amount) for channel in range(3)]
    return canvas.pixels(np.stack([one + each(grain) * dice.grain(one.shape) for one in channels], axis=-1))


def two_colours(dice: Dice, count: int) -> tuple[Field, Field]:
    """A light and a dark one for each picture, in either order, (N, 3) each."""
    light, dark = dice.uniform((count, 3), 0.55, 1.0), dice.uniform((count, 3), 0.0, 0.4)
    swapped = dice.chance(0.5, (count, 1))
    return np.where(swapped, dark, light), np.where(swapped, light, dark)
