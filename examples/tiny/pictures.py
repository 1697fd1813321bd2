"""Batches of pictures with captions; each depends only on the seed and its number."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from kfacpack._random import CounterRandom
from kfacpack.demo import canvas
from kfacpack.demo.canvas import Field, per_image, render_glyphs
from tiny.captions import FACTS, GROUND, INK, MANY, PLACE, SECOND, SECOND_INK, SUBJECT, UNTOLD, caption
from tiny.subjects import COLOURS, DIGITS, GLYPHS, PATTERNS, PLACES, SCRIPTS, STREAM, SYMBOLS

PALETTE = np.array(list(COLOURS.values()), dtype=np.float32)
BLACK, WHITE = list(COLOURS).index("black"), list(COLOURS).index("white")
CENTRES = np.array(list(PLACES.values()), dtype=np.float32)

SHARES = {"plain": 0.34, "coloured": 0.30, "pattern": 0.16, "pair": 0.12, "crowd": 0.08}
"""Shares of the kinds of pictures in a batch."""
GROUPS = {
    "digits": (DIGITS, 0.34),
    **{name: (script, 0.09) for name, script in SCRIPTS.items()},
    "symbols": (SYMBOLS, 0.21),
}
"""The groups of glyphs and their shares."""


@dataclass(frozen=True)
class Batch:
    """A batch of pictures and captions."""

    pictures: NDArray[np.uint8]
    """(N, 28, 28, 3)."""
    captions: list[str]
    shown: NDArray[np.int64]
    """(N, FACTS): the facts of each picture."""
    told: NDArray[np.int64]
    """(N, FACTS): the facts that each caption states."""

    @property
    def true(self) -> NDArray[np.bool_]:
        """(pictures, captions): whether a caption is true of a picture, which may hold for several pictures."""
        told, shown = self.told[None], self.shown[:, None]
        return np.all((told == UNTOLD) | (told == shown), axis=-1)


def batch(seed: int, number: int, size: int) -> Batch:
    """Draws batch `number` of `size` pictures."""
    dice = CounterRandom(f"{STREAM}-{seed}", number)
    ends = [round(size * share) for share in accumulate(SHARES.values())]
    counts = np.diff([0, *ends[:-1], size])
    makers = (_plain, _coloured, _pattern, _pair, _crowd)
    parts = [make(dice, int(count)) for make, count in zip(makers, counts, strict=True)]
    pictures = np.concatenate([_weathered(picture, dice) for picture, _ in parts])
    shown = np.concatenate([facts for _, facts in parts])
    captions = [caption(facts, dice) for facts in shown.tolist()]
    told = np.array([stated for _, stated in captions], dtype=np.int64)
    return Batch(pictures, [text for text, _ in captions], shown, told)


def _plain(dice: CounterRandom, count: int) -> tuple[Field, NDArray[np.int64]]:
    """Draws large glyphs, bright on black or dark on white, as in scanned writing."""
    facts, chosen = _facts(dice, count)
    coverage = _drawn(chosen, dice, np.zeros((count, 2), np.float32), dice.uniform(count, 1.2, 1.9), bend=0.3)
    coarse = dice.bernoulli(0.25, count)
    coverage = np.where(per_image(coarse), _coarsened(coverage, 9), coverage)
    inverse = dice.bernoulli(0.25, count)
    facts[:, INK] = np.where(inverse, BLACK, WHITE)
    facts[:, GROUND] = np.where(inverse, WHITE, BLACK)
    shade = np.where(per_image(inverse), 1 - coverage, coverage)
    return np.repeat(shade[..., None], 3, axis=-1).astype(np.float32), facts


def _coloured(dice: CounterRandom, count: int) -> tuple[Field, NDArray[np.int64]]:
    """Draws coloured glyphs on a plain background or on a pattern of two other colours."""
    facts, chosen = _facts(dice, count)
    place = np.where(dice.bernoulli(0.5, count), 0, dice.integers(len(CENTRES), count))
    extent = np.where(place == 0, dice.uniform(count, 0.9, 1.8), dice.uniform(count, 0.7, 1.0)).astype(np.float32)
    coverage = _drawn(chosen, dice, CENTRES[place], extent, bend=0.15)
    ink, ground, other = _colours(dice, count)
    patterned = dice.bernoulli(0.35, count)
    back = canvas.blend(
        canvas.constant_field(_shade(ground, dice)),
        canvas.constant_field(_shade(other, dice)),
        _patterns(dice, dice.integers(len(PATTERNS), count)),
    )
    back = np.where(patterned[:, None, None, None], back, canvas.constant_field(_shade(ground, dice)))
    facts[:, INK], facts[:, PLACE] = ink, place
    facts[:, GROUND] = np.where(patterned, UNTOLD, ground)
    return canvas.blend(back, canvas.constant_field(_shade(ink, dice)), coverage), facts


def _pattern(dice: CounterRandom, count: int) -> tuple[Field, NDArray[np.int64]]:
    facts = np.full((count, FACTS), UNTOLD, dtype=np.int64)
    kind = dice.integers(len(PATTERNS), count)
    ink, ground, _ = _colours(dice, count)
    facts[:, SUBJECT] = len(GLYPHS) + kind
    # Neither colour of a pattern is the background: the first one in the palette counts as the ink.
    facts[:, INK], facts[:, GROUND] = np.minimum(ink, ground), np.maximum(ink, ground)
    return canvas.blend(
        canvas.constant_field(_shade(ground, dice)), canvas.constant_field(_shade(ink, dice)), _patterns(dice, kind)
    ), facts


def _pair(dice: CounterRandom, count: int) -> tuple[Field, NDArray[np.int64]]:
    facts, left = _facts(dice, count)
    others, right = _facts(dice, count)
    ink, ground, second = _colours(dice, count)
    facts[:, SECOND], facts[:, INK], facts[:, SECOND_INK] = others[:, SUBJECT], ink, second
    picture = canvas.constant_field(_shade(ground, dice))
    for chosen, side, colour in ((left, -0.48, ink), (right, 0.48, second)):
        centre = np.stack([dice.uniform(count, side - 0.05, side + 0.05), dice.uniform(count, -0.3, 0.3)], axis=1)
        coverage = _drawn(chosen, dice, centre, dice.uniform(count, 0.7, 0.95), bend=0.1)
        picture = canvas.blend(picture, canvas.constant_field(_shade(colour, dice)), coverage)
    return picture, facts


def _crowd(dice: CounterRandom, count: int) -> tuple[Field, NDArray[np.int64]]:
    facts, chosen = _facts(dice, count)
    ink, ground, _ = _colours(dice, count)
    facts[:, INK], facts[:, GROUND], facts[:, MANY] = ink, ground, 1
    picture, shade = canvas.constant_field(_shade(ground, dice)), canvas.constant_field(_shade(ink, dice))
    for x, y in ((-0.5, -0.5), (0.5, -0.5), (-0.5, 0.5), (0.5, 0.5), (0.0, 0.0)):
        centre = np.stack([dice.uniform(count, x - 0.12, x + 0.12), dice.uniform(count, y - 0.12, y + 0.12)], axis=1)
        picture = canvas.blend(picture, shade, _drawn(chosen, dice, centre, dice.uniform(count, 0.5, 0.65), bend=0.05))
    return picture, facts


def _facts(dice: CounterRandom, count: int) -> tuple[NDArray[np.int64], list[int]]:
    """Chooses a glyph for each picture; returns facts that contain only the glyph, and the glyphs."""
    chosen = []
    for where, which in zip(dice.uniform(count).tolist(), dice.uniform(count).tolist(), strict=True):
        start = 0
        for members, share in GROUPS.values():
            if where < share or members is SYMBOLS:
                chosen.append(start + min(int(which * len(members)), len(members) - 1))
                break
            where -= share
            start += len(members)
    facts = np.full((count, FACTS), UNTOLD, dtype=np.int64)
    facts[:, SUBJECT] = chosen
    return facts, chosen


def _drawn(chosen: list[int], dice: CounterRandom, centre: Field, extent: Field, bend: float) -> Field:
    count = len(chosen)
    pictures = render_glyphs((GLYPHS[index].character, dice.choice(GLYPHS[index].fonts)) for index in chosen)
    x, y = canvas.grid_points(count)
    x, y = canvas.translate(x, y, (centre[:, 0], centre[:, 1]), extent)
    x, y = canvas.rotate(x, y, dice.uniform(count, -0.13, 0.13))
    x = x + per_image(dice.uniform(count, -0.3, 0.3)) * y
    x, y = x * per_image(dice.uniform(count, 0.85, 1.2)), y * per_image(dice.uniform(count, 0.9, 1.1))
    x, y = canvas.bend(x, y, dice, dice.uniform(count, 0, bend))
    coverage = canvas.stamp_glyph(pictures, x, y)
    return np.where(
        per_image(dice.bernoulli(0.6, count)), canvas.dilate(coverage, dice.uniform(count, -0.25, 0.9)), coverage
    )


def _patterns(dice: CounterRandom, kind: NDArray[np.int64]) -> Field:
    """Draws the pattern of each picture, one kind of pattern at a time."""
    coverage = np.zeros((len(kind), canvas.SIZE, canvas.SIZE), np.float32)
    for index, pattern in enumerate(PATTERNS):
        members = np.nonzero(kind == index)[0]
        if len(members):
            x, y = canvas.grid_points(len(members))
            x, y = canvas.rotate(x, y, dice.uniform(len(members), -0.08, 0.08))
            shift = dice.uniform((2, len(members)), -0.15, 0.15)
            coverage[members] = pattern.draw(
                x + per_image(shift[0]), y + per_image(shift[1]), dice.uniform(len(members), 1.2, 3.5), dice
            )
    return np.clip(coverage, 0, 1)


def _colours(dice: CounterRandom, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Chooses three colours for each picture; in about one picture of twenty, the last two are the same."""
    first = dice.integers(len(PALETTE), count)
    second = (first + 1 + dice.integers(len(PALETTE) - 1, count)) % len(PALETTE)
    third = (first + 1 + dice.integers(len(PALETTE) - 1, count)) % len(PALETTE)
    return (
        first,
        second,
        np.where(third == second, (first + 1 + (second - first) % (len(PALETTE) - 1)) % len(PALETTE), third),
    )


def _shade(colour: NDArray[np.int64], dice: CounterRandom) -> Field:
    return np.clip(PALETTE[colour] + dice.uniform((len(colour), 3), -0.08, 0.08), 0, 1)


def _coarsened(coverage: Field, size: int) -> Field:
    """Reduces the resolution, as a scanner with few pixels would."""
    ones = np.ones(len(coverage), np.float32)
    smooth = canvas.blur(canvas.blur(coverage, ones), ones)
    x, y = canvas.grid_points(len(coverage), size)
    return canvas.spread(np.clip(canvas.sample_field(smooth, x, y) * np.float32(1.3), 0, 1))


def _weathered(picture: Field, dice: CounterRandom) -> NDArray[np.uint8]:
    """Applies blur, contrast and noise."""
    count = len(picture)
    amount = np.where(dice.bernoulli(0.5, count), dice.uniform(count, 0, 0.9), np.float32(0)).astype(np.float32)
    channels = [canvas.blur(picture[..., channel], amount) for channel in range(3)]
    gain = dice.uniform(count, 0.7, 1.1)
    noise = np.where(dice.bernoulli(0.5, count), dice.uniform(count, 0, 0.08), np.float32(0)).astype(np.float32)
    done = [channel * per_image(gain) + per_image(noise) * dice.normal(channel.shape) for channel in channels]
    return canvas.pixels(np.stack(done, axis=-1))
