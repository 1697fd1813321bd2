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

    from kfacpack.training.metrics import Metrics


class Speed(ProgressColumn):
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
    with _bar(name, Speed(), show=show) as update:
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
