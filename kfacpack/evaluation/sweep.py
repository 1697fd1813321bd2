"""Accuracy as a function of α, the choice of α on validation data, and the form of evaluation results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from kfacpack.errors import KfacpackError, printable
from kfacpack.evaluation.accuracy import (
    EvaluationSet,
    ProgressCounter,
    Score,
    check_alphas,
    count_examples,
    head_of,
    scores,
)
from kfacpack.format.units import OnProgress

if TYPE_CHECKING:
    from kfacpack.models.heads import Head
    from kfacpack.models.model import Model
    from kfacpack.tasks.task import Task
    from kfacpack.vectors.task_vector import TaskVector


def evaluation_result(
    task_scores: Mapping[str, Score], individual: Mapping[str, float], heads: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Returns the result of an evaluation in the form of `kfacpack eval --json`.

    Args:
        task_scores: Task name -> score.
        individual: Task name -> accuracy of the vector of this task alone. If it is unknown or zero, `normalized` is
            None, and so is the mean of `normalized`.
        heads: Task name -> what its head was made from, added as "head".

    Returns:
        `{"tasks": {name: {"accuracy", "normalized", "examples"}}, "mean": {"accuracy", "normalized"}}`.
    """
    tasks = {
        name: {
            "accuracy": score.accuracy,
            "normalized": normalized(score.accuracy, individual.get(name)),
            "examples": score.examples,
            **({"head": heads[name]} if heads else {}),
        }
        for name, score in task_scores.items()
    }
    return {"tasks": tasks, "mean": {key: _mean([task[key] for task in tasks.values()]) for key in MEANS}}


MEANS = ("accuracy", "normalized")


def normalized(accuracy: float, individual: float | None) -> float | None:
    """Returns an accuracy relative to that of the individual vector; None if that is unknown or zero."""
    return accuracy / individual if individual else None


def _mean(values: list[Any]) -> float | None:
    return None if None in values else sum(values) / len(values)


def sweep(
    model: Model,
    task: Task,
    vector: TaskVector,
    alphas: Sequence[float],
    *,
    head: Head | None = None,
    split: str = "test",
    examples: int | str = "all",
    seed: int = 0,
    batch_size: int = 64,
    on_progress: OnProgress = lambda done, total: None,
) -> list[Score]:
    """Evaluates a model with α times a task vector, for each α.

    The results equal those of `kp.evaluate` at each α exactly. For a linear vector, f and J τ are computed once, so a
    sweep costs as much as one evaluation; in other regimes each α is a pass over the examples, which are read once.

    Args:
        model: The model.
        task: The task.
        vector: The task vector.
        alphas: Coefficients of the vector.
        head: Head to classify with; None: the vector's head for this task, or else `kp.head_for(model, task)`.
        split: Name of the split.
        examples: "all", a number, or a percentage of the split such as "30%".
        seed: Seed of the selection of examples.
        batch_size: Examples per forward pass.
        on_progress: Called with the number of examples done and their total over all passes.

    Returns:
        One score per α.

    Raises:
        KfacpackError: If model, head, vector and task do not fit together, or outputs contain NaN or Inf.

    Example:
        >>> scores = kp.sweep(model, task, vector, [0.0, 0.5, 1.0])
        >>> [score.accuracy for score in scores]
    """
    evaluation_set = EvaluationSet.of(task, split, examples, seed)
    head = head or head_of(model, task, vector)
    return scores(model, head, evaluation_set, vector, alphas, batch_size=batch_size, on_progress=on_progress)


def mean(task_scores: Sequence[Score]) -> float:
    """Returns the mean accuracy, with equal weight for every task."""
    return float(exact_mean(task_scores))


def best(alphas: Sequence[float], by_task: Sequence[Sequence[Score]]) -> int:
    """Returns the index of the α with the largest mean accuracy over tasks.

    Ties are resolved in favour of the α nearest to 1, and then of the smaller one.

    Args:
        alphas: The coefficients.
        by_task: For each task, its score at every α.
    """
    means = [exact_mean([task_scores[k] for task_scores in by_task]) for k in range(len(alphas))]
    # Compared as decimals: as floats, 0.7 and 1.3 do not have the same distance from 1.
    written = [Decimal(repr(float(alpha))) for alpha in alphas]
    return min(range(len(alphas)), key=lambda k: (-means[k], abs(written[k] - 1), written[k]))


def as_table(alphas: Sequence[float], by_task: Mapping[str, Sequence[Score]]) -> dict[str, Any]:
    """Returns `{"alphas": [...], "tasks": {name: [accuracy at each α]}, "mean": [...]}`."""
    return {
        "alphas": [float(alpha) for alpha in alphas],
        "tasks": {task: [score.accuracy for score in task_scores] for task, task_scores in by_task.items()},
        "mean": [mean([task_scores[k] for task_scores in by_task.values()]) for k in range(len(alphas))],
    }


def exact_mean(task_scores: Sequence[Score]) -> Fraction:
    """Returns the mean accuracy as a fraction, so that ties are not broken by rounding."""
    return sum((Fraction(score.correct, score.examples) for score in task_scores), Fraction(0)) / len(task_scores)


VALIDATION = "validation"


@dataclass(frozen=True)
class SelectionTask:
    """A task with its head, whose validation examples select α and whose test examples report the result."""

    head: Head
    """Head to classify with."""
    validation: EvaluationSet
    """Examples to select α on."""
    test: EvaluationSet
    """Examples to report."""

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.test.task.name


@dataclass(frozen=True)
class AlphaChoice:
    """The α selected on validation data, with all scores."""

    alpha: float
    """The selected α."""
    alphas: tuple[float, ...]
    """All candidates."""
    validation: dict[str, list[Score]]
    """Task name -> score on the validation split at every candidate."""
    test: dict[str, Score]
    """Task name -> score on the test split at the selected α."""


def validation_set(task: Task, examples: int | str = "all", seed: int = 0) -> EvaluationSet:
    """Selects examples of the validation split; see `EvaluationSet.of`.

    Raises:
        KfacpackError: If the task has no validation split.
    """
    if VALIDATION not in task.splits:
        problem = f"α is selected on the split {VALIDATION!r}, never on test, but the task has only "
        remedy = "Add validation-*.parquet or validation/CLASS/ to its folder, or give a single α to evaluate at"
        splits = ", ".join(map(printable, task.splits))
        raise KfacpackError(f"{printable(task.name)}: {problem}{splits}. {remedy}")
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
    """Selects the α with the largest mean accuracy on the validation splits, and evaluates it on the test splits.

    Args:
        model: The model.
        subjects: Tasks with their heads and examples.
        vector: The task vector.
        alphas: Candidates; ties are resolved in favour of the one nearest to 1.
        batch_size: Examples per forward pass.
        on_progress: Called with the number of examples done and their total, over both splits.

    Raises:
        KfacpackError: If the arguments do not fit together, or outputs contain NaN or Inf.
    """
    check_alphas(vector, alphas)
    total = count_examples(model, vector, alphas, [subject.validation for subject in subjects])
    total += count_examples(model, vector, alphas[:1], [subject.test for subject in subjects])
    counter = ProgressCounter(total, on_progress)

    def evaluated(head: Head, subset: EvaluationSet, alphas: Sequence[float]) -> list[Score]:
        return scores(model, head, subset, vector, alphas, batch_size=batch_size, on_progress=counter.subcounter())

    validation = {subject.name: evaluated(subject.head, subject.validation, alphas) for subject in subjects}
    alpha = alphas[best(alphas, list(validation.values()))]
    test = {subject.name: evaluated(subject.head, subject.test, [alpha])[0] for subject in subjects}
    return AlphaChoice(alpha, tuple(alphas), validation, test)
