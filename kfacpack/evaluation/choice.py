"""The best α, chosen on validation examples; test examples are asked at that α alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfacpack.errors import KfacpackError, printable
from kfacpack.evaluation.accuracy import Exam, Score, check_alphas, scores, work
from kfacpack.evaluation.sweep import best
from kfacpack.running.progress import Count, OnProgress

if TYPE_CHECKING:
    from kfacpack.heads import Head
    from kfacpack.models.base import Model
    from kfacpack.tasks.base import Task
    from kfacpack.vectors.vector import TaskVector

VALIDATION = "validation"


@dataclass(frozen=True)
class Subject:
    """A task with its head: what is chosen is chosen on `validation`, and told on `test`."""

    head: Head
    validation: Exam
    test: Exam

    @property
    def name(self) -> str:
        return self.test.task.name


@dataclass(frozen=True)
class Choice:
    alpha: float
    alphas: tuple[float, ...]
    """All that it was chosen from."""
    validation: dict[str, list[Score]]
    """A task's name -> its score on the validation split at every one of them."""
    test: dict[str, Score]
    """A task's name -> its score on the test split, at the α that was chosen."""


def validation_exam(task: Task, examples: str = "all", seed: int = 0) -> Exam:
    """As `Exam.of`, where a task that has no validation split is told what to do."""
    if VALIDATION not in task.splits:
        problem = f"{printable(task.name)}: α is chosen on the split {VALIDATION!r}, and never on test, but there are "
        remedy = "Add validation-*.parquet or validation/CLASS/ to its folder, or give the one α to evaluate at"
        raise KfacpackError(f"{problem}only {', '.join(map(printable, task.splits))}. {remedy}")
    return Exam.of(task, VALIDATION, examples, seed)


def choose(
    model: Model,
    subjects: Sequence[Subject],
    vector: TaskVector,
    alphas: Sequence[float],
    *,
    batch_size: int = 64,
    on_progress: OnProgress = lambda done, total: None,
) -> Choice:
    """The α with the largest mean accuracy over the tasks' validation splits; of several, the nearest to 1.

    `on_progress` hears how many examples of all splits are done, and how many there are.
    """
    check_alphas(vector, alphas)
    total = work(model, vector, alphas, [each.validation for each in subjects])
    count = Count(total + work(model, vector, alphas[:1], [each.test for each in subjects]), on_progress)

    def asked(head: Head, exam: Exam, alphas: Sequence[float]) -> list[Score]:
        return scores(model, head, exam, vector, alphas, batch_size=batch_size, on_progress=count.piece())

    validation = {each.name: asked(each.head, each.validation, alphas) for each in subjects}
    alpha = alphas[best(alphas, list(validation.values()))]
    test = {each.name: asked(each.head, each.test, [alpha])[0] for each in subjects}
    return Choice(alpha, tuple(alphas), validation, test)
