"""From names of classes as data sets store them to words that can stand in a sentence."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

Words = Callable[[Sequence[str]], tuple[str, ...]]


def plain(stored: Sequence[str]) -> tuple[str, ...]:
    """As they are, but for what folders have in the place of a space: baseball_diamond, /c/church/outdoor."""
    return tuple(map(_plain, stored))


def _plain(name: str) -> str:
    folder = re.fullmatch(r"/[a-z]/(.+)", name)
    return (folder[1].replace("/", " ") if folder else name).replace("_", " ")


def looked_up(known: Mapping[str, str]) -> Words:
    """By a table; capitals, spaces and signs do not matter. What is not in it is left as it is."""
    table = {_letters(name): words for name, words in known.items()}
    return lambda stored: tuple(table.get(_letters(name)) or _plain(name) for name in stored)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
