"""What a report consists of: sections of sentences, tables and figures, with every number as it was measured.

This is what report.json holds, and all that the page is made of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from kfacpack.reporting.numbers import NOTHING, count, human_bytes, human_seconds, percent, plain, score

Kind = Literal["text", "code", "percent", "number", "score", "count", "bytes", "seconds"]
_SHOWN: dict[str, Callable[..., str]] = {
    "percent": percent,
    "number": plain,
    "score": score,
    "count": count,
    "bytes": human_bytes,
    "seconds": human_seconds,
}


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Cell(Part):
    """A value, and how it is shown; `std` is its standard deviation over seeds."""

    kind: Kind
    value: int | float | str | None
    std: float | None = None

    @property
    def shown(self) -> str:
        if self.value is None:
            return NOTHING
        if isinstance(self.value, str):
            return self.value
        spread = () if self.std is None else (self.std,)
        return _SHOWN[self.kind](self.value, *spread).replace("-", "−", 1 if self.value < 0 else 0)


class Table(Part):
    caption: str
    columns: list[str]
    rows: list[list[Cell]]
    folded: bool = False
    last_is_mean: bool = False


class Picture(Part):
    """`figure` is a name in FIGURES, `data` and `options` what it is given; `file` its name without an ending."""

    file: str
    figure: str
    data: Any
    options: dict[str, Any] = {}
    alt: str
    caption: str


class Listing(Part):
    """Text to be shown as it is: commands, a plan."""

    caption: str
    text: str


class Section(Part):
    id: str
    title: str
    how_to_read: str
    tables: list[Table] = []
    pictures: list[Picture] = []
    listings: list[Listing] = []


class Report(Part):
    format: Literal["kfacpack.report/1"] = "kfacpack.report/1"
    title: str
    headline: list[Cell]
    """Words and numbers in turn: one sentence."""
    sections: list[Section]


def text(value: str | None) -> Cell:
    return Cell(kind="text", value=value)
