"""Evaluation modes of `kfacpack eval`, and their output as tables and CSV.

The modes are evaluation at a single α, a sweep over α, selection of α on the validation split, and negation.
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
from kfacpack.format.vector_manifest import HeadKind
from kfacpack.format.writer import write_atomically

from .console import examples_bar, name_cell, out, percent, plain_table, print_line

if TYPE_CHECKING:
    from kfacpack.evaluation.accuracy import EvaluationSet, Score
    from kfacpack.evaluation.sweep import (
        AlphaEvaluation,
        ChoiceOutput,
        ChosenAlpha,
        Evaluation,
        NegationOutput,
        SelectionTask,
        SweepBest,
        SweepOutput,
    )
    from kfacpack.models.heads import Head
    from kfacpack.models.model import Model
    from kfacpack.tasks.task import Task
    from kfacpack.vectors.task_vector import TaskVector


CSV_COLUMNS = ("task", "split", "alpha", "accuracy", "normalized", "examples", "head")
"""Columns of the CSV file."""
TABLE_WIDTH, MAX_COLUMN_WIDTH = 80, 12

Result = Mapping[str, Any]
"""Accuracies at one α, as returned by `kfacpack.evaluation.sweep.evaluation_result`."""


def print_result(result: Result) -> None:
    """Prints the accuracies of all tasks at one α."""
    keys = {"accuracy": "accuracy"}
    if any(task["normalized"] is not None for task in result["tasks"].values()):
        keys["normalised"] = "normalized"
    with_perplexity = any("perplexity" in task for task in result["tasks"].values())
    table = plain_table("task", numbers=(*keys, *(["perplexity"] if with_perplexity else []), "examples"))
    table.add_column("head")
    for name, task in result["tasks"].items():
        cells = [percent(task[key]) for key in keys.values()]
        if with_perplexity:
            cells.append(f"{task['perplexity']:.4g}" if "perplexity" in task else "")
        table.add_row(name_cell(name), *cells, f"{task['examples']:,}", task["head"])
    if len(result["tasks"]) > 1:
        table.add_row("mean", *(percent(result["mean"][key]) for key in keys.values()), style="bold")
    out.print(table)


def print_sweep(alphas: Sequence[float], results: Sequence[Result], best: int, split: str) -> None:
    """Prints a table of accuracies with one row per α and one column per task.

    Args:
        alphas: The factors α of the vector.
        results: The result at each α.
        best: Index of the best α.
        split: The split that was evaluated.
    """
    names = list(results[0]["tasks"])
    for tasks in split_columns(names, reserved=len("-0.05 100.0% normalised ← best ")):
        with_means = tasks[-1] == names[-1] and (len(names) > 1 or _is_normalized(results))
        means = _mean_columns(results) if with_means else {}
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("α", justify="right")
        for heading in [*map(name_cell, tasks), *map(Text, means)]:
            table.add_column(heading, justify="right", max_width=MAX_COLUMN_WIDTH, overflow="fold")
        table.add_column("")
        for index, (alpha, result) in enumerate(zip(alphas, results, strict=True)):
            cells = [percent(result["tasks"][task]["accuracy"]) for task in tasks]
            cells += [percent(result["mean"][key]) for key in means.values()]
            mark, style = ("← best", "bold") if index == best else ("", None)
            table.add_row(f"{alpha:g}", *cells, mark, style=style)
        out.print(table)
    marked = f"the best α on the {printable(split)} split is marked"
    print_line(f"{marked}; --choose uses the validation split", style="dim")


def print_negation(negation: Mapping[str, Any]) -> None:
    """Prints the accuracies before and after the negation of a vector."""
    table = plain_table("task", numbers=("before", "after"))
    table.add_column("")
    for name, task in negation["tasks"].items():
        removed = task["removed"]
        effect = "was not above chance" if removed is None else f"lost {removed:.0%} of its accuracy above chance"
        table.add_row(name_cell(name), percent(task["before"]), percent(task["accuracy"]), effect)
    first = next(iter(negation["tasks"].values()))
    before, after = first["control_before"], first["control"]
    effect = f"control; kept {after / before:.0%} of its accuracy" if before else "control"
    table.add_row(name_cell(negation["control"]), percent(before), percent(after), effect)
    keep = f"the control task must keep {negation['keep']:.0%} of its accuracy"
    print_line(f"subtracted {first['alpha']:g} τ; α was chosen on the validation split, where {keep}")
    out.print(table)
    if not first["alpha"]:
        print_line(
            "α = 0 was chosen: no positive α both lowers the accuracy on the tasks to forget and keeps enough of the "
            "accuracy on the control task",
            style="dim",
        )


def csv_rows(result: Result, split: str, alpha: float | None) -> Iterator[list[Any]]:
    """Yields one CSV row per task, with a value for each of `CSV_COLUMNS`."""
    for name, task in result["tasks"].items():
        yield [name, split, alpha, task["accuracy"], task["normalized"], task["examples"], task["head"]]


def write_csv(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Writes a CSV file with the columns `CSV_COLUMNS`."""
    table = io.StringIO(newline="")
    csv.writer(table, lineterminator="\n").writerows([CSV_COLUMNS, *rows])
    write_atomically(path, table.getvalue().encode())


def _mean_columns(results: Sequence[Result]) -> dict[str, str]:
    """Returns the keys of the mean values, by column heading."""
    return {"mean": "accuracy", **({"normalised": "normalized"} if _is_normalized(results) else {})}


def _is_normalized(results: Sequence[Result]) -> bool:
    return results[0]["mean"]["normalized"] is not None


def split_columns(names: Sequence[str], *, reserved: int, padding: int = 1) -> list[list[str]]:
    """Splits the columns of a wide table into groups that each fit into `TABLE_WIDTH`.

    Args:
        names: Column headings, usually tasks.
        reserved: Total width in characters of the columns that every group contains.
        padding: Padding of each column in characters.
    """
    groups: list[list[str]] = [[]]
    free = available = TABLE_WIDTH - reserved
    for name in names:
        width = padding + min(max(len(name), len("100.0%")), MAX_COLUMN_WIDTH)
        if groups[-1] and width > free:
            groups.append([])
            free = available
        groups[-1].append(name)
        free -= width
    return groups


@dataclass(frozen=True)
class EvaluationOutput:
    """The result of an evaluation: a value for `--json`, CSV rows, and a function that prints the result."""

    as_json: Evaluation | SweepOutput | ChoiceOutput | NegationOutput
    rows: list[list[Any]]
    print: Callable[[], None]


@dataclass(frozen=True)
class Evaluator:
    """Evaluates one loaded model with different vectors."""

    model: Model
    kind: HeadKind
    """The value of --head."""
    batch_size: int
    show: bool
    """Whether to draw progress bars."""

    def head(self, task: Task, vector: TaskVector | None) -> Head:
        """Returns the head for a task. With the kind "auto", the vector's head for the task is used if there is one."""
        from kfacpack.evaluation.accuracy import vector_head
        from kfacpack.models.heads import head_for

        if self.kind == "auto" and (own := vector_head(task, vector)):
            return own
        with examples_bar(f"{task.name}: head", show=self.show) as advance:
            return head_for(self.model, task, kind=self.kind, batch_size=self.batch_size, on_progress=advance)

    def individual_accuracies(
        self, individual: Mapping[str, float | TaskVector], sets: Mapping[str, EvaluationSet]
    ) -> dict[str, float]:
        """Returns, for each task, the accuracy with the task's own vector at α = 1.

        Args:
            individual: For each task, its own vector or, if already known, the accuracy with this vector.
            sets: Evaluation sets by task.
        """

        def accuracy(task: str, vector: TaskVector) -> float:
            head = self.head(sets[task].task, vector)
            return self._scores(f"{task} alone", head, sets[task], vector, [1.0])[0].accuracy

        return {
            task: value if isinstance(value, float) else accuracy(task, value) for task, value in individual.items()
        }

    def sweep(
        self,
        heads: Mapping[str, Head],
        sets: Mapping[str, EvaluationSet],
        vector: TaskVector | None,
        alphas: Sequence[float],
        individual: Mapping[str, float],
        split: str,
    ) -> EvaluationOutput:
        """Evaluates every task at every α.

        Args:
            heads: Heads by task.
            sets: Evaluation sets by task.
            vector: The task vector, or None to evaluate the base model.
            alphas: The factors α of the vector.
            individual: Accuracy with each task's own vector, by task, for normalising the accuracies.
            split: Name of the split, for the output.
        """
        from kfacpack.evaluation.sweep import best

        scores = {name: self._scores(name, heads[name], sets[name], vector, alphas) for name in sets}
        results = _as_results(scores, individual, heads)
        rows = _all_rows(results, split, alphas if vector else [None])
        if len(alphas) == 1:
            return EvaluationOutput(results[0], rows, lambda: print_result(results[0]))
        index = best(alphas, list(scores.values()))
        best_result: SweepBest = {"alpha": alphas[index], "split": split, "mean": results[index]["mean"]}
        output: SweepOutput = {"sweep": _by_alpha(results, alphas), "best": best_result}
        return EvaluationOutput(output, rows, lambda: print_sweep(alphas, results, index, split))

    def choice(
        self,
        tasks: Sequence[SelectionTask],
        vector: TaskVector,
        alphas: Sequence[float],
        individual: Mapping[str, float],
    ) -> EvaluationOutput:
        """Chooses α by the mean accuracy on the validation split and evaluates the vector at this α on the test split.

        Args:
            tasks: The tasks, with their heads and examples.
            vector: The task vector.
            alphas: Candidate values of α.
            individual: Accuracy with each task's own vector, by task, for normalising the accuracies.
        """
        from kfacpack.evaluation.sweep import choose_alpha, evaluation_result, mean

        with examples_bar("choosing α", show=self.show) as advance:
            choice = choose_alpha(self.model, tasks, vector, alphas, batch_size=self.batch_size, on_progress=advance)
        heads = {task.name: task.head for task in tasks}
        on_validation = _as_results(choice.validation, {}, heads)
        on_test = evaluation_result(choice.test, individual, _origins(heads))
        best: ChosenAlpha = {
            "alpha": choice.alpha,
            "validation": on_validation[alphas.index(choice.alpha)]["mean"]["accuracy"],
            "test": mean(list(choice.test.values())),
        }

        def show() -> None:
            accuracy = percent(best["validation"])
            print_line(
                f"α = {choice.alpha:g}, chosen from {len(alphas)} values by the mean accuracy on the validation split "
                f"({accuracy}); accuracy on the test split:"
            )
            print_result(on_test)

        rows = [*_all_rows(on_validation, "validation", alphas), *csv_rows(on_test, "test", choice.alpha)]
        result: ChoiceOutput = {**on_test, "best": best, "validation": {"sweep": _by_alpha(on_validation, alphas)}}
        return EvaluationOutput(result, rows, show)

    def negation(
        self, tasks: Sequence[SelectionTask], vector: TaskVector, alphas: Sequence[float], keep: float
    ) -> EvaluationOutput:
        """Chooses α for a negation on the validation split and evaluates the negation on the test split.

        Args:
            tasks: The tasks, with their heads and examples; the control task is the last one.
            vector: The task vector.
            alphas: Candidate values of α.
            keep: Minimum accuracy on the control task, as a share of its accuracy without the vector.
        """
        from kfacpack.evaluation.sweep import negate

        *targets, control = tasks
        settings: dict[str, Any] = {"keep": keep, "batch_size": self.batch_size}
        with examples_bar("choosing α", show=self.show) as advance:
            negation = negate(self.model, targets, control, vector, alphas, **settings, on_progress=advance)
        rows: list[list[Any]] = []
        for task in tasks:
            entry = negation["tasks"].get(task.name) or next(iter(negation["tasks"].values()))
            accuracies = entry["before"], entry["accuracy"]
            if task is control:
                accuracies = entry["control_before"], entry["control"]
            for accuracy, alpha in zip(accuracies, (0.0, 0.0 - entry["alpha"]), strict=True):
                rows.append([task.name, "test", alpha, accuracy, None, len(task.test.numbers), task.head.origin])
        output: NegationOutput = {"negation": negation}
        return EvaluationOutput(output, rows, lambda: print_negation(negation))

    def _scores(
        self, name: str, head: Head, examples: EvaluationSet, vector: TaskVector | None, alphas: Sequence[float]
    ) -> list[Score]:
        from kfacpack.evaluation.accuracy import scores

        with examples_bar(name, show=self.show) as advance:
            return scores(self.model, head, examples, vector, alphas, batch_size=self.batch_size, on_progress=advance)


def _origins(heads: Mapping[str, Head]) -> dict[str, str]:
    return {name: head.origin for name, head in heads.items()}


def _as_results(
    scores: Mapping[str, Sequence[Score]], individual: Mapping[str, float], heads: Mapping[str, Head]
) -> list[Evaluation]:
    """Converts the scores of each task at every α to one result per α."""
    from kfacpack.evaluation.sweep import evaluation_result

    count = len(next(iter(scores.values())))
    return [
        evaluation_result({name: by_alpha[k] for name, by_alpha in scores.items()}, individual, _origins(heads))
        for k in range(count)
    ]


def _by_alpha(results: Sequence[Evaluation], alphas: Sequence[float]) -> list[AlphaEvaluation]:
    return [{"alpha": alpha, **result} for alpha, result in zip(alphas, results, strict=True)]


def _all_rows(results: Sequence[Evaluation], split: str, alphas: Sequence[float | None]) -> list[list[Any]]:
    return [row for alpha, result in zip(alphas, results, strict=True) for row in csv_rows(result, split, alpha)]
