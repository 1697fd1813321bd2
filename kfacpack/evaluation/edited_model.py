"""A model with a task vector: linearised ones as they were trained, others added to the weights.

By how much task vectors move f on a task's examples. N examples, V vectors, C the width of f.

In the linear regime f moves by J τ, in the others by f(θ0 + τ) − f(θ0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfacpack.errors import KfacpackError, NotFiniteError, printable
from kfacpack.linearization.linearize import Linearized
from kfacpack.models.data_loading import outputs
from kfacpack.models.functional import at_least_float32, call_model, select_parameters

if TYPE_CHECKING:
    from kfacpack.evaluation.accuracy import EvaluationSet, ProgressCounter
    from kfacpack.models.model import Batch, Model
    from kfacpack.vectors.task_vector import TaskVector

    BatchForward = Callable[[Batch], Tensor]

    """A batch -> f, (N, C), without gradient."""

    BatchForwards = Callable[[Batch], list[Tensor]]

    """A batch -> f with each of some multiples of a vector, each (N, C), without gradient."""


@contextmanager
def edited_model(model: Model, vector: TaskVector | None, alpha: float = 1.0) -> Iterator[BatchForward]:
    """f of the model with α τ, as long as the context lasts; the model is then as it was."""
    (only,) = forward_passes(model, vector, (alpha,))
    with only as forwards:
        yield lambda batch: forwards(batch)[0]


def forward_passes(
    model: Model, vector: TaskVector | None, alphas: Sequence[float]
) -> list[AbstractContextManager[BatchForwards]]:
    """How often the data has to be gone through for f with every α τ: what each pass gives, in a row, is as `alphas`.

    A linearised vector needs one pass, f and J τ, whatever the α; others one for each.
    """
    if vector is None:
        return [_unedited(model)]
    if vector.is_linear:
        return [_linearized(model, vector, alphas)]
    return [_applied(model, alpha * vector) for alpha in alphas]


def device_of(model: Model) -> torch.device:
    return next(model.module.parameters()).device


@contextmanager
def _linearized(model: Model, vector: TaskVector, alphas: Sequence[float]) -> Iterator[BatchForwards]:
    vector.check(model.module, model.function)
    # J is applied to what it was before anybody multiplied it: 0.3 τ at α = 1 is then τ at α = 0.3, to the bit.
    factor, direction = vector.as_multiple()
    wanted = select_parameters(model.module, list(direction))
    linearized = Linearized(model.module, model.forward, wanted)
    tau = {name: direction[name].to(parameter.device) for name, parameter in wanted.items()}

    def forwards(batch: Batch) -> list[Tensor]:
        f, change = map(at_least_float32, linearized.outputs(batch, tau))
        if not bool(change.isfinite().all()):
            raise NotFiniteError("J τ has numbers that are not finite")
        return [f + (alpha * factor) * change for alpha in alphas]

    yield forwards


@contextmanager
def _applied(model: Model, vector: TaskVector) -> Iterator[BatchForwards]:
    with vector.applied(model.module, model.function), _unedited(model) as forwards:
        yield forwards


@contextmanager
def _unedited(model: Model) -> Iterator[BatchForwards]:
    def forwards(batch: Batch) -> list[Tensor]:
        with torch.no_grad():
            return [at_least_float32(call_model(model.forward, batch))]

    yield forwards


def output_changes(
    model: Model, exam: EvaluationSet, vectors: Sequence[TaskVector], batch_size: int, count: ProgressCounter
) -> Iterator[tuple[Tensor, Tensor]]:
    """For some examples after the other, f of the model as it is, (N, C), and its change by each vector, (V, N, C).

    The vectors are of one base model and one regime (see `require_one_kind`).
    """
    first, *others = _passes(model, vectors)
    if not others:
        with first as forward:
            for found in output_of(model, exam, forward, batch_size, count):
                f, *changes = found.chunk(1 + len(vectors), dim=1)
                yield f, torch.stack(changes)
        return
    every = []
    for each in (first, *others):
        with each as forward:
            every.append(torch.cat(list(output_of(model, exam, forward, batch_size, count))))
    f, *moved = every
    yield f, torch.stack(moved) - f


def passes_needed(model: Model, vectors: Sequence[TaskVector]) -> int:
    """How many times `moves` looks at each example, and counts it."""
    return len(_passes(model, vectors))


def _passes(model: Model, vectors: Sequence[TaskVector]) -> list[AbstractContextManager[BatchForward]]:
    """What all examples are put through, one after the other: f and every J τ in one pass, in the linear regime.

    In the others f alone, then f with each vector: putting one in takes longer than a batch does.
    """
    if vectors[0].is_linear:
        return [_tangents(model, vectors)]
    return [edited_model(model, vector) for vector in (None, *vectors)]


def output_of(
    model: Model, exam: EvaluationSet, forward: BatchForward, batch_size: int, count: ProgressCounter
) -> Iterator[Tensor]:
    """What `forward` makes of the exam's examples, in their order, batch by batch."""
    for chosen, f in outputs(model, exam.split, exam.task.name, exam.numbers, batch_size, forward):
        yield f
        count.add(len(chosen))


def require_one_kind(vectors: Sequence[TaskVector]) -> None:
    """Refuse vectors of different base models, parameters, regimes or f, naming what differs."""
    if not vectors:
        raise KfacpackError("there is no task vector to measure")
    sum(vectors)


def named_by_task(exams: Sequence[EvaluationSet]) -> dict[str, EvaluationSet]:
    found = {exam.task.name: exam for exam in exams}
    if len(found) < len(exams):
        names = printable(", ".join(exam.task.name for exam in exams))
        raise KfacpackError(f"expected the examples of different tasks, found {names}")
    return found


@contextmanager
def _tangents(model: Model, vectors: Sequence[TaskVector]) -> Iterator[BatchForward]:
    """A batch -> f and J τ of each vector side by side, (N, (1 + V) C)."""
    vectors[0].check(model.module, model.function)  # the others are of the same base model
    wanted = select_parameters(model.module, list(vectors[0]))
    linearized = Linearized(model.module, model.forward, wanted)
    taus = [{name: vector[name].to(parameter.device) for name, parameter in wanted.items()} for vector in vectors]

    def forward(batch: Batch) -> Tensor:
        pairs = [linearized.outputs(batch, tau) for tau in taus]
        if not all(bool(change.isfinite().all()) for _, change in pairs):
            raise NotFiniteError("J τ has numbers that are not finite")
        return torch.cat([pairs[0][0], *(change for _, change in pairs)], dim=1)

    yield forward
