"""Forward passes of a model with task vectors, and the change of its outputs by them.

A vector of the linear regime is evaluated as f + α J τ, as it was trained; others are added to the weights. The change
of f is J τ in the linear regime, and f(θ0 + τ) − f(θ0) in the others.

Notation: N is the number of examples, V the number of vectors, C the width of f.
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
    from collections.abc import Mapping

    from kfacpack.evaluation.accuracy import EvaluationSet, ProgressCounter
    from kfacpack.models.model import Batch, Model
    from kfacpack.vectors.task_vector import TaskVector

    BatchForward = Callable[[Batch], Tensor]
    """Maps a batch to f, (N, C), without gradient."""

    BatchForwards = Callable[[Batch], list[Tensor]]
    """Maps a batch to f with each of several multiples of a vector, each (N, C), without gradient."""


@contextmanager
def edited_model(model: Model, vector: TaskVector | None, alpha: float = 1.0) -> Iterator[BatchForward]:
    """Context manager that yields f of the model with α τ; the model is restored afterwards.

    Args:
        model: The model.
        vector: Task vector, or None for the model itself.
        alpha: Coefficient of the vector.
    """
    (only,) = forward_passes(model, vector, (alpha,))
    with only as forwards:
        yield lambda batch: forwards(batch)[0]


def forward_passes(
    model: Model, vector: TaskVector | None, alphas: Sequence[float]
) -> list[AbstractContextManager[BatchForwards]]:
    """Returns the passes over the data that are needed to compute f with α τ for every α.

    A linear vector needs one pass, which computes f and J τ; others need one pass per α.

    Returns:
        Context managers of functions from a batch to outputs; concatenated over the passes, the outputs are in the
        order of `alphas`.
    """
    if vector is None:
        return [_unedited(model)]
    if vector.is_linear:
        return [_linearized(model, vector, alphas)]
    return [_applied(model, alpha * vector) for alpha in alphas]


def device_of(model: Model) -> torch.device:
    """Returns the device of the model's parameters."""
    return next(model.module.parameters()).device


@contextmanager
def _linearized(model: Model, vector: TaskVector, alphas: Sequence[float]) -> Iterator[BatchForwards]:
    vector.check(model.module, model.function)
    # J is applied to the unscaled vector, so that 0.3 τ at α = 1 is bitwise equal to τ at α = 0.3.
    factor, direction = vector.as_multiple()
    linearized, (tau,) = _linearized_along(model, [direction])

    def forwards(batch: Batch) -> list[Tensor]:
        f, change = map(at_least_float32, linearized.outputs(batch, tau))
        _require_finite(change)
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
    model: Model,
    evaluation_set: EvaluationSet,
    vectors: Sequence[TaskVector],
    batch_size: int,
    counter: ProgressCounter,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields f of the unedited model, (N, C), and its change by each vector, (V, N, C), for groups of examples.

    Args:
        model: The model.
        evaluation_set: The examples.
        vectors: Vectors of one base model and one regime; see `require_compatible_vectors`.
        batch_size: Examples per forward pass.
        counter: Counts each example `passes_needed` times.
    """
    first, *others = _passes(model, vectors)
    if not others:
        with first as forward:
            for side_by_side in outputs_of(model, evaluation_set, forward, batch_size, counter):
                f, *changes = side_by_side.chunk(1 + len(vectors), dim=1)
                yield f, torch.stack(changes)
        return
    results = []
    for forward_pass in (first, *others):
        with forward_pass as forward:
            results.append(torch.cat(list(outputs_of(model, evaluation_set, forward, batch_size, counter))))
    f, *edited = results
    yield f, torch.stack(edited) - f


def passes_needed(model: Model, vectors: Sequence[TaskVector]) -> int:
    """Returns how many times `output_changes` processes, and counts, each example."""
    return len(_passes(model, vectors))


def _passes(model: Model, vectors: Sequence[TaskVector]) -> list[AbstractContextManager[BatchForward]]:
    """Returns the passes over the examples: in the linear regime one pass for f and every J τ.

    In other regimes there is one pass for f and one per vector, because applying a vector takes longer than a batch.
    """
    if vectors[0].is_linear:
        return [_tangents(model, vectors)]
    return [edited_model(model, vector) for vector in (None, *vectors)]


def outputs_of(
    model: Model, evaluation_set: EvaluationSet, forward: BatchForward, batch_size: int, counter: ProgressCounter
) -> Iterator[Tensor]:
    """Yields the outputs of `forward` on the examples, in order, batch by batch."""
    split, task = evaluation_set.split, evaluation_set.task.name
    for numbers, f in outputs(model, split, task, evaluation_set.numbers, batch_size, forward):
        yield f
        counter.add(len(numbers))


def require_compatible_vectors(vectors: Sequence[TaskVector]) -> None:
    """Checks that there are vectors, and that they have the same base model, parameters, regime and f.

    Raises:
        KfacpackError: If there are no vectors, or they differ; the message names the difference.
    """
    if not vectors:
        raise KfacpackError("nothing to measure: expected at least one task vector, got 0")
    sum(vectors)  # addition checks all of this


def by_task_name(evaluation_sets: Sequence[EvaluationSet]) -> dict[str, EvaluationSet]:
    """Returns the evaluation sets by the names of their tasks.

    Raises:
        KfacpackError: If two are of the same task.
    """
    by_name = {evaluation_set.task.name: evaluation_set for evaluation_set in evaluation_sets}
    if len(by_name) < len(evaluation_sets):
        names = printable(", ".join(evaluation_set.task.name for evaluation_set in evaluation_sets))
        raise KfacpackError(f"expected examples of different tasks, got {names}")
    return by_name


@contextmanager
def _tangents(model: Model, vectors: Sequence[TaskVector]) -> Iterator[BatchForward]:
    """Yields a function from a batch to f and J τ of each vector side by side, (N, (1 + V) C)."""
    vectors[0].check(model.module, model.function)  # the others have the same base model
    linearized, taus = _linearized_along(model, vectors)

    def forward(batch: Batch) -> Tensor:
        pairs = [linearized.outputs(batch, tau) for tau in taus]
        for _, change in pairs:
            _require_finite(change)
        return torch.cat([pairs[0][0], *(change for _, change in pairs)], dim=1)

    yield forward


def _linearized_along(
    model: Model, vectors: Sequence[Mapping[str, Tensor]]
) -> tuple[Linearized, list[dict[str, Tensor]]]:
    """Returns the model linearised in the vectors' parameters, and the vectors on its device."""
    parameters = select_parameters(model.module, list(vectors[0]))
    taus = [{name: vector[name].to(parameter.device) for name, parameter in parameters.items()} for vector in vectors]
    return Linearized(model.module, model.forward, parameters), taus


def _require_finite(change: Tensor) -> None:
    if not bool(change.isfinite().all()):
        raise NotFiniteError("J τ contains NaN or Inf")
