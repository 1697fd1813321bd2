"""Console output of the commands.

Results are printed to stdout, errors and progress bars to stderr. With --json, stdout contains only the JSON value.
Progress bars are drawn only if stderr is a terminal. `stop_on_interrupt` stops long operations cleanly on Ctrl-C.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TextIO

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from kfacpack.errors import printable

if TYPE_CHECKING:
    from rich.progress import Task

    from kfacpack.training.metrics import Metrics


# If stdout is not a terminal, tables are wider, so that names are not split over two lines.
out = Console(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160)
err = Console(stderr=True, highlight=False)


def show_error(message: str) -> None:
    """Prints an error to stderr."""
    err.print(Text.assemble(("error: ", "bold red"), printable(message, max_length=8000)), soft_wrap=True)


def show_note(message: str) -> None:
    """Prints a note or warning to stderr."""
    err.print(Text(printable(message, max_length=8000)), soft_wrap=True)


@contextmanager
def show_warnings(*kinds: type[Warning], show: bool) -> Iterator[None]:
    """Prints warnings of the given classes with `show_note` instead of Python's default format.

    Args:
        *kinds: Warning classes. Other warnings are handled as usual.
        show: If False, warnings of these classes are suppressed.
    """
    with warnings.catch_warnings():
        for kind in kinds:
            warnings.simplefilter("always", kind)
        default_showwarning = warnings.showwarning

        def showwarning(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if not issubclass(category, kinds):
                default_showwarning(message, category, filename, lineno, file, line)
            elif show:
                show_note(f"warning: {message}")

        warnings.showwarning = showwarning
        yield


def print_line(text: str, *, style: str = "") -> None:
    """Prints one line to stdout without wrapping it."""
    out.print(Text(printable(text, max_length=8000), style=style), soft_wrap=True)


def print_next(*words: object) -> None:
    """Prints the command that users usually run next, for example `next: kfacpack train --reg merged.kfac`.

    Args:
        *words: Arguments of `kfacpack`; they are quoted for the shell where necessary.
    """
    print_line(f"next: kfacpack {shlex.join(map(str, words))}", style="dim")


def plain_table(*headings: str, numbers: Sequence[str] = ()) -> Table:
    """Returns a table without borders.

    Args:
        *headings: Headings of the left-aligned columns.
        numbers: Headings of the right-aligned columns, which come after the left-aligned ones.
    """
    table = Table(*headings, box=None, header_style="bold", pad_edge=False)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def name_cell(name: str) -> Text:
    """Returns a table cell for a name that comes from a file or the user. Long names are wrapped, not truncated."""
    return Text(printable(name), overflow="fold")


def key_value_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Returns a table of labels and values."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold cyan")
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(label, Text(printable(value, max_length=8000)))
    return table


def percent(share: float | None) -> str:
    """Formats a fraction as a percentage: 0.9312 becomes '93.1%', and None becomes ''."""
    return "" if share is None else f"{share:.1%}"


def print_json(value: Any) -> None:
    """Prints a value as JSON to stdout."""
    print(json.dumps(value, indent=2))


class SpeedColumn(ProgressColumn):
    """Progress bar column that shows the number of examples per second."""

    def render(self, task: Task) -> Text:
        """Returns the text of the column for one progress bar."""
        return Text(f"{task.speed:.1f} examples/s" if task.speed else "")


@contextmanager
def _bar(
    name: str, *columns: ProgressColumn, show: bool, total: int | None = None, **fields: Any
) -> Iterator[Callable[..., None]]:
    """Draws a progress bar with extra columns. Yields a function that passes its arguments on to `Progress.update`."""
    if not (show and err.is_terminal):
        # In rich 13.7, a disabled Progress prints an empty line.
        yield lambda **changes: None
        return
    all_columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        *columns,
        TimeRemainingColumn(),
    )
    with Progress(*all_columns, console=err, transient=True) as bar:
        task = bar.add_task(printable(name), total=total, **fields)
        yield lambda **changes: bar.update(task, **changes)


@contextmanager
def examples_bar(name: str, *, show: bool) -> Iterator[Callable[[int, int], None]]:
    """Draws a progress bar with the number of examples per second; yields `update(done, total)`."""
    with _bar(name, SpeedColumn(), show=show) as update:
        yield lambda done, total: update(completed=done, total=total)


@contextmanager
def steps_bar(name: str, *, show: bool) -> Iterator[Callable[[int, int], None]]:
    """Draws a progress bar; yields `update(done, total)`."""
    with _bar(name, show=show) as update:
        yield lambda done, total: update(completed=done, total=total)


@contextmanager
def work_bar(name: str, *, show: bool) -> Iterator[Callable[[int, int, str], None]]:
    """Draws a progress bar with a status message; yields `update(done, total, status)`."""
    with _bar(name, TextColumn("{task.fields[status]}", markup=False), show=show, status="") as update:
        yield lambda done, total, status: update(completed=done, total=total, status=status)


class StageRows:
    """Progress display for a plan: one bar for all stages, and one bar for each running stage.

    Args:
        costs: The relative cost of each pending stage, by key.
        total: Total number of stages, finished and pending.
        show: Whether to draw the bars. They are drawn only if stderr is a terminal.
    """

    def __init__(self, costs: Mapping[str, float], total: int, *, show: bool):
        self._costs = costs
        self._total = total
        self._done = total - len(costs)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}", markup=False),
        )
        self._bars = Progress(*columns, console=err, transient=True) if show and err.is_terminal else None

    def __enter__(self) -> StageRows:
        if self._bars:
            self._bars.start()
            self._all = self._bars.add_task(self._title, total=sum(self._costs.values()), status="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars:
            self._bars.stop()

    @property
    def _title(self) -> str:
        return f"{self._done}/{self._total} stages"

    @contextmanager
    def row(self, name: str, key: str) -> Iterator[Callable[[int, int, str], None]]:
        """Draws the bar for a stage; yields `update(done, total, status)`."""
        if not self._bars:
            yield lambda done, total, status: None
            return
        bars, cost = self._bars, self._costs.get(key, 0.0)
        row, before = bars.add_task(printable(name), total=None, status=""), [0.0]

        def update(done: int, total: int, status: str) -> None:
            bars.update(row, completed=done, total=total, status=printable(status))
            share = cost * done / max(total, 1)
            bars.advance(self._all, max(0.0, share - before[0]))
            before[0] = max(before[0], share)

        try:
            yield update
        except BaseException:
            bars.update(self._all, advance=-before[0])  # the stage will be computed again
            raise
        else:
            self._done += 1
            bars.update(self._all, advance=cost - before[0], description=self._title)
        finally:
            bars.remove_task(row)


@contextmanager
def checks_bar(name: str, *, show: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Draws a progress bar with the name of the current check; yields `update(check, done, total)`."""
    with _bar(name, show=show) as update:
        yield lambda check, done, total: update(description=printable(f"{name}: {check}"), completed=done, total=total)


class TrainingProgress:
    """Progress callback for a training run; `last` contains the metrics of the latest step."""

    def __init__(self, update: Callable[..., None]):
        self._update = update
        self.last: Metrics | None = None

    def __call__(self, metrics: Metrics, steps: int) -> None:
        """Updates the bar after a step."""
        self.last = metrics
        penalty = "" if metrics.penalty is None else f", penalty {metrics.penalty:.3g}"
        status = f"loss {metrics.loss:.3g}{penalty}, accuracy {metrics.accuracy:.0%}"
        self._update(completed=metrics.step, total=steps, status=status)


@contextmanager
def training_bar(name: str, steps: int, *, show: bool) -> Iterator[TrainingProgress]:
    """Draws a progress bar with loss, penalty and accuracy; yields the progress callback."""
    status = TextColumn("{task.fields[status]}", markup=False)
    with _bar(name, status, show=show, total=steps, status="") as update:
        yield TrainingProgress(update)


def loading(name: str, *, show: bool) -> AbstractContextManager[Any]:
    """Returns a context manager that shows a spinner while a model or a task is loaded."""
    return err.status(Text(f"loading {printable(name)}")) if show and err.is_terminal else nullcontext()


SIGNAL_INTERVAL = 1.0
"""Time in seconds after the first signal during which further signals are ignored. On Ctrl-C, a process may receive
one signal from the terminal and another from its launcher."""


@contextmanager
def stop_on_interrupt(message: str) -> Iterator[Callable[[], bool]]:
    """Context manager that handles interruptions of a long operation.

    After the first Ctrl-C or SIGTERM, the operation finishes the current batch. A second signal ends it immediately.

    Args:
        message: Text to print after "interrupted; " when the operation has stopped.

    Yields:
        A function that returns whether a stop was requested.

    Raises:
        typer.Exit: With exit code 130, if the operation raises `Interrupted`.
    """
    from kfacpack.estimation.resume import Interrupted

    requests: list[float] = []

    def request_stop(number: int, frame: object) -> None:
        now = time.monotonic()
        if requests and now - requests[0] > SIGNAL_INTERVAL:
            raise KeyboardInterrupt
        if requests:
            return
        requests.append(now)
        show_note("stopping after this batch; press Ctrl-C again to stop immediately")

    previous = {number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(requests)
    except Interrupted as interruption:
        show_note(f"interrupted; {message}")
        raise typer.Exit(130) from interruption
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
