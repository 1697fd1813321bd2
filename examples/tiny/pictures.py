"""Batches of pictures with captions; each depends only on the seed and its number."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from kfacpack._random import CounterRandom
from kfacpack.demo import canvas
from kfacpack.demo.canvas import Field, per_image, render_glyphs
from tiny.captions import FACTS, GROUND, INK, MANY, PLACE, SECOND, SECOND_INK, SUBJECT, UNSTATED, caption
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
    stated: NDArray[np.int64]
    """(N, FACTS): the facts that each caption states."""

    @property
    def true(self) -> NDArray[np.bool_]:
        """(pictures, captions): whether a caption is true of a picture, which may hold for several pictures."""
        stated, shown = self.stated[None], self.shown[:, None]
        return np.all((stated == UNSTATED) | (stated == shown), axis=-1)


def batch(seed: int, number: int, size: int) -> Batch:
    """Draws batch `number` of `size` pictures."""
    rng = CounterRandom(f"{STREAM}-{seed}", number)
    ends = [round(size * share) for share in accumulate(SHARES.values())]
    counts = np.diff([0, *ends[:-1], size])
    makers = (_plain, _coloured, _pattern, _pair, _crowd)
    parts = [make(rng, int(count)) for make, count in zip(makers, counts, strict=True)]
    pictures = np.concatenate([_weathered(picture, rng) for picture, _ in parts])
    shown = np.concatenate([facts for _, facts in parts])
    captions = [caption(facts, rng) for facts in shown.tolist()]
    stated = np.array([stated for _, stated in captions], dtype=np.int64)
    return Batch(pictures, [text for text, _ in captions], shown, stated)


def _plain(rng: CounterRandom, count: int) -> tuple[Field, NDArray[np.int64]]:
    """Draws large glyphs, bright on black or dark on white, as in scanned writing."""
    facts, chosen = _facts(rng, count)
    coverage = _drawn(chosen, rng, np.zeros((count, 2), np.float32), rng.uniform(count, 1.2, 1.9), bend=0.3)
    coarse = rng.bernoulli(0.25, count)
    coverage = np.where(per_image(coarse), _coarsened(coverage, 9), coverage)
    inverse = rng.bernoulli(0.25, count)
    facts[:, INK] = np.where(inverse, BLACK, WHITE)
    facts[:, GROUND] = np.where(inverse, WHITE, BLACK)
    shade = np.where(per_image(inverse), 1 - coverage, coverage)
    return np.repeat(shade[..., None], 3, axis=-1).astype(np.float32), facts


def _coloured(rng: CounterRandom, count: int) -> tuple[Field, NDArray[np.int64]]:
    """Draws coloured glyphs on a plain background or on a pattern of two other colours."""
    facts, chosen = _facts(rng, count)
    place = np.where(rng.bernoulli(0.5, count), 0, rng.integers(len(CENTRES), count))
    extent = np.where(place == 0, rng.uniform(count, 0.9, 1.8), rng.uniform(count, 0.7, 1.0)).astype(np.float32)
    coverage = _drawn(chosen, rng, CENTRES[place], extent, bend=0.15)
    ink, ground, other = _colours(rng, count)
    patterned = rng.bernoulli(0.35, count)
    back = canvas.blend(
        canvas.constant_field(_shade(ground, rng)),
        canvas.constant_field(_shade(other, rng)),
        _patterns(rng, rng.integers(len(PATTERNS), count)),
    )
    back = np.where(patterned[:, None, None, None], back, canvas.constant_field(_shade(ground, rng)))
    facts[:, INK], facts[:, PLACE] = ink, place
    facts[:, GROUND] = np.where(patterned, UNSTATED, ground)
    return canvas.blend(back, canvas.constant_field(_shade(ink, rng)), coverage), facts


def _pattern(rng: CounterRandom, count: int) -> tuple[Field, NDArray[np.int64]]:
    facts = np.full((count, FACTS), UNSTATED, dtype=np.int64)
    kind = rng.integers(len(PATTERNS), count)
    ink, ground, _ = _colours(rng, count)
    facts[:, SUBJECT] = len(GLYPHS) + kind
    # Neither colour of a pattern is the background: the first one in the palette counts as the ink.
    facts[:, INK], facts[:, GROUND] = np.minimum(ink, ground), np.maximum(ink, ground)
    return canvas.blend(
        canvas.constant_field(_shade(ground, rng)),
        canvas.constant_field(_shade(ink, rng)),
        _patterns(rng, kind),
    ), facts


def _pair(rng: CounterRandom, count: int) -> tuple[Field, NDArray[np.int64]]:
    facts, left = _facts(rng, count)
    others, right = _facts(rng, count)
    ink, ground, second = _colours(rng, count)
    facts[:, SECOND], facts[:, INK], facts[:, SECOND_INK] = others[:, SUBJECT], ink, second
    picture = canvas.constant_field(_shade(ground, rng))
    for chosen, side, colour in ((left, -0.48, ink), (right, 0.48, second)):
        centre = np.stack([rng.uniform(count, side - 0.05, side + 0.05), rng.uniform(count, -0.3, 0.3)], axis=1)
        coverage = _drawn(chosen, rng, centre, rng.uniform(count, 0.7, 0.95), bend=0.1)
        picture = canvas.blend(picture, canvas.constant_field(_shade(colour, rng)), coverage)
    return picture, facts


def _crowd(rng: CounterRandom, count: int) -> tuple[Field, NDArray[np.int64]]:
    facts, chosen = _facts(rng, count)
    ink, ground, _ = _colours(rng, count)
    facts[:, INK], facts[:, GROUND], facts[:, MANY] = ink, ground, 1
    picture, shade = canvas.constant_field(_shade(ground, rng)), canvas.constant_field(_shade(ink, rng))
    for x, y in ((-0.5, -0.5), (0.5, -0.5), (-0.5, 0.5), (0.5, 0.5), (0.0, 0.0)):
        centre = np.stack([rng.uniform(count, x - 0.12, x + 0.12), rng.uniform(count, y - 0.12, y + 0.12)], axis=1)
        picture = canvas.blend(picture, shade, _drawn(chosen, rng, centre, rng.uniform(count, 0.5, 0.65), bend=0.05))
    return picture, facts


def _facts(rng: CounterRandom, count: int) -> tuple[NDArray[np.int64], list[int]]:
    """Chooses a glyph for each picture; returns facts that contain only the glyph, and the glyphs."""
    chosen = []
    for where, which in zip(rng.uniform(count).tolist(), rng.uniform(count).tolist(), strict=True):
        start = 0
        for members, share in GROUPS.values():
            if where < share or members is SYMBOLS:
                chosen.append(start + min(int(which * len(members)), len(members) - 1))
                break
            where -= share
            start += len(members)
    facts = np.full((count, FACTS), UNSTATED, dtype=np.int64)
    facts[:, SUBJECT] = chosen
    return facts, chosen


def _drawn(chosen: list[int], rng: CounterRandom, centre: Field, extent: Field, bend: float) -> Field:
    count = len(chosen)
    pictures = render_glyphs((GLYPHS[index].character, rng.choice(GLYPHS[index].fonts)) for index in chosen)
    x, y = canvas.grid_points(count)
    x, y = canvas.translate(x, y, (centre[:, 0], centre[:, 1]), extent)
    x, y = canvas.rotate(x, y, rng.uniform(count, -0.13, 0.13))
    x = x + per_image(rng.uniform(count, -0.3, 0.3)) * y
    x, y = x * per_image(rng.uniform(count, 0.85, 1.2)), y * per_image(rng.uniform(count, 0.9, 1.1))
    x, y = canvas.bend(x, y, rng, rng.uniform(count, 0, bend))
    coverage = canvas.stamp_glyph(pictures, x, y)
    return np.where(
        per_image(rng.bernoulli(0.6, count)), canvas.dilate(coverage, rng.uniform(count, -0.25, 0.9)), coverage
    )


def _patterns(rng: CounterRandom, kind: NDArray[np.int64]) -> Field:
    """Draws the pattern of each picture, one kind of pattern at a time."""
    coverage = np.zeros((len(kind), canvas.SIZE, canvas.SIZE), np.float32)
    for index, pattern in enumerate(PATTERNS):
        members = np.nonzero(kind == index)[0]
        if len(members):
            x, y = canvas.grid_points(len(members))
            x, y = canvas.rotate(x, y, rng.uniform(len(members), -0.08, 0.08))
            shift = rng.uniform((2, len(members)), -0.15, 0.15)
            coverage[members] = pattern.draw(
                x + per_image(shift[0]), y + per_image(shift[1]), rng.uniform(len(members), 1.2, 3.5), rng
            )
    return np.clip(coverage, 0, 1)


def _colours(rng: CounterRandom, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Chooses three colours for each picture; in about one picture of twenty, the last two are the same."""
    first = rng.integers(len(PALETTE), count)
    second = (first + 1 + rng.integers(len(PALETTE) - 1, count)) % len(PALETTE)
    third = (first + 1 + rng.integers(len(PALETTE) - 1, count)) % len(PALETTE)
    return (
        first,
        second,
        np.where(third == second, (first + 1 + (second - first) % (len(PALETTE) - 1)) % len(PALETTE), third),
    )


def _shade(colour: NDArray[np.int64], rng: CounterRandom) -> Field:
    return np.clip(PALETTE[colour] + rng.uniform((len(colour), 3), -0.08, 0.08), 0, 1)


def _coarsened(coverage: Field, size: int) -> Field:
    """Reduces the resolution, as a scanner with few pixels would."""
    ones = np.ones(len(coverage), np.float32)
    smooth = canvas.blur(canvas.blur(coverage, ones), ones)
    x, y = canvas.grid_points(len(coverage), size)
    return canvas.interpolate(np.clip(canvas.sample_field(smooth, x, y) * np.float32(1.3), 0, 1))


def _weathered(picture: Field, rng: CounterRandom) -> NDArray[np.uint8]:
    """Applies blur, contrast and noise."""
    count = len(picture)
    amount = np.where(rng.bernoulli(0.5, count), rng.uniform(count, 0, 0.9), np.float32(0)).astype(np.float32)
    channels = [canvas.blur(picture[..., channel], amount) for channel in range(3)]
    gain = rng.uniform(count, 0.7, 1.1)
    noise = np.where(rng.bernoulli(0.5, count), rng.uniform(count, 0, 0.08), np.float32(0)).astype(np.float32)
    done = [channel * per_image(gain) + per_image(noise) * rng.normal(channel.shape) for channel in channels]
    return canvas.pixels(np.stack(done, axis=-1))
