"""Forgetting a task: as much of −α τ as a control task bears."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from kfacpack.errors import KfacpackError
from kfacpack.evaluation.accuracy import ProgressCounter, Score, check_alphas, count_examples, scores
from kfacpack.format.units import OnProgress

if TYPE_CHECKING:
    from kfacpack.evaluation.accuracy import EvaluationSet
    from kfacpack.evaluation.sweep import SelectionTask
    from kfacpack.models.heads import Head
    from kfacpack.models.model import Model
    from kfacpack.vectors.task_vector import TaskVector


CONTROL_KEEP = 0.95
"""The share of its accuracy that the control task keeps, in this literature."""


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
) -> dict[str, Any]:
    """What −α τ takes from the targets, at the α that takes most while the control keeps its share.

    On the validation splits, α is the one of `alphas`, magnitudes, at which the targets' mean accuracy is least, chance
    being the least there is, among those at which the control has at least `keep` of its accuracy without the vector;
    of several, the smallest. Zero is always among them. Then the test splits are asked, at this α and at zero:

    {"control": its name, "keep": keep, "tasks": {target: {"alpha", "accuracy", "before", "chance", "removed",
    "control", "control_before"}}}, where `removed` is the share of the margin over chance, one in the number of
    classes, that is taken away, or None where there was no margin.
    """
    check_alphas(vector, alphas)
    if wrong := [alpha for alpha in alphas if alpha < 0]:
        problem = f"alpha {wrong[0]:g}: the vector is negated already, so that α is a magnitude"
        raise KfacpackError(f"{problem}; expected zero or more, such as 0:1:0.05")
    if not 0 < keep <= 1:
        raise KfacpackError(f"keep {keep:g}: expected the share of the control's accuracy to keep, above 0, up to 1")
    if control.name in [target.name for target in targets]:
        raise KfacpackError(f"{control.name!r} is to be forgotten, and cannot be the control as well; name another")
    candidates = [0.0, *sorted({float(alpha) for alpha in alphas} - {0.0})]
    everyone = [*targets, control]
    total = count_examples(model, vector, candidates, [each.validation for each in everyone])
    count = ProgressCounter(
        total + count_examples(model, vector, [0.0, 1.0], [each.test for each in everyone]), on_progress
    )
    negated = -vector

    def asked(head: Head, exam: EvaluationSet, alphas: Sequence[float]) -> list[Score]:
        return scores(model, head, exam, negated, alphas, batch_size=batch_size, on_progress=count.piece())

    found = [asked(each.head, each.validation, candidates) for each in everyone]
    alpha = candidates[choose_negation_alpha(found[:-1], found[-1], keep, [len(each.head.classes) for each in targets])]
    before, after = zip(*(asked(each.head, each.test, [0.0, alpha]) for each in everyone), strict=True)
    tasks = {
        target.name: {
            "alpha": alpha,
            **_scores_at(after[k], before[k], len(target.head.classes)),
            "control": after[-1].accuracy,
            "control_before": before[-1].accuracy,
        }
        for k, target in enumerate(targets)
    }
    return {"control": control.name, "keep": keep, "tasks": tasks}


def choose_negation_alpha(
    targets: Sequence[Sequence[Score]], control: Sequence[Score], keep: float, classes: Sequence[int]
) -> int:
    """The number of the α, given the scores of each target and of the control at rising α, the first at zero.

    Below chance nothing is left to forget, so that an α which only goes further there does not pay with the control.
    """

    def left(k: int) -> Fraction:
        scores = [each[k] for each in targets]
        shares = (Fraction(each.correct, each.examples) for each in scores)
        return sum((max(share, Fraction(1, count)) for share, count in zip(shares, classes, strict=True)), Fraction(0))

    least = Fraction(str(keep)) * control[0].correct
    borne = [k for k, each in enumerate(control) if each.correct >= least]
    return min(borne, key=left)


def _scores_at(after: Score, before: Score, classes: int) -> dict[str, float | None]:
    chance = 1 / classes
    margin = before.accuracy - chance
    removed = (before.accuracy - after.accuracy) / margin if margin > 0 else None
    return {"accuracy": after.accuracy, "before": before.accuracy, "chance": chance, "removed": removed}
