"""How `kfacpack eval` shows accuracies: tables for a terminal, rows for a spreadsheet.

Where `kfacpack eval` has exams taken, in every way it can be asked to.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from kfacpack.errors import printable
from kfacpack.format.writer import write_atomically

from .console import examples_bar, out, percent
from .options import HeadKind

if TYPE_CHECKING:
    from kfacpack.evaluation.accuracy import EvaluationSet, Score
    from kfacpack.models.heads import Head
    from kfacpack.models.model import Model
    from kfacpack.tasks.task import Task
    from kfacpack.vectors.task_vector import TaskVector


COLUMNS = ("task", "split", "alpha", "accuracy", "normalized", "examples", "head")
WIDTH, WIDEST = 80, 12

Result = Mapping[str, Any]
"""As `kfacpack.evaluation.sweep.evaluation_result` makes it."""


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
    write_atomically(path, table.getvalue().encode())


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


@dataclass(frozen=True)
class EvaluationOutput:
    """What was measured, in every form it may be asked for."""

    as_json: dict[str, Any]
    rows: list[list[Any]]
    print: Callable[[], None]


@dataclass(frozen=True)
class Evaluator:
    """Where exams are taken: a model that is loaded once, whatever vectors come and go."""

    model: Model
    kind: HeadKind
    batch_size: int
    show: bool

    def head(self, task: Task, vector: TaskVector | None) -> Head:
        """Of the kind that was asked for; if none was, the vector's own."""
        from kfacpack.evaluation.accuracy import vector_head
        from kfacpack.models.heads import head_for

        if self.kind == "auto" and (own := vector_head(task, vector)):
            return own
        with examples_bar(f"{task.name}: head", show=self.show) as advance:
            return head_for(self.model, task, self.kind, batch_size=self.batch_size, on_progress=advance)

    def accuracies(
        self, known: Mapping[str, float | TaskVector], exams: Mapping[str, EvaluationSet]
    ) -> dict[str, float]:
        """Of the individual vectors, on the same examples at α = 1."""
        return {
            name: found
            if isinstance(found, float)
            else self._scores(f"{name} alone", self.head(exams[name].task, found), exams[name], found, [1.0])[
                0
            ].accuracy
            for name, found in known.items()
        }

    def sweep(
        self,
        heads: Mapping[str, Head],
        exams: Mapping[str, EvaluationSet],
        vector: TaskVector | None,
        alphas: Sequence[float],
        individual: Mapping[str, float],
        split: str,
    ) -> EvaluationOutput:
        """Every task at every α."""
        from kfacpack.evaluation.sweep import best

        found = {name: self._scores(name, heads[name], exam, vector, alphas) for name, exam in exams.items()}
        told = _as_results(found, individual, heads)
        lines = _rows(told, split, alphas if vector else [None])
        if len(alphas) == 1:
            return EvaluationOutput(told[0], lines, lambda: print_result(told[0]))
        where = best(alphas, list(found.values()))
        largest = {"alpha": alphas[where], "split": split, "mean": told[where]["mean"]}
        return EvaluationOutput(
            {"sweep": _by_alpha(told, alphas), "best": largest}, lines, lambda: print_sweep(alphas, told, where, split)
        )

    def choice(
        self,
        heads: Mapping[str, Head],
        validation: Mapping[str, EvaluationSet],
        test: Mapping[str, EvaluationSet],
        vector: TaskVector,
        alphas: Sequence[float],
        individual: Mapping[str, float],
    ) -> EvaluationOutput:
        from kfacpack.evaluation.sweep import SelectionTask, choose_alpha, evaluation_result, mean

        subjects = [SelectionTask(heads[name], validation[name], test[name]) for name in test]
        with examples_bar("choosing α", show=self.show) as advance:
            made = choose_alpha(self.model, subjects, vector, alphas, batch_size=self.batch_size, on_progress=advance)
        before = _as_results(made.validation, {}, heads)
        after = evaluation_result(made.test, individual, {name: each.origin for name, each in heads.items()})
        at = alphas.index(made.alpha)
        best = {
            "alpha": made.alpha,
            "validation": before[at]["mean"]["accuracy"],
            "test": mean(list(made.test.values())),
        }

        def show() -> None:
            words = f"α = {made.alpha:g}, chosen from {len(alphas)} on validation: {percent(best['validation'])} there"
            out.print(Text(f"{words}; on test:"))
            print_result(after)

        lines = [*_rows(before, "validation", alphas), *rows(after, "test", made.alpha)]
        return EvaluationOutput(
            {**after, "best": best, "validation": {"sweep": _by_alpha(before, alphas)}}, lines, show
        )

    def negation(
        self,
        heads: Mapping[str, Head],
        validation: Mapping[str, EvaluationSet],
        test: Mapping[str, EvaluationSet],
        vector: TaskVector,
        alphas: Sequence[float],
        keep: float,
    ) -> EvaluationOutput:
        """The control is the last of the tasks."""
        from kfacpack.evaluation.negation import negate
        from kfacpack.evaluation.sweep import SelectionTask

        *targets, control = (SelectionTask(heads[name], validation[name], test[name]) for name in test)
        with examples_bar("choosing α", show=self.show) as advance:
            found = negate(
                self.model,
                targets,
                control,
                vector,
                alphas,
                keep=keep,
                batch_size=self.batch_size,
                on_progress=advance,
            )
        lines: list[list[Any]] = []
        for each in [*targets, control]:
            entry = found["tasks"].get(each.name) or next(iter(found["tasks"].values()))
            keys = ("before", "accuracy") if each is not control else ("control_before", "control")
            for key, alpha in zip(keys, (0.0, 0.0 - entry["alpha"]), strict=True):
                lines.append([each.name, "test", alpha, entry[key], None, len(each.test.numbers), each.head.origin])
        return EvaluationOutput({"negation": found}, lines, lambda: print_negation(found))

    def _scores(
        self, words: str, head: Head, exam: EvaluationSet, vector: TaskVector | None, alphas: Sequence[float]
    ) -> list[Score]:
        from kfacpack.evaluation.accuracy import scores

        with examples_bar(words, show=self.show) as advance:
            return scores(self.model, head, exam, vector, alphas, batch_size=self.batch_size, on_progress=advance)


def _as_results(
    found: Mapping[str, Sequence[Score]], individual: Mapping[str, float], heads: Mapping[str, Head]
) -> list[dict[str, Any]]:
    """The result at each α, from each task's scores at every one of them."""
    from kfacpack.evaluation.sweep import evaluation_result

    origins = {name: each.origin for name, each in heads.items()}
    count = len(next(iter(found.values())))
    return [
        evaluation_result({name: each[k] for name, each in found.items()}, individual, origins) for k in range(count)
    ]


def _by_alpha(told: Sequence[dict[str, Any]], alphas: Sequence[float]) -> list[dict[str, Any]]:
    """The results at each α, as JSON."""
    return [{"alpha": alpha, **each} for alpha, each in zip(alphas, told, strict=True)]


def _rows(told: Sequence[dict[str, Any]], split: str, alphas: Sequence[float | None]) -> list[list[Any]]:
    """The same as rows for a spreadsheet."""
    return [row for alpha, each in zip(alphas, told, strict=True) for row in rows(each, split, alpha)]
