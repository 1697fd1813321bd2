"""How commands speak: tables to stdout, errors and progress to stderr, JSON to stdout alone.

What a person sees while a command works: a bar on a terminal's stderr, and nothing anywhere else.

What Ctrl-C means to long work.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kfacpack.errors import printable

if TYPE_CHECKING:
    from rich.progress import Task

    from kfacpack.training.metrics import Metrics


# Where nobody watches, lines may be long: a name that is broken in two cannot be searched for.
out = Console(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160)
err = Console(stderr=True, highlight=False)


def show_error(message: str) -> None:
    err.print(Text.assemble(("error: ", "bold red"), printable(message, longest=8000)), soft_wrap=True)


def show_note(message: str) -> None:
    err.print(Text(printable(message, longest=8000)), soft_wrap=True)


@contextmanager
def show_warnings(*kinds: type[Warning], show: bool) -> Iterator[None]:
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


def key_value_table(facts: Iterable[tuple[str, str]]) -> Table:
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


class SpeedColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f} examples/s" if task.speed else "")


@contextmanager
def _bar(
    name: str, *columns: ProgressColumn, show: bool, total: int | None = None, **fields: Any
) -> Iterator[Callable[..., None]]:
    """A bar with more columns beside what is done of how much; to be called with what has changed."""
    all_columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        *columns,
        TimeRemainingColumn(),
    )
    with Progress(*all_columns, console=err, transient=True, disable=not (show and err.is_terminal)) as bar:
        task = bar.add_task(printable(name), total=total, **fields)
        yield lambda **what: bar.update(task, **what)


@contextmanager
def examples_bar(name: str, *, show: bool) -> Iterator[Callable[[int, int], None]]:
    """To be told how many examples are done, and how many there are."""
    with _bar(name, SpeedColumn(), show=show) as update:
        yield lambda done, total: update(completed=done, total=total)


@contextmanager
def steps_bar(name: str, *, show: bool) -> Iterator[Callable[[int, int], None]]:
    """To be told how many steps are done, and how many there are."""
    with _bar(name, show=show) as update:
        yield lambda done, total: update(completed=done, total=total)


@contextmanager
def work_bar(name: str, *, show: bool) -> Iterator[Callable[[int, int, str], None]]:
    """To be told how much is done, how much there is, and what there is to say."""
    with _bar(name, TextColumn("{task.fields[words]}", markup=False), show=show, words="") as update:
        yield lambda done, total, words: update(completed=done, total=total, words=words)


@contextmanager
def checks_bar(name: str, *, show: bool) -> Iterator[Callable[[str, int, int], None]]:
    """To be told what is checked, how much of it is done, and how much there is."""
    with _bar(name, show=show) as update:
        yield lambda check, done, total: update(description=printable(f"{name}: {check}"), completed=done, total=total)


class TrainingProgress:
    """Hears of every step, and remembers the last."""

    def __init__(self, update: Callable[..., None]):
        self._update = update
        self.last: Metrics | None = None

    def __call__(self, metrics: Metrics, steps: int) -> None:
        self.last = metrics
        penalty = "" if metrics.penalty is None else f", penalty {metrics.penalty:.3g}"
        words = f"loss {metrics.loss:.3g}{penalty}, accuracy {metrics.accuracy:.0%}"
        self._update(completed=metrics.step, total=steps, words=words)


@contextmanager
def training_bar(name: str, steps: int, *, show: bool) -> Iterator[TrainingProgress]:
    words = TextColumn("{task.fields[words]}", markup=False)
    with _bar(name, words, show=show, total=steps, words="") as update:
        yield TrainingProgress(update)


def loading(name: str, *, show: bool) -> AbstractContextManager[Any]:
    return err.status(Text(f"loading {printable(name)}")) if show and err.is_terminal else nullcontext()


MIN_SECONDS = 1.0
"""Seconds between two requests: launchers pass on to their processes what the terminal has told these already."""


@contextmanager
def stop_on_interrupt(kept: str) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C, or a polite request to end, lets the batch at hand finish; the second one does not wait.

    Work that has stopped ends the command. `kept`: what is said of it then.
    """
    from kfacpack.estimation.resume import Interrupted

    asked: list[float] = []

    def ask(number: int, frame: object) -> None:
        now = time.monotonic()
        if asked and now - asked[0] > MIN_SECONDS:
            raise KeyboardInterrupt
        if asked:
            return
        asked.append(now)
        show_note("stopping after this batch; press Ctrl-C again to stop at once")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    except Interrupted as interruption:
        show_note(f"interrupted; {kept}")
        raise typer.Exit(130) from interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
