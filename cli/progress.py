"""What a person sees while a command works: a bar on a terminal's stderr, and nothing anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from kfacpack.errors import printable

from .console import err

if TYPE_CHECKING:
    from rich.progress import Task


class Speed(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f} examples/s" if task.speed else "")


@contextmanager
def examples_bar(name: str, *, show: bool) -> Iterator[Callable[[int, int], None]]:
    """To be told how many examples are done, and how many there are."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        Speed(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not (show and err.is_terminal)) as bar:
        task = bar.add_task(printable(name), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def steps_bar(name: str, *, show: bool) -> Iterator[Callable[[int, int], None]]:
    """To be told how many steps are done, and how many there are."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not (show and err.is_terminal)) as bar:
        task = bar.add_task(printable(name), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def loading(name: str, *, show: bool) -> AbstractContextManager[Any]:
    return err.status(Text(f"loading {printable(name)}")) if show and err.is_terminal else nullcontext()
