"""Accuracy as a function of α, selection of α on validation data, negation, and the format of evaluation results.

Negation adds −α τ to a model so that it forgets a task. α is chosen so that a control task keeps most of its accuracy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from typing_extensions import NotRequired, TypedDict

from kfacpack.errors import KfacpackError, printable
from kfacpack.evaluation.accuracy import (
    EvaluationSet,
    ProgressCounter,
    Score,
    check_alphas,
    count_examples,
    scores,
    scoring_inputs,
)
from kfacpack.format.units import OnProgress
from kfacpack.models.heads import require_classes

if TYPE_CHECKING:
    from kfacpack.models.heads import Head
    from kfacpack.models.model import Model
    from kfacpack.tasks.task import Task
    from kfacpack.vectors.task_vector import TaskVector


class TaskEvaluation(TypedDict):
    """Accuracy on one task."""

    accuracy: float
    """Fraction of the predictions that are correct."""
    normalized: float | None
    """Accuracy divided by the accuracy with only the task's own vector; null if the latter is unknown or zero."""
    examples: int
    """Number of examples."""
    perplexity: NotRequired[float]
    """Per-token perplexity; present only for tasks with completions, whose accuracy is also computed per token."""
    head: NotRequired[str]
    """Origin of the head: "text", "words" or "prototypes"."""


class MeanEvaluation(TypedDict):
    """Mean accuracies over all tasks."""

    accuracy: float
    normalized: float | None
    """Mean of the normalised accuracies; null if the normalised accuracy of any task is unknown."""


class Evaluation(TypedDict):
    """Accuracies on all tasks."""

    tasks: dict[str, TaskEvaluation]
    """Accuracies by task name."""
    mean: MeanEvaluation


class AlphaEvaluation(Evaluation):
    """Accuracies on all tasks at one α."""

    alpha: float


class SweepBest(TypedDict):
    """The α with the largest mean accuracy in a sweep."""

    alpha: float
    split: str
    """Name of the split on which the model was evaluated."""
    mean: MeanEvaluation


class SweepOutput(TypedDict):
    """Output of `kfacpack eval --json` for several α."""

    sweep: list[AlphaEvaluation]
    best: SweepBest


class ValidationSweep(TypedDict):
    """Accuracies on the validation split at every candidate value of α."""

    sweep: list[AlphaEvaluation]


class ChosenAlpha(TypedDict):
    """The α that was chosen on the validation split."""

    alpha: float
    validation: float
    """Mean accuracy on the validation split at this α."""
    test: float
    """Mean accuracy on the test split at this α."""


class ChoiceOutput(Evaluation):
    """Output of `kfacpack eval --choose --json`: the accuracies on the test split at the chosen α."""

    best: ChosenAlpha
    validation: ValidationSweep


def evaluation_result(
    task_scores: Mapping[str, Score], individual: Mapping[str, float], heads: Mapping[str, str] | None = None
) -> Evaluation:
    """Returns the result of an evaluation in the format of `kfacpack eval --json`.

    Args:
        task_scores: Scores by task name.
        individual: Accuracy on each task with only the task's own vector, by task name. If the accuracy on a task is
            missing or zero, "normalized" is None for this task and in the mean.
        heads: Origin of each task's head, by task name. If passed, the origins are added to the result as "head".

    Returns:
        `{"tasks": {name: {"accuracy", "normalized", "examples"}}, "mean": {"accuracy", "normalized"}}`. Tasks with
        completions also have "perplexity".
    """
    tasks: dict[str, TaskEvaluation] = {}
    for name, score in task_scores.items():
        tasks[name] = {
            "accuracy": score.accuracy,
            "normalized": normalized(score.accuracy, individual.get(name)),
            "examples": score.examples,
        }
        if score.perplexity is not None:
            tasks[name]["perplexity"] = score.perplexity
        if heads:
            tasks[name]["head"] = heads[name]
    accuracies = [task["accuracy"] for task in tasks.values()]
    shares = [task["normalized"] for task in tasks.values()]
    known = [share for share in shares if share is not None]
    return {
        "tasks": tasks,
        "mean": {
            "accuracy": sum(accuracies) / len(accuracies),
            "normalized": sum(known) / len(known) if len(known) == len(shares) else None,
        },
    }


def normalized(accuracy: float, individual: float | None) -> float | None:
    """Returns accuracy / individual, or None if `individual` (see `evaluation_result`) is None or 0."""
    return accuracy / individual if individual else None


def sweep(
    model: Model | str,
    task: Task | str,
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
    """Evaluates a model with α times a task vector added, for each α.

    The scores are identical to those of `kp.evaluate` at each α. For a linear vector, f and J τ are computed once, so a
    sweep takes about as long as one evaluation. In other regimes, each α requires a separate pass over the examples.

    Args:
        model: A model from `kp.load_model`, or its name.
        task: A task from `kp.load_task`, or its name.
        vector: The task vector.
        alphas: Coefficients of the vector.
        head: Head to use. Defaults to the vector's head for this task, or else to `kp.head_for(model, task)`.
        split: Name of the split.
        examples: "all", a number, or a percentage of the split such as "30%".
        seed: Seed for the random selection of examples.
        batch_size: Examples per forward pass.
        on_progress: Called with the number of examples done and the total number, over all passes.

    Returns:
        One score per α.

    Raises:
        KfacpackError: If the model, head, vector and task are incompatible, or if the outputs contain NaN or Inf.

    Example:
        >>> vector = kp.TaskVector.load("digits.safetensors")
        >>> [score.accuracy for score in kp.sweep("tiny", "digits", vector, [0.0, 0.5, 1.0])]
    """
    model, head, evaluation_set = scoring_inputs(model, task, head, vector, split, examples, seed)
    return scores(model, head, evaluation_set, vector, alphas, batch_size=batch_size, on_progress=on_progress)


def mean(task_scores: Sequence[Score]) -> float:
    """Returns the mean accuracy over tasks. All tasks have the same weight."""
    return float(exact_mean(task_scores))


def best(alphas: Sequence[float], by_task: Sequence[Sequence[Score]]) -> int:
    """Returns the index of the α with the largest mean accuracy over tasks.

    Ties are resolved in favour of the α nearest to 1. If two values are equally near, the smaller one is chosen.

    Args:
        alphas: The coefficients.
        by_task: For each task, the scores at all coefficients.
    """
    means = [exact_mean([task_scores[k] for task_scores in by_task]) for k in range(len(alphas))]
    # Compare decimals, because 0.7 and 1.3 do not have the same distance from 1 as floats.
    written = [Decimal(repr(float(alpha))) for alpha in alphas]
    return min(range(len(alphas)), key=lambda k: (-means[k], abs(written[k] - 1), written[k]))


def as_table(alphas: Sequence[float], by_task: Mapping[str, Sequence[Score]]) -> dict[str, Any]:
    """Returns accuracies as `{"alphas": [...], "tasks": {name: [accuracy at each α]}, "mean": [mean at each α]}`."""
    return {
        "alphas": [float(alpha) for alpha in alphas],
        "tasks": {task: [score.accuracy for score in task_scores] for task, task_scores in by_task.items()},
        "mean": [mean([task_scores[k] for task_scores in by_task.values()]) for k in range(len(alphas))],
    }


def exact_mean(task_scores: Sequence[Score]) -> Fraction:
    """Returns the mean accuracy as an exact fraction, so that rounding errors do not hide ties."""
    return sum((Fraction(score.correct, score.predictions) for score in task_scores), Fraction(0)) / len(task_scores)


VALIDATION = "validation"


@dataclass(frozen=True)
class SelectionTask:
    """A task on which α is selected, with its head and its validation and test examples."""

    head: Head
    """Head to use."""
    validation: EvaluationSet
    """Examples on which α is selected."""
    test: EvaluationSet
    """Examples on which the reported accuracies are measured."""

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.test.task.name


@dataclass(frozen=True)
class AlphaChoice:
    """The α selected on validation data, and the scores on validation and test data."""

    alpha: float
    """The selected α."""
    alphas: tuple[float, ...]
    """All candidate values of α."""
    validation: dict[str, list[Score]]
    """Scores on the validation split at every candidate, by task name."""
    test: dict[str, Score]
    """Scores on the test split at the selected α, by task name."""


def validation_set(task: Task, examples: int | str = "all", seed: int = 0) -> EvaluationSet:
    """Selects examples of the validation split; see `EvaluationSet.of`.

    Raises:
        KfacpackError: If the task has no validation split.
    """
    if VALIDATION not in task.splits:
        problem = f"the selection of α needs a split {VALIDATION!r}, which is not among the splits of the task: "
        remedy = "Add validation-*.parquet or validation/CLASS/ to the folder of the task, or evaluate a single α"
        splits = ", ".join(map(printable, task.splits))
        raise KfacpackError(f"{printable(task.name)}: {problem}{splits}. {remedy}")
    return EvaluationSet.of(task, VALIDATION, examples, seed)


class SelectionScores:
    """Computes scores on validation data for all candidate values of α, and scores on test data for a few values of α.

    Args:
        model: The model.
        tasks: Tasks with their heads and examples.
        vector: The task vector.
        candidates: Values of α to evaluate on validation data.
        tests: Number of values of α to evaluate on test data.
        batch_size: Examples per forward pass.
        on_progress: Called with the number of examples done and the total number, over both splits.
    """

    def __init__(
        self,
        model: Model,
        tasks: Sequence[SelectionTask],
        vector: TaskVector,
        candidates: Sequence[float],
        tests: int,
        batch_size: int,
        on_progress: OnProgress,
    ):
        self._model, self._tasks, self._vector, self._batch_size = model, tasks, vector, batch_size
        self._candidates = candidates
        total = count_examples(model, vector, candidates, [task.validation for task in tasks])
        total += count_examples(model, vector, [1.0] * tests, [task.test for task in tasks])
        self._counter = ProgressCounter(total, on_progress)

    def validation(self) -> list[list[Score]]:
        """Returns the scores on validation data: for each task, a list with one score per candidate value of α."""
        return [self._scores(task.head, task.validation, self._candidates) for task in self._tasks]

    def test(self, alphas: Sequence[float]) -> list[list[Score]]:
        """Returns the scores on test data: for each task, a list with one score per α."""
        return [self._scores(task.head, task.test, alphas) for task in self._tasks]

    def _scores(self, head: Head, evaluation_set: EvaluationSet, alphas: Sequence[float]) -> list[Score]:
        on_progress = self._counter.subcounter()
        return scores(
            self._model,
            head,
            evaluation_set,
            self._vector,
            alphas,
            batch_size=self._batch_size,
            on_progress=on_progress,
        )


def choose_alpha(
    model: Model,
    tasks: Sequence[SelectionTask],
    vector: TaskVector,
    alphas: Sequence[float],
    *,
    batch_size: int = 64,
    on_progress: OnProgress = lambda done, total: None,
) -> AlphaChoice:
    """Selects the α with the largest mean accuracy on validation data, and measures the accuracies on test data.

    Args:
        model: The model.
        tasks: Tasks with their heads and examples.
        vector: The task vector.
        alphas: Candidate values of α. Ties are resolved in favour of the value nearest to 1.
        batch_size: Examples per forward pass.
        on_progress: Called with the number of examples done and the total number, over both splits.

    Returns:
        The selected α and all scores.

    Raises:
        KfacpackError: If the arguments are incompatible, or if the outputs contain NaN or Inf.
    """
    check_alphas(vector, alphas)
    task_scores = SelectionScores(model, tasks, vector, alphas, 1, batch_size, on_progress)
    names = [task.name for task in tasks]
    validation = task_scores.validation()
    alpha = alphas[best(alphas, validation)]
    test = {name: score for name, (score,) in zip(names, task_scores.test([alpha]), strict=True)}
    return AlphaChoice(alpha, tuple(alphas), dict(zip(names, validation, strict=True)), test)


CONTROL_KEEP = 0.95
"""Default fraction of the control task's accuracy that must be kept; 0.95 is the usual value in the literature."""


class TaskNegation(TypedDict):
    """Accuracies on the test split before and after the vector is subtracted."""

    alpha: float
    """Factor by which the subtracted vector is multiplied."""
    accuracy: float
    """Accuracy on the task to forget after the subtraction."""
    before: float
    """Accuracy on the task to forget before the subtraction."""
    chance: float
    """Chance level: 1 divided by the number of classes."""
    removed: float | None
    """Fraction of the accuracy above chance that was removed; null if `before` is not above `chance`."""
    control: float
    """Accuracy on the control task after the subtraction."""
    control_before: float
    """Accuracy on the control task before the subtraction."""


class Negation(TypedDict):
    """Result of the negation of a vector."""

    control: str
    """Name of the control task."""
    keep: float
    """Fraction of the control task's accuracy on the validation split that must be kept."""
    tasks: dict[str, TaskNegation]
    """Accuracies on each task to forget, by task name."""


class NegationOutput(TypedDict):
    """Output of `kfacpack eval --control --json`."""

    negation: Negation


def negate(
    model: Model,
    targets: Sequence[SelectionTask],
    control: SelectionTask,
    vector: TaskVector,
    alphas: Sequence[float],
    *,
    keep: float = CONTROL_KEEP,
    batch_size: int = 64,
    on_progress: OnProgress = lambda done, total: None,
) -> Negation:
    """Selects α so that adding −α τ makes a model forget tasks, and reports accuracies before and after this change.

    α is selected on validation data. Candidates are zero and all values of α at which the control task keeps at least
    the fraction `keep` of its original accuracy. The candidate with the smallest mean accuracy over the targets is
    selected. In this mean, accuracies below chance count as chance. Ties are resolved in favour of the smallest α. The
    reported accuracies are measured on test data.

    Args:
        model: The model.
        targets: Tasks to forget.
        control: Task that must keep its accuracy.
        vector: The task vector to negate.
        alphas: Values of α to try, zero or positive.
        keep: Fraction of the control task's accuracy that must be kept, above 0 and at most 1.
        batch_size: Examples per forward pass.
        on_progress: Called with the number of examples done and the total number.

    Returns:
        `{"control": name of the control, "keep": keep, "tasks": {target: {"alpha", "accuracy", "before", "chance",
        "removed", "control", "control_before"}}}`. "chance" is 1 divided by the number of classes. "removed" is the
        fraction of the accuracy above chance that was removed, or None if "before" is not above "chance".

    Raises:
        KfacpackError: If an α is negative, if `keep` is out of range, if the control is one of the targets, or if a
            task has no classes.
    """
    check_alphas(vector, alphas)
    if negative := [alpha for alpha in alphas if alpha < 0]:
        problem = f"alpha is {negative[0]:g}, expected zero or a positive number"
        raise KfacpackError(f"{problem}: the vector is already negated, so a negative α would add it")
    if not 0 < keep <= 1:
        raise KfacpackError(f"keep is {keep:g}, expected a fraction of the control's accuracy: above 0, at most 1")
    if control.name in [target.name for target in targets]:
        raise KfacpackError(f"{control.name!r} is both a task to forget and the control; choose another control task")
    for task in (*targets, control):
        require_classes(task.test.task)  # accuracies on completions have no chance level
    candidates = [0.0, *sorted({float(alpha) for alpha in alphas} - {0.0})]
    task_scores = SelectionScores(model, [*targets, control], -vector, candidates, 2, batch_size, on_progress)
    *target_scores, control_scores = task_scores.validation()
    classes = [len(target.head.classes) for target in targets]
    alpha = candidates[choose_negation_alpha(target_scores, control_scores, keep, classes)]
    before, after = zip(*task_scores.test([0.0, alpha]), strict=True)
    results: dict[str, TaskNegation] = {
        target.name: {
            "alpha": alpha,
            "accuracy": after[k].accuracy,
            "before": before[k].accuracy,
            "chance": 1 / classes[k],
            "removed": _removed(after[k].accuracy, before[k].accuracy, 1 / classes[k]),
            "control": after[-1].accuracy,
            "control_before": before[-1].accuracy,
        }
        for k, target in enumerate(targets)
    }
    return {"control": control.name, "keep": keep, "tasks": results}


def choose_negation_alpha(
    targets: Sequence[Sequence[Score]], control: Sequence[Score], keep: float, classes: Sequence[int]
) -> int:
    """Returns the index of the α to use for negation.

    This α gives the smallest mean accuracy on the targets among the values at which the control keeps enough accuracy.
    Accuracies below chance count as chance, so that α is not increased further at the expense of the control task.

    Args:
        targets: Scores on each target at increasing values of α, starting at zero.
        control: Scores on the control task at the same values of α.
        keep: Fraction of the control task's accuracy that must be kept.
        classes: Number of classes of each target.
    """

    def remaining(k: int) -> Fraction:
        accuracies = (Fraction(target[k].correct, target[k].examples) for target in targets)
        counted = (max(accuracy, Fraction(1, n)) for accuracy, n in zip(accuracies, classes, strict=True))
        return sum(counted, Fraction(0))

    minimum = Fraction(str(keep)) * control[0].correct
    allowed = [k for k, score in enumerate(control) if score.correct >= minimum]
    return min(allowed, key=remaining)


def _removed(after: float, before: float, chance: float) -> float | None:
    margin = before - chance
    return (before - after) / margin if margin > 0 else None
