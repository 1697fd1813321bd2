"""Names of files, from names that may be anything.

What a report consists of: sections of sentences, tables and figures, with every number as it was measured.

This is what report.json holds, and all that the page is made of.

Means over seeds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median, stdev
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from kfacpack.experiments.results_schema import DisentanglementResult, DriftPair, SeedResult, SweepResult
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
    """`figure-1-arm-task`: lower-case letters, digits and dashes, whatever the names are."""
    words = (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:24] for name in names)
    return "-".join((figure, str(number), *filter(None, words)))


def unique_name(names: list[str]) -> list[str]:
    """The names, those that were there before with a number behind."""
    seen: dict[str, int] = {}
    made = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        made.append(name if seen[name] == 1 else f"{name}--{seen[name]}")
    return made


CellKind = Literal["text", "code", "percent", "number", "score", "count", "bytes", "seconds"]
_SHOWN: dict[str, Callable[..., str]] = {
    "percent": format_percent,
    "number": format_number,
    "score": format_score,
    "count": format_count,
    "bytes": human_bytes,
    "seconds": human_seconds,
}


class ReportModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Cell(ReportModel):
    """A value, and how it is shown; `std` is its standard deviation over seeds."""

    kind: CellKind
    value: int | float | str | None
    std: float | None = None

    @property
    def shown(self) -> str:
        if self.value is None:
            return MISSING
        if isinstance(self.value, str):
            return self.value
        spread = () if self.std is None else (self.std,)
        return _SHOWN[self.kind](self.value, *spread).replace("-", "−", 1 if self.value < 0 else 0)


class ReportTable(ReportModel):
    caption: str
    columns: list[str]
    rows: list[list[Cell]]
    folded: bool = False
    last_is_mean: bool = False


class ReportFigure(ReportModel):
    """`figure` is a name in FIGURES, `data` and `options` what it is given; `file` its name without an ending."""

    file: str
    figure: str
    data: Any
    options: dict[str, Any] = {}
    alt: str
    caption: str


class CodeListing(ReportModel):
    """Text to be shown as it is: commands, a plan."""

    caption: str
    text: str


class Section(ReportModel):
    id: str
    title: str
    how_to_read: str
    tables: list[ReportTable] = []
    pictures: list[ReportFigure] = []
    listings: list[CodeListing] = []


class ReportContent(ReportModel):
    format: Literal["kfacpack.report/1"] = "kfacpack.report/1"
    title: str
    headline: list[Cell]
    """Words and numbers in turn: one sentence."""
    sections: list[Section]


def text(value: str | None) -> Cell:
    return Cell(kind="text", value=value)


def over_seeds(kind: CellKind, values: Iterable[float | None]) -> Cell:
    """Their mean and, of several, the standard deviation; those that are missing are left out."""
    found = [value for value in values if value is not None]
    if not found:
        return Cell(kind=kind, value=None)
    return Cell(kind=kind, value=fmean(found), std=stdev(found) if len(found) > 1 else None)


def mean_sweep(seeds: Sequence[SeedResult]) -> SweepResult | None:
    sweeps = [seed.sweep for seed in seeds if seed.sweep]
    if not sweeps:
        return None
    tasks = {task: _means([each.tasks[task] for each in sweeps]) for task in sweeps[0].tasks}
    return SweepResult(alphas=sweeps[0].alphas, tasks=tasks, mean=_means([each.mean for each in sweeps]))


def mean_maps(seeds: Sequence[SeedResult]) -> list[tuple[DisentanglementResult, int]]:
    """ξ of each pair, the mean over the seeds that have it at the same α, and how many these are."""
    groups: dict[tuple[object, ...], list[DisentanglementResult]] = {}
    for seed in seeds:
        for each in seed.disentanglement or []:
            groups.setdefault((each.tasks, tuple(each.alphas)), []).append(each)
    made = []
    for group in groups.values():
        xi = [_means(rows) for rows in zip(*(each.xi for each in group), strict=True)]
        made.append((group[0].model_copy(update={"xi": xi}), len(group)))
    return made


def ratios(pairs: Iterable[DriftPair]) -> tuple[Cell, Cell]:
    """Of predicted to measured: the median, and the share that is within a factor of two."""
    found = [pair.predicted / pair.measured for pair in pairs if pair.measured > 0]
    if not found:
        return Cell(kind="number", value=None), Cell(kind="percent", value=None)
    near = sum(0.5 <= ratio <= 2 for ratio in found) / len(found)
    return Cell(kind="number", value=median(found)), Cell(kind="percent", value=near)


def _means(columns: Sequence[Sequence[float]]) -> list[float]:
    return [fmean(values) for values in zip(*columns, strict=True)]
