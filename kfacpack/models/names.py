"""A name that nobody knows, answered with those it may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from kfacpack.errors import KfacpackError, printable


class UnknownModel(KfacpackError):  # noqa: N818 - named for what it is, as in "raise UnknownModel"
    """A name that is none of a library's."""


def unknown(library: str, name: str, known: Iterable[str]) -> UnknownModel:
    by_lower = {each.lower(): each for each in known}
    # OpenAI writes ViT-B/32, open_clip ViT-B-32.
    close = get_close_matches(name.lower().replace("/", "-"), by_lower, n=5, cutoff=0.5)
    meant = f"; close to it are {', '.join(by_lower[each] for each in close)}" if close else ""
    return UnknownModel(f"{printable(name)!r} is no model that {library} knows{meant}")
