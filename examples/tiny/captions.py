"""Captions of pictures: always true, usually incomplete, and worded in many ways."""

from __future__ import annotations

from collections.abc import Sequence

from kfacpack._random import CounterRandom
from tiny.subjects import COLOURS, PLACES, SUBJECTS

SUBJECT, INK, GROUND, PLACE, SECOND, SECOND_INK, MANY = range(7)
"""Indices of the facts of a picture. A caption states some of them; the others are UNSTATED."""
FACTS = 7
UNSTATED = -1

FRAMES = (
    "{}",
    "{}.",
    "a photo of {}",
    "a photo of {}.",
    "a picture of {}",
    "an image of {}",
    "an image showing {}",
    "a drawing of {}",
    "a rendering of {}",
    "this is {}",
    "here is {}",
    "we see {}",
    "it shows {}",
    "a blurry picture of {}",
    "a bad photo of {}",
    "a close-up of {}",
    "a small picture of {}",
    "a low resolution photo of {}",
    "a handwritten {}",
    "a printed {}",
    "{} in a picture",
    "{}, up close",
    "look at {}",
    "a sign with {}",
    "a scan of {}",
)
FILLERS = (
    "nice",
    "old",
    "simple",
    "little",
    "just",
    "some",
    "clear",
    "dark",
    "bright",
    "plain",
    "example",
    "of",
    "the",
    "my",
)
COLOUR_NAMES = tuple(COLOURS)
PLACE_NAMES = tuple(PLACES)


def caption(facts: Sequence[int], rng: CounterRandom) -> tuple[str, list[int]]:
    """Returns a random caption, and the facts that it states.

    Args:
        facts: The facts of the picture.
        rng: Source of random numbers.
    """
    stated = [UNSTATED] * FACTS
    names = SUBJECTS[facts[SUBJECT]].names
    phrase = rng.choice(names)
    stated[SUBJECT] = facts[SUBJECT]
    chances = rng.uniform(8)
    if facts[SECOND] >= 0:
        phrase, stated = _pair(facts, phrase, rng, chances[0] < 0.5)
    else:
        if facts[MANY] == 1 and chances[0] < 0.8:
            phrase, stated[MANY] = f"{rng.choice(('many copies of', 'several times', 'a crowd of'))} {phrase}", 1
        if facts[INK] >= 0 and chances[1] < 0.35:
            phrase, stated[INK] = _coloured(phrase, COLOUR_NAMES[facts[INK]]), facts[INK]
        if facts[GROUND] >= 0 and chances[2] < 0.25:
            ground = COLOUR_NAMES[facts[GROUND]]
            phrase, stated[GROUND] = (
                phrase + rng.choice((f" on {ground}", f" on a {ground} background", f" and {ground}")),
                facts[GROUND],
            )
        if facts[PLACE] >= 0 and chances[3] < 0.4:
            phrase, stated[PLACE] = f"{phrase} {PLACE_NAMES[facts[PLACE]]}", facts[PLACE]
    sentence = rng.choice(FRAMES).format(phrase) if chances[4] < 0.8 else phrase
    if chances[5] < 0.25:
        words = sentence.split(" ")
        words.insert(int(rng.integers(len(words) + 1, 1)[0]) if chances[6] < 0.3 else 0, rng.choice(FILLERS))
        sentence = " ".join(words)
    return " ".join(sentence.split()), stated


def _pair(facts: Sequence[int], phrase: str, rng: CounterRandom, coloured: bool) -> tuple[str, list[int]]:
    other = rng.choice(SUBJECTS[facts[SECOND]].names)
    stated = [UNSTATED] * FACTS
    stated[SUBJECT], stated[SECOND] = facts[SUBJECT], facts[SECOND]
    if coloured:
        stated[INK], stated[SECOND_INK] = facts[INK], facts[SECOND_INK]
        phrase, other = _coloured(phrase, COLOUR_NAMES[facts[INK]]), _coloured(other, COLOUR_NAMES[facts[SECOND_INK]])
    return rng.choice((f"{phrase} left of {other}", f"{other} right of {phrase}", f"{phrase} and {other}")), stated


def _coloured(phrase: str, colour: str) -> str:
    """Inserts a colour: 'a star' becomes 'a red star'; without an article, the colour comes first."""
    article, _, rest = phrase.partition(" ")
    if article in ("a", "an", "the") and rest:
        return f"{'a' if article == 'an' else article} {colour} {rest}"
    return f"{colour} {phrase}"
