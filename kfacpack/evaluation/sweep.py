"""`kp.sweep`: accuracy as a function of α, at the cost of one evaluation for linearised vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from kfacpack.evaluation.accuracy import Exam, Score, head_with, scores

if TYPE_CHECKING:
    from kfacpack.heads import Head
    from kfacpack.models.base import Model
    from kfacpack.tasks.base import Task
    from kfacpack.vectors.vector import TaskVector


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
    exam = Exam.of(task, split, examples, seed)
    head = head or head_with(model, task, vector)
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
