"""What a file has that nobody reads: keys of a newer version, or misspelt ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel


class UnknownKeyWarning(UserWarning):
    """A file has keys that are left aside."""


def unknown_keys(said: Any, place: tuple[str, ...] = ()) -> Iterator[str]:
    """Where they stand, as arms.0.regimen; `said` was read by models that allow them."""
    if isinstance(said, BaseModel):
        yield from (".".join((*place, key)) for key in said.model_extra or ())
        for name in type(said).model_fields:
            yield from unknown_keys(getattr(said, name), (*place, name))
    elif isinstance(said, dict):
        for key, value in said.items():
            yield from unknown_keys(value, (*place, str(key)))
    elif isinstance(said, list | tuple):
        for number, value in enumerate(said):
            yield from unknown_keys(value, (*place, str(number)))
