"""How often a model with a head is right on a task's examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kfacpack.errors import KfacpackError, printable
from kfacpack.evaluation.edited import device_of, edited
from kfacpack.heads import Head, head_for, known_classes
from kfacpack.models.base import Model
from kfacpack.models.outputs import outputs
from kfacpack.tasks.base import Split, Task
from kfacpack.tasks.sampling import drawn, how_many
from kfacpack.vectors.vector import TaskVector


@dataclass(frozen=True)
class Exam:
    """Examples of a task with their labels: found, and checked, before any model is asked."""

    task: Task
    split: Split
    numbers: Sequence[int]
    """The examples that are taken, by their place in the split."""
    labels: Sequence[int]

    @classmethod
    def of(cls, task: Task, split: str = "test", examples: str = "all", seed: int = 0) -> Exam:
        """`examples`: "all", a number or a share of the split's, drawn by the seed."""
        known_classes(task)
        found = task.split(split)
        if not len(found):
            raise KfacpackError(f"{printable(task.name)}: split {split!r} has no examples")
        numbers = drawn(len(found), how_many(examples, len(found)), seed)
        return cls(task, found, numbers, [found.label(number) for number in numbers])


@dataclass(frozen=True)
class Score:
    correct: int
    examples: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.examples


def evaluate(
    model: Model,
    task: Task,
    head: Head | None = None,
    split: str = "test",
    *,
    vector: TaskVector | None = None,
    examples: str = "all",
    seed: int = 0,
    batch_size: int = 64,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Score:
    """The share of examples whose own class has the largest logit, with a task vector if one is given.

    The head is the one given, else the vector's own for this task, else `kp.head_for(model, task)`.
    """
    exam = Exam.of(task, split, examples, seed)
    head = head or (vector.heads.get(task.name) if vector else None) or head_for(model, task)
    return score(model, head, exam, vector=vector, batch_size=batch_size, on_progress=on_progress)


def score(
    model: Model,
    head: Head,
    exam: Exam,
    *,
    vector: TaskVector | None = None,
    batch_size: int = 64,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Score:
    """`on_progress` hears how many examples are done, and how many there are."""
    task, total = exam.task, len(exam.numbers)
    if head.classes != task.classes:
        raise KfacpackError(f"the head's classes are not those of {printable(task.name)}: make it for this task")
    label_of = dict(zip(exam.numbers, exam.labels, strict=True))
    done = correct = 0
    on_progress(done, total)
    head = head.to(device_of(model))
    with edited(model, vector) as forward:
        for chosen, f in outputs(model, exam.split, task.name, exam.numbers, batch_size, forward):
            labels = torch.tensor([label_of[number] for number in chosen])
            correct += int((head.logits(f).argmax(1).cpu() == labels).sum())
            done += len(chosen)
            on_progress(done, total)
    return Score(correct, total)
