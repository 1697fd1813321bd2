"""Captions of pictures: always true, usually incomplete, and worded in many ways."""

from __future__ import annotations

from collections.abc import Sequence

from kfacpack._random import CounterRandom
from tiny.subjects import COLOURS, PLACES, SUBJECTS

SUBJECT, INK, GROUND, PLACE, SECOND, SECOND_INK, MANY = range(7)
"""Indices of the facts of a picture. A caption states some of them; the others are UNTOLD."""
FACTS = 7
UNTOLD = -1

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


def caption(facts: Sequence[int], dice: CounterRandom) -> tuple[str, list[int]]:
    """Returns a random caption, and the facts that it states.

    Args:
        facts: The facts of the picture.
        dice: Source of random numbers.
    """
    told = [UNTOLD] * FACTS
    names = SUBJECTS[facts[SUBJECT]].names
    phrase = dice.choice(names)
    told[SUBJECT] = facts[SUBJECT]
    say = dice.uniform(8)
    if facts[SECOND] >= 0:
        phrase, told = _pair(facts, phrase, dice, say[0] < 0.5)
    else:
        if facts[MANY] == 1 and say[0] < 0.8:
            phrase, told[MANY] = f"{dice.choice(('many copies of', 'several times', 'a crowd of'))} {phrase}", 1
        if facts[INK] >= 0 and say[1] < 0.35:
            phrase, told[INK] = _coloured(phrase, COLOUR_NAMES[facts[INK]]), facts[INK]
        if facts[GROUND] >= 0 and say[2] < 0.25:
            ground = COLOUR_NAMES[facts[GROUND]]
            phrase, told[GROUND] = (
                phrase + dice.choice((f" on {ground}", f" on a {ground} background", f" and {ground}")),
                facts[GROUND],
            )
        if facts[PLACE] >= 0 and say[3] < 0.4:
            phrase, told[PLACE] = f"{phrase} {PLACE_NAMES[facts[PLACE]]}", facts[PLACE]
    sentence = dice.choice(FRAMES).format(phrase) if say[4] < 0.8 else phrase
    if say[5] < 0.25:
        words = sentence.split(" ")
        words.insert(int(dice.integers(len(words) + 1, 1)[0]) if say[6] < 0.3 else 0, dice.choice(FILLERS))
        sentence = " ".join(words)
    return " ".join(sentence.split()), told


def _pair(facts: Sequence[int], phrase: str, dice: CounterRandom, coloured: bool) -> tuple[str, list[int]]:
    other = dice.choice(SUBJECTS[facts[SECOND]].names)
    told = [UNTOLD] * FACTS
    told[SUBJECT], told[SECOND] = facts[SUBJECT], facts[SECOND]
    if coloured:
        told[INK], told[SECOND_INK] = facts[INK], facts[SECOND_INK]
        phrase, other = _coloured(phrase, COLOUR_NAMES[facts[INK]]), _coloured(other, COLOUR_NAMES[facts[SECOND_INK]])
    return dice.choice((f"{phrase} left of {other}", f"{other} right of {phrase}", f"{phrase} and {other}")), told


def _coloured(phrase: str, colour: str) -> str:
    """Inserts a colour: 'a star' becomes 'a red star'; without an article, the colour comes first."""
    article, _, rest = phrase.partition(" ")
    if article in ("a", "an", "the") and rest:
        return f"{'a' if article == 'an' else article} {colour} {rest}"
    return f"{colour} {phrase}"
