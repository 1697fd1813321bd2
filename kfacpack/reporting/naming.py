"""Names of files, from names that may be anything."""

from __future__ import annotations

import re


def file_name(figure: str, number: int, *names: str) -> str:
    """`figure-1-arm-task`: lower-case letters, digits and dashes, whatever the names are."""
    words = (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:24] for name in names)
    return "-".join((figure, str(number), *filter(None, words)))


def unlike(names: list[str]) -> list[str]:
    """The names, those that were there before with a number behind."""
    seen: dict[str, int] = {}
    made = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        made.append(name if seen[name] == 1 else f"{name}--{seen[name]}")
    return made
