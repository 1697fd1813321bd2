"""By how much task vectors move f on a task's examples. N examples, V vectors, C the width of f.

In the linear regime f moves by J τ, in the others by f(θ0 + τ) − f(θ0).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfacpack.errors import KfacpackError, NotFiniteError, printable
from kfacpack.evaluation.edited import edited
from kfacpack.function.parameters import choose
from kfacpack.linear.linearize import Linearized
from kfacpack.models.outputs import outputs

if TYPE_CHECKING:
    from kfacpack.evaluation.accuracy import Exam
    from kfacpack.evaluation.edited import Forward
    from kfacpack.models.base import Batch, Model
    from kfacpack.running.progress import Count
    from kfacpack.vectors.vector import TaskVector


def moves(
    model: Model, exam: Exam, vectors: Sequence[TaskVector], batch_size: int, count: Count
) -> Iterator[tuple[Tensor, Tensor]]:
    """For some examples after the other, f of the model as it is, (N, C), and its change by each vector, (V, N, C).

    The vectors are of one base model and one regime (see `require_one_kind`).
    """
    first, *others = _passes(model, vectors)
    if not others:
        with first as forward:
            for found in f_of(model, exam, forward, batch_size, count):
                f, *changes = found.chunk(1 + len(vectors), dim=1)
                yield f, torch.stack(changes)
        return
    every = []
    for each in (first, *others):
        with each as forward:
            every.append(torch.cat(list(f_of(model, exam, forward, batch_size, count))))
    f, *moved = every
    yield f, torch.stack(moved) - f


def looks(model: Model, vectors: Sequence[TaskVector]) -> int:
    """How many times `moves` looks at each example, and counts it."""
    return len(_passes(model, vectors))


def _passes(model: Model, vectors: Sequence[TaskVector]) -> list[AbstractContextManager[Forward]]:
    """What all examples are put through, one after the other: f and every J τ in one pass, in the linear regime.

    In the others f alone, then f with each vector: putting one in takes longer than a batch does.
    """
    if vectors[0].is_linear:
        return [_tangents(model, vectors)]
    return [edited(model, vector) for vector in (None, *vectors)]


def f_of(model: Model, exam: Exam, forward: Forward, batch_size: int, count: Count) -> Iterator[Tensor]:
    """What `forward` makes of the exam's examples, in their order, batch by batch."""
    for chosen, f in outputs(model, exam.split, exam.task.name, exam.numbers, batch_size, forward):
        yield f
        count.add(len(chosen))


def require_one_kind(vectors: Sequence[TaskVector]) -> None:
    """Refuse vectors of different base models, parameters, regimes or f, naming what differs."""
    if not vectors:
        raise KfacpackError("there is no task vector to measure")
    sum(vectors)


def by_task(exams: Sequence[Exam]) -> dict[str, Exam]:
    found = {exam.task.name: exam for exam in exams}
    if len(found) < len(exams):
        names = printable(", ".join(exam.task.name for exam in exams))
        raise KfacpackError(f"expected the examples of different tasks, found {names}")
    return found


@contextmanager
def _tangents(model: Model, vectors: Sequence[TaskVector]) -> Iterator[Forward]:
    """A batch -> f and J τ of each vector side by side, (N, (1 + V) C)."""
    vectors[0].check(model.module, model.function)  # the others are of the same base model
    wanted = choose(model.module, list(vectors[0]))
    linearized = Linearized(model.module, model.forward, wanted)
    taus = [{name: vector[name].to(parameter.device) for name, parameter in wanted.items()} for vector in vectors]

    def forward(batch: Batch) -> Tensor:
        pairs = [linearized.outputs(batch, tau) for tau in taus]
        if not all(bool(change.isfinite().all()) for _, change in pairs):
            raise NotFiniteError("J τ has numbers that are not finite")
        return torch.cat([pairs[0][0], *(change for _, change in pairs)], dim=1)

    yield forward
