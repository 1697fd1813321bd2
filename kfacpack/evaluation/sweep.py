"""Scores as they are told: absolute, and as a share of what the individual vectors reach.

`kp.sweep`: accuracy as a function of α, at the cost of one evaluation for linearised vectors.

The best α, chosen on validation examples; test examples are asked at that α alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from kfacpack.errors import KfacpackError, printable
from kfacpack.evaluation.accuracy import (
    EvaluationSet,
    OnProgress,
    ProgressCounter,
    Score,
    check_alphas,
    count_examples,
    head_of,
    scores,
)

if TYPE_CHECKING:
    from kfacpack.evaluation.accuracy import Score
    from kfacpack.models.heads import Head
    from kfacpack.models.model import Model
    from kfacpack.tasks.task import Task
    from kfacpack.vectors.task_vector import TaskVector


def evaluation_result(
    found: Mapping[str, Score], individual: Mapping[str, float], heads: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """{"tasks": {name: {"accuracy", "normalized", "examples"}}, "mean": {"accuracy", "normalized"}}.

    `individual`: a task's name -> the accuracy of the vector of this task alone; where it is not known, or zero,
    `normalized` is None, and so is its mean where it is of any. `heads`: what each head was made from, told as "head".
    """
    tasks = {
        name: {
            "accuracy": score.accuracy,
            "normalized": normalized(score.accuracy, individual.get(name)),
            "examples": score.examples,
            **({"head": heads[name]} if heads else {}),
        }
        for name, score in found.items()
    }
    return {"tasks": tasks, "mean": {key: _mean([each[key] for each in tasks.values()]) for key in MEANS}}


MEANS = ("accuracy", "normalized")


def normalized(accuracy: float, individual: float | None) -> float | None:
    return accuracy / individual if individual else None


def _mean(values: list[Any]) -> float | None:
    return None if None in values else sum(values) / len(values)


def sweep(
    model: Model,
    task: Task,
    vector: TaskVector,
    alphas: Sequence[float],
    head: Head | None = None,
    split: str = "test",
    *,
    examples: str = "all",
    seed: int = 0,
    batch_size: int = 64,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Score]:
    """`kp.evaluate(..., vector=vector, alpha=alpha)` for each α, exactly: f and J τ are computed once.

    Outside the linear regime each α is a pass of its own over the examples, which are read once.
    """
    exam = EvaluationSet.of(task, split, examples, seed)
    head = head or head_of(model, task, vector)
    return scores(model, head, exam, vector, alphas, batch_size=batch_size, on_progress=on_progress)


def mean(found: Sequence[Score]) -> float:
    """Every task counts the same."""
    return float(exact_mean(found))


def best(alphas: Sequence[float], by_task: Sequence[Sequence[Score]]) -> int:
    """Where the mean over the tasks is largest; of several such places, the α nearest to 1, then the smaller one.

    `by_task`: of each task, its score at every α.
    """
    means = [exact_mean([each[k] for each in by_task]) for k in range(len(alphas))]
    # As they are written: 0.7 and 1.3 are as far from 1.
    written = [Decimal(repr(float(alpha))) for alpha in alphas]
    return min(range(len(alphas)), key=lambda k: (-means[k], abs(written[k] - 1), written[k]))


def as_table(alphas: Sequence[float], by_task: Mapping[str, Sequence[Score]]) -> dict[str, Any]:
    """{"alphas": [...], "tasks": {name: [accuracy at each]}, "mean": [...]}."""
    return {
        "alphas": [float(alpha) for alpha in alphas],
        "tasks": {task: [each.accuracy for each in found] for task, found in by_task.items()},
        "mean": [mean([found[k] for found in by_task.values()]) for k in range(len(alphas))],
    }


def exact_mean(found: Sequence[Score]) -> Fraction:
    """As a fraction, so that what is equal is not told apart by rounding."""
    return sum((Fraction(each.correct, each.examples) for each in found), Fraction(0)) / len(found)


VALIDATION = "validation"


@dataclass(frozen=True)
class SelectionTask:
    """A task with its head: what is chosen is chosen on `validation`, and told on `test`."""

    head: Head
    validation: EvaluationSet
    test: EvaluationSet

    @property
    def name(self) -> str:
        return self.test.task.name


@dataclass(frozen=True)
class AlphaChoice:
    alpha: float
    alphas: tuple[float, ...]
    """All that it was chosen from."""
    validation: dict[str, list[Score]]
    """A task's name -> its score on the validation split at every one of them."""
    test: dict[str, Score]
    """A task's name -> its score on the test split, at the α that was chosen."""


def validation_set(task: Task, examples: str = "all", seed: int = 0) -> EvaluationSet:
    """As `Exam.of`, where a task that has no validation split is told what to do."""
    if VALIDATION not in task.splits:
        problem = f"{printable(task.name)}: α is chosen on the split {VALIDATION!r}, and never on test, but there are "
        remedy = "Add validation-*.parquet or validation/CLASS/ to its folder, or give the one α to evaluate at"
        raise KfacpackError(f"{problem}only {', '.join(map(printable, task.splits))}. {remedy}")
    return EvaluationSet.of(task, VALIDATION, examples, seed)


def choose_alpha(
    model: Model,
    subjects: Sequence[SelectionTask],
    vector: TaskVector,
    alphas: Sequence[float],
    *,
    batch_size: int = 64,
    on_progress: OnProgress = lambda done, total: None,
) -> AlphaChoice:
    """The α with the largest mean accuracy over the tasks' validation splits; of several, the nearest to 1.

    `on_progress` hears how many examples of all splits are done, and how many there are.
    """
    check_alphas(vector, alphas)
    total = count_examples(model, vector, alphas, [each.validation for each in subjects])
    count = ProgressCounter(
        total + count_examples(model, vector, alphas[:1], [each.test for each in subjects]), on_progress
    )

    def asked(head: Head, exam: EvaluationSet, alphas: Sequence[float]) -> list[Score]:
        return scores(model, head, exam, vector, alphas, batch_size=batch_size, on_progress=count.piece())

    validation = {each.name: asked(each.head, each.validation, alphas) for each in subjects}
    alpha = alphas[best(alphas, list(validation.values()))]
    test = {each.name: asked(each.head, each.test, [alpha])[0] for each in subjects}
    return AlphaChoice(alpha, tuple(alphas), validation, test)
