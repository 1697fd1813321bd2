"""How `kfacpack eval` shows accuracies: tables for a terminal, rows for a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from kfacpack.errors import printable
from kfacpack.running.files import write_whole

from .console import out, percent

COLUMNS = ("task", "split", "alpha", "accuracy", "normalized", "examples", "head")
WIDTH, WIDEST = 80, 12

Result = Mapping[str, Any]
"""As `kfacpack.evaluation.results.result` makes it."""


def print_result(found: Result) -> None:
    with_normalized = any(each["normalized"] is not None for each in found["tasks"].values())
    table = Table("task", box=None, header_style="bold", pad_edge=False)
    for heading in ("accuracy", *(["normalised"] if with_normalized else []), "examples"):
        table.add_column(heading, justify="right")
    table.add_column("head")
    for name, each in found["tasks"].items():
        shares = [percent(each["accuracy"]), *([percent(each["normalized"])] if with_normalized else [])]
        table.add_row(_name(name), *shares, f"{each['examples']:,}", each["head"])
    if len(found["tasks"]) > 1:
        mean = found["mean"]
        shares = [percent(mean["accuracy"]), *([percent(mean["normalized"])] if with_normalized else [])]
        table.add_row("mean", *shares, style="bold")
    out.print(table)


def print_sweep(alphas: Sequence[float], found: Sequence[Result], best: int, split: str) -> None:
    """A row for each α, a column for each task; of more tasks than a line has room for, one table after the other."""
    for tasks in _side_by_side(list(found[0]["tasks"])):
        last = tasks[-1] == list(found[0]["tasks"])[-1]
        means = _means(found) if last and (len(found[0]["tasks"]) > 1 or _is_normalized(found)) else {}
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("α", justify="right")
        for name in [*map(_name, tasks), *map(Text, means)]:
            table.add_column(name, justify="right", max_width=WIDEST, overflow="fold")
        table.add_column("")
        for k, alpha in enumerate(alphas):
            cells = [percent(found[k]["tasks"][task]["accuracy"]) for task in tasks]
            cells += [percent(found[k]["mean"][key]) for key in means.values()]
            table.add_row(f"{alpha:g}", *cells, "← best" if k == best else "", style="bold" if k == best else None)
        out.print(table)
    out.print(Text(f"best: of the {printable(split)} split; --choose finds α on validation instead", style="dim"))


def print_negation(found: Mapping[str, Any]) -> None:
    table = Table("task", box=None, header_style="bold", pad_edge=False)
    for heading in ("before", "after"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for name, each in found["tasks"].items():
        removed = each["removed"]
        words = "not above chance before" if removed is None else f"{removed:.0%} of the margin over chance removed"
        table.add_row(_name(name), percent(each["before"]), percent(each["accuracy"]), words)
    first = next(iter(found["tasks"].values()))
    before, after = first["control_before"], first["control"]
    kept = f"control, {after / before:.0%} of its accuracy kept" if before else "control"
    table.add_row(_name(found["control"]), percent(before), percent(after), kept)
    out.print(Text(f"−{first['alpha']:g} τ, chosen on validation: the control keeps {found['keep']:.0%} there"))
    out.print(table)
    if not first["alpha"]:
        out.print(Text("no α above zero takes anything away while the control keeps that much", style="dim"))


def rows(found: Result, split: str, alpha: float | None) -> Iterator[list[Any]]:
    """A row of COLUMNS for each task."""
    for name, each in found["tasks"].items():
        yield [name, split, alpha, each["accuracy"], each["normalized"], each["examples"], each["head"]]


def write_csv(path: Path, lines: Iterable[Sequence[Any]]) -> None:
    table = io.StringIO(newline="")
    csv.writer(table, lineterminator="\n").writerows([COLUMNS, *lines])
    write_whole(path, table.getvalue().encode())


def _means(found: Sequence[Result]) -> dict[str, str]:
    """Heading -> key."""
    return {"mean": "accuracy", **({"normalised": "normalized"} if _is_normalized(found) else {})}


def _is_normalized(found: Sequence[Result]) -> bool:
    return found[0]["mean"]["normalized"] is not None


def _side_by_side(names: Sequence[str]) -> list[list[str]]:
    """Tasks that fit into one line, with α, means and the mark."""
    tables: list[list[str]] = [[]]
    room = free = WIDTH - len("-0.05 100.0% normalised ← best ")
    for name in names:
        width = 1 + min(max(len(name), len("100.0%")), WIDEST)
        if tables[-1] and width > room:
            tables.append([])
            room = free
        tables[-1].append(name)
        room -= width
    return tables


def _name(name: str) -> Text:
    return Text(printable(name), overflow="fold")
