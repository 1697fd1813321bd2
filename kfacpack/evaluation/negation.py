"""Forgetting by negation: the α at which −α τ removes most of a task while a control task keeps its accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from typing_extensions import TypedDict

from kfacpack.errors import KfacpackError
from kfacpack.evaluation.accuracy import Score, check_alphas
from kfacpack.evaluation.sweep import SelectionScores, SelectionTask
from kfacpack.format.units import OnProgress

if TYPE_CHECKING:
    from kfacpack.models.model import Model
    from kfacpack.vectors.task_vector import TaskVector


CONTROL_KEEP = 0.95
"""Fraction of its accuracy that the control task must keep, as is usual in the literature."""


class TaskNegation(TypedDict):
    """Accuracies on test before and after subtracting the vector."""

    alpha: float
    """Factor α of the subtracted vector."""
    accuracy: float
    """Accuracy after the subtraction."""
    before: float
    """Accuracy before the subtraction."""
    chance: float
    """Chance level: 1 divided by the number of classes."""
    removed: float | None
    """Removed fraction of the margin over chance; null if there was no margin."""
    control: float
    """Accuracy of the control task after the subtraction."""
    control_before: float
    """Accuracy of the control task before the subtraction."""


class Negation(TypedDict):
    """The negation of a vector."""

    control: str
    """Name of the control task."""
    keep: float
    """Fraction of its accuracy that the control must keep on validation."""
    tasks: dict[str, TaskNegation]
    """By name of the task to forget."""


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
    """Selects α for −α τ on validation data, and reports the accuracies of the targets on test data.

    Candidates are the values of α at which the control keeps the fraction `keep` of its accuracy without the vector.
    Among them, the α with the smallest mean accuracy of the targets is selected, where accuracies below chance count
    as chance. Ties are resolved in favour of the smallest α; zero is always a candidate. The test splits are evaluated
    only at this α and at zero.

    Args:
        model: The model.
        targets: Tasks to forget.
        control: Task that must keep its accuracy.
        vector: The task vector to negate.
        alphas: Values of α to try, zero or positive.
        keep: Fraction of the control's accuracy to keep, above 0 and at most 1.
        batch_size: Examples per forward pass.
        on_progress: Called with the number of examples done and their total.

    Returns:
        `{"control": its name, "keep": keep, "tasks": {target: {"alpha", "accuracy", "before", "chance", "removed",
        "control", "control_before"}}}`. `chance` is 1 / the number of classes; `removed` is the removed fraction of the
        margin over chance, or None if there was no margin.

    Raises:
        KfacpackError: If an α is negative, `keep` is out of range, or the control is one of the targets.
    """
    check_alphas(vector, alphas)
    if negative := [alpha for alpha in alphas if alpha < 0]:
        problem = f"alpha {negative[0]:g}: the vector is negated already, so that a negative α would add it"
        raise KfacpackError(f"{problem}; expected zero or positive values")
    if not 0 < keep <= 1:
        raise KfacpackError(f"keep {keep:g}: expected a fraction of the control's accuracy, above 0 and at most 1")
    if control.name in [target.name for target in targets]:
        raise KfacpackError(f"{control.name!r} is a task to forget and cannot be the control; choose another task")
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
    """Returns the index of the selected α.

    Accuracies below chance count as chance: nothing is left to forget, so a larger α would only harm the control.

    Args:
        targets: For each target, its scores at increasing α, the first at zero.
        control: Scores of the control at the same α.
        keep: Fraction of the control's accuracy to keep.
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
