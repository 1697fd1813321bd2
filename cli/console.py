"""How commands speak: tables to stdout, errors and progress to stderr, JSON to stdout alone."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kfacpack.errors import printable
from kfacpack.reporting.numbers import human_bytes as human_bytes
from kfacpack.reporting.numbers import human_seconds as human_seconds

# Where nobody watches, lines may be long: a name that is broken in two cannot be searched for.
out = Console(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160)
err = Console(stderr=True, highlight=False)


def show_error(message: str) -> None:
    err.print(Text.assemble(("error: ", "bold red"), printable(message, longest=8000)), soft_wrap=True)


def show_note(message: str) -> None:
    err.print(Text(printable(message, longest=8000)), soft_wrap=True)


@contextmanager
def noting(*kinds: type[Warning], show: bool) -> Iterator[None]:
    """The library's warnings of these kinds become notes, or nothing where none are to be shown."""
    with warnings.catch_warnings():
        for kind in kinds:
            warnings.simplefilter("always", kind)
        otherwise = warnings.showwarning

        def showwarning(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if not issubclass(category, kinds):
                otherwise(message, category, filename, lineno, file, line)
            elif show:
                show_note(f"warning: {message}")

        warnings.showwarning = showwarning
        yield


def facts_table(facts: Iterable[tuple[str, str]]) -> Table:
    """Labels, and what they stand for."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold cyan")
    table.add_column(overflow="fold")
    for label, value in facts:
        table.add_row(label, Text(printable(value, longest=8000)))
    return table


def percent(share: float | None) -> str:
    """0.9312 -> '93.1%'; nothing for what is not known."""
    return "" if share is None else f"{share:.1%}"


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))
