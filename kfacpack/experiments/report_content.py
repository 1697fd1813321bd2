"""The content of a report: sections with text, tables and figures, and all numbers at full precision.

The HTML page is rendered from this content, and the JSON file beside the page stores it. The module also contains
helpers that average over seeds and build file names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median, stdev
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from kfacpack.experiments.results_schema import AddedResult, DisentanglementResult, DriftPair, SeedResult, SweepResult
from kfacpack.format.units import (
    MISSING,
    format_count,
    format_number,
    format_percent,
    format_score,
    human_bytes,
    human_seconds,
)


def file_name(figure: str, number: int, *names: str) -> str:
    """Returns a file name such as `figure-1-arm-task`, which consists of lower-case letters, digits and dashes."""
    words = (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:24] for name in names)
    return "-".join((figure, str(number), *filter(None, words)))


def unique_names(names: list[str]) -> list[str]:
    """Makes names unique by appending a number to repeated names."""
    counts: dict[str, int] = {}
    unique = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        unique.append(name if counts[name] == 1 else f"{name}--{counts[name]}")
    return unique


CellKind = Literal["text", "code", "percent", "number", "score", "count", "bytes", "seconds"]
_FORMATTERS: dict[str, Callable[..., str]] = {
    "percent": format_percent,
    "number": format_number,
    "score": format_score,
    "count": format_count,
    "bytes": human_bytes,
    "seconds": human_seconds,
}


class ReportModel(BaseModel):
    """Base class for the parts of a report. Instances are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Cell(ReportModel):
    """A value in a table or a sentence, with the format in which it is shown."""

    kind: CellKind
    value: int | float | str | None
    std: float | None = None
    """Standard deviation of the value over seeds."""

    @property
    def shown(self) -> str:
        """The value as it is shown on the page."""
        if self.value is None:
            return MISSING
        if isinstance(self.value, str):
            return self.value
        spread = () if self.std is None else (self.std,)
        return _FORMATTERS[self.kind](self.value, *spread).replace("-", "−", 1 if self.value < 0 else 0)


class ReportTable(ReportModel):
    """A table. The first cell of each row is the heading of the row."""

    caption: str
    columns: list[str]
    rows: list[list[Cell]]
    folded: bool = False
    """Whether the table is collapsed until the reader opens it."""
    last_is_mean: bool = False
    """Whether the last row contains the means of the other rows."""


class ReportFigure(ReportModel):
    """A figure: its data, its drawing function and its description."""

    file: str
    """Name of the file without suffix."""
    figure: str
    """Name of the drawing function in `FIGURES`."""
    data: Any
    """First argument of the drawing function."""
    options: dict[str, Any] = {}
    """Keyword arguments of the drawing function."""
    alt: str
    caption: str


class CodeListing(ReportModel):
    """Text shown verbatim, such as commands or a plan."""

    caption: str
    text: str


class Section(ReportModel):
    """A section of the page, with an explanation, tables, figures and listings."""

    id: str
    title: str
    how_to_read: str
    """Text that explains the tables and figures of the section."""
    tables: list[ReportTable] = []
    pictures: list[ReportFigure] = []
    listings: list[CodeListing] = []


class ReportContent(ReportModel):
    """The content of a report, which is also stored in its JSON file."""

    format: Literal["kfacpack.report/1"] = "kfacpack.report/1"
    title: str
    headline: list[Cell]
    """The conclusion, as a list of cells that contain text or numbers."""
    sections: list[Section]


def text(value: str | None) -> Cell:
    """Returns a cell that shows text."""
    return Cell(kind="text", value=value)


def joined_text(cells: Sequence[Cell]) -> str:
    """Joins cells with text and numbers into sentences, without a space before punctuation."""
    spaces = ("" if cell.shown[0] in ".,;:" else " " for cell in cells)
    return "".join(space + cell.shown for space, cell in zip(spaces, cells, strict=True)).strip()


def over_seeds(kind: CellKind, values: Iterable[float | None]) -> Cell:
    """Returns a cell with the mean and, if there are several values, the standard deviation. Ignores None values."""
    present = [value for value in values if value is not None]
    if not present:
        return Cell(kind=kind, value=None)
    return Cell(kind=kind, value=fmean(present), std=stdev(present) if len(present) > 1 else None)


def mean_sweep(seeds: Sequence[SeedResult | AddedResult]) -> SweepResult | None:
    """Averages the sweeps of an arm or merge method over seeds, or returns None if there are no sweeps."""
    sweeps = [seed.sweep for seed in seeds if seed.sweep]
    if not sweeps:
        return None
    tasks = {task: _means([sweep.tasks[task] for sweep in sweeps]) for task in sweeps[0].tasks}
    return SweepResult(alphas=sweeps[0].alphas, tasks=tasks, mean=_means([sweep.mean for sweep in sweeps]))


def mean_maps(seeds: Sequence[SeedResult]) -> list[tuple[DisentanglementResult, int]]:
    """Averages ξ over seeds, separately for each pair of tasks and each list of values of α.

    Returns:
        For each pair and list, the averaged result and the number of seeds.
    """
    groups: dict[tuple[object, ...], list[DisentanglementResult]] = {}
    for seed in seeds:
        for result in seed.disentanglement or []:
            groups.setdefault((result.tasks, tuple(result.alphas)), []).append(result)
    averaged = []
    for group in groups.values():
        xi = [_means(rows) for rows in zip(*(result.xi for result in group), strict=True)]
        averaged.append((group[0].model_copy(update={"xi": xi}), len(group)))
    return averaged


def ratios(pairs: Iterable[DriftPair]) -> tuple[Cell, Cell]:
    """Returns the median ratio of predicted to measured drift, and the share of ratios between 1/2 and 2."""
    quotients = [pair.predicted / pair.measured for pair in pairs if pair.measured > 0]
    if not quotients:
        return Cell(kind="number", value=None), Cell(kind="percent", value=None)
    near = sum(0.5 <= quotient <= 2 for quotient in quotients) / len(quotients)
    return Cell(kind="number", value=median(quotients)), Cell(kind="percent", value=near)


def _means(columns: Sequence[Sequence[float]]) -> list[float]:
    return [fmean(values) for values in zip(*columns, strict=True)]
