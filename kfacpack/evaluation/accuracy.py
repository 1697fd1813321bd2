"""How far long work is, for whoever wants to hear.

How often a model with a head is right on a task's examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TypeAlias

import torch
from torch import Tensor

from kfacpack.errors import KfacpackError, NotFiniteError, printable
from kfacpack.evaluation.edited_model import device_of, forward_passes
from kfacpack.format.identity import base_task_name
from kfacpack.models.data_loading import name_task_in_errors, prepare_batch
from kfacpack.models.functional import tensors_of
from kfacpack.models.heads import Head, head_for, known_classes, require_fitting
from kfacpack.models.model import Batch, Model
from kfacpack.tasks.task import Split, Task, parse_count, sample_indices
from kfacpack.vectors.task_vector import TaskVector

OnProgress: TypeAlias = Callable[[int, int], None]
"""Hears how much is done, and how much there is."""


class ProgressCounter:
    """Several pieces of work, heard of as one."""

    def __init__(self, total: int, on_progress: OnProgress):
        self._done, self._total, self._on_progress = 0, total, on_progress
        on_progress(0, total)

    def add(self, more: int) -> None:
        self._done += more
        self._on_progress(self._done, self._total)

    def piece(self) -> OnProgress:
        """What a piece that counts by itself is to tell."""
        before = self._done
        return lambda done, total: self.add(before + done - self._done)


@dataclass(frozen=True)
class EvaluationSet:
    """Examples of a task with their labels: found, and checked, before any model is asked."""

    task: Task
    split: Split
    numbers: Sequence[int]
    """The examples that are taken, by their place in the split."""
    labels: Sequence[int]

    @classmethod
    def of(cls, task: Task, split: str = "test", examples: str = "all", seed: int = 0) -> EvaluationSet:
        """`examples`: "all", a number or a share of the split's, drawn by the seed."""
        known_classes(task)
        found = task.split(split)
        if not len(found):
            raise KfacpackError(f"{printable(task.name)}: split {split!r} has no examples")
        numbers = sample_indices(len(found), parse_count(examples, len(found)), seed)
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
    alpha: float = 1.0,
    examples: str = "all",
    seed: int = 0,
    batch_size: int = 64,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Score:
    """The share of examples whose own class has the largest logit, with α times a task vector if one is given.

    The head is the one given, else the vector's own for this task, else `kp.head_for(model, task)`.
    """
    exam = EvaluationSet.of(task, split, examples, seed)
    head = head or head_of(model, task, vector)
    return score(model, head, exam, vector=vector, alpha=alpha, batch_size=batch_size, on_progress=on_progress)


def head_of(model: Model, task: Task, vector: TaskVector | None) -> Head:
    """The vector's own head for the task, or the one that is made without it."""
    return vector_head(task, vector) or head_for(model, task)


def vector_head(task: Task, vector: TaskVector | None) -> Head | None:
    """The one that a vector has for the task; else the one that it has for parts of it, whose classes are the same."""
    heads = vector.heads if vector else {}
    if task.name in heads:
        return heads[task.name]
    whole = base_task_name(task.name)
    of_parts = [(name, head) for name, head in heads.items() if base_task_name(name) == whole]
    if not of_parts:
        return None
    (first, found), *others = of_parts
    for name, head in others:
        if difference := found.difference(head):
            problem = f"the vector's heads for {printable(first)} and {printable(name)} are not the same: {difference}"
            raise KfacpackError(f"{printable(task.name)}: {problem}. Choose one with --head")
    return found


def score(
    model: Model,
    head: Head,
    exam: EvaluationSet,
    *,
    vector: TaskVector | None = None,
    alpha: float = 1.0,
    batch_size: int = 64,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Score:
    """`on_progress` hears how many examples are done, and how many there are."""
    return scores(model, head, exam, vector, (alpha,), batch_size=batch_size, on_progress=on_progress)[0]


def scores(
    model: Model,
    head: Head,
    exam: EvaluationSet,
    vector: TaskVector | None,
    alphas: Sequence[float],
    *,
    batch_size: int = 64,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Score]:
    """The score with each α τ: what asking for them one by one gives, to the bit, since one by one is done here, too.

    `on_progress` hears how many examples are done and how many there are: in one pass for a linearised vector, else
    in one for each α.
    """
    task = exam.task
    require_fitting(head, task)
    check_alphas(vector, alphas)
    head = head.to(device_of(model))
    runs = forward_passes(model, vector, alphas)
    batches = _PreparedBatches(model, exam, batch_size, keep=len(runs) > 1)
    total = len(runs) * len(exam.numbers)
    correct: list[int] = []
    done = 0
    on_progress(done, total)
    for each in runs:
        found: Sequence[int] = ()
        with each as forwards:
            for chosen, batch, labels in batches:
                with torch.no_grad(), name_task_in_errors(exam.split, task.name, chosen):
                    right = [int((_predictions(head, f) == labels).sum()) for f in forwards(batch)]
                found = [before + more for before, more in zip(found or [0] * len(right), right, strict=True)]
                done += len(chosen)
                on_progress(done, total)
        correct += found
    return [Score(count, len(exam.numbers)) for count in correct]


def _predictions(head: Head, f: Tensor) -> Tensor:
    """(N,), the class of the largest logit. Among numbers that are none there is no largest."""
    logits = head.logits(f)
    if not bool(logits.isfinite().all()):
        raise NotFiniteError("logits have numbers that are not finite")
    return logits.argmax(1).cpu()


def count_examples(
    model: Model, vector: TaskVector | None, alphas: Sequence[float], exams: Iterable[EvaluationSet]
) -> int:
    """How many examples `scores` goes through for these exams."""
    return len(forward_passes(model, vector, alphas)) * sum(len(exam.numbers) for exam in exams)


def check_alphas(vector: TaskVector | None, alphas: Sequence[float]) -> None:
    if vector is None and tuple(alphas) != (1.0,):
        raise KfacpackError("alpha is what a vector is multiplied by: give a vector as well")
    if not alphas:
        raise KfacpackError("there is no alpha to evaluate at; name at least one")
    if wrong := [alpha for alpha in alphas if not isfinite(alpha)]:
        raise KfacpackError(f"a task vector cannot be multiplied by {wrong[0]}")


class _PreparedBatches:
    """An exam's batches, to go through several times: read and prepared once, as long as they need little memory."""

    MOST = 512_000_000

    def __init__(self, model: Model, exam: EvaluationSet, batch_size: int, *, keep: bool) -> None:
        self._model, self._exam, self._batch_size = model, exam, batch_size
        self._room = self.MOST if keep else 0
        self._kept: list[tuple[Sequence[int], Batch, Tensor]] | None = None

    def __iter__(self) -> Iterator[tuple[Sequence[int], Batch, Tensor]]:
        """The examples' numbers, the batch, and their labels, (N,)."""
        if self._kept is not None:
            yield from self._kept
            return
        exam, kept = self._exam, []
        label_of = dict(zip(exam.numbers, exam.labels, strict=True))
        for chosen, batch in prepare_batch(self._model, exam.split, exam.task.name, exam.numbers, self._batch_size):
            made = chosen, batch, torch.tensor([label_of[number] for number in chosen])
            self._room -= sum(tensor.nbytes for tensor in tensors_of(batch))
            if self._room >= 0:
                kept.append(made)
            else:
                kept.clear()
            yield made
        if self._room >= 0:
            self._kept = kept
