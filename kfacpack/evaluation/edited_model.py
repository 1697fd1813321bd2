"""Forward passes of a model with task vectors added, and the resulting changes in its outputs.

With a vector τ that was trained in the linear regime, the output is f + α J τ, as in training. Other vectors are added
to the weights. For α = 1, the change in f is therefore J τ in the linear regime and f(θ0 + τ) − f(θ0) in other regimes.

Notation: f is the output of the model, J its Jacobian at the base weights θ0. N is the number of examples, V the number
of vectors, C the width of f.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfacpack.errors import KfacpackError, NotFiniteError, printable
from kfacpack.linearization.linearize import Linearized
from kfacpack.models.data_loading import name_task_in_errors, outputs, prepared_batches
from kfacpack.models.functional import at_least_float32, call_model, select_parameters
from kfacpack.tasks.task import batched

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kfacpack.evaluation.accuracy import EvaluationSet, ProgressCounter
    from kfacpack.models.model import Batch, Model
    from kfacpack.vectors.task_vector import TaskVector

    BatchForward = Callable[[Batch], Tensor]
    """Function that maps a batch to f, (N, C), without gradients."""

    FAndChange = tuple[Tensor, Tensor]
    """f and J τ of a batch, each (N, C)."""

    BatchForwards = Callable[[Batch], list[Tensor]]
    """Function that maps a batch to a list of outputs f, (N, C), one per multiple of a vector, without gradients."""


@contextmanager
def edited_model(model: Model, vector: TaskVector | None, alpha: float = 1.0) -> Iterator[BatchForward]:
    """Context manager that adds α times a vector to a model, yields a function that computes f, and restores the model.

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
    """Returns the passes over the data that are needed to compute f with α times a vector added, for every α.

    A linear vector needs one pass, which computes f and J τ. Other vectors need one pass per α.

    Returns:
        One context manager per pass, in the order of `alphas`. Each context manager yields a function that maps a batch
        to a list of outputs, one for each α of the pass.
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
    # J is applied to the unscaled vector, so that the results for 0.3 τ at α = 1 and τ at α = 0.3 are bitwise equal.
    factor, direction = vector.as_multiple()
    linearized, (tau,) = _linearized_along(model, [direction])
    yield lambda batch: multiples(*_f_and_change(linearized, batch, tau), factor, alphas)


def multiples(f: Tensor, change: Tensor, factor: float, alphas: Sequence[float]) -> list[Tensor]:
    """Returns the outputs of a model with α times a linear vector added, for each α, as a list of tensors, (N, C).

    Args:
        f: Output of the unedited model, (N, C).
        change: J τ, (N, C), where τ is the vector divided by `factor`.
        factor: Factor by which τ is multiplied to get the vector; see `TaskVector.as_multiple`.
        alphas: Coefficients of the vector.
    """
    return [f + (alpha * factor) * change for alpha in alphas]


def _f_and_change(linearized: Linearized, batch: Batch, tau: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns f and J τ, each (N, C), in at least float32."""
    f, change = map(at_least_float32, linearized.outputs(batch, tau))
    if not bool(change.isfinite().all()):
        raise NotFiniteError("J τ, the change that the vector causes in f, contains NaN or Inf")
    return f, change


class OutputCache:
    """A cache for f and J τ of linear vectors on one evaluation set.

    Several measurements can share the cache. When it is full, the least recently used results are discarded.

    Args:
        max_bytes: Maximum total size of the results in bytes.
    """

    def __init__(self, max_bytes: int = 64_000_000):
        self.max_bytes = max_bytes
        """Maximum total size of the results in bytes."""
        self._results: OrderedDict[Hashable, Sequence[FAndChange]] = OrderedDict()

    def get(self, key: Hashable) -> Sequence[FAndChange] | None:
        """Returns f and J τ of each batch, or None if they are not in the cache."""
        if key in self._results:
            self._results.move_to_end(key)
        return self._results.get(key)

    def put(self, key: Hashable, batches: Sequence[FAndChange]) -> None:
        """Stores f and J τ of each batch. If the cache is full, the least recently used results are discarded."""
        self._results[key] = batches
        self._results.move_to_end(key)
        while (
            sum(f.nbytes + change.nbytes for stored in self._results.values() for f, change in stored) > self.max_bytes
        ):
            self._results.popitem(last=False)


def linear_outputs(
    model: Model, evaluation_set: EvaluationSet, directions: Sequence[TaskVector], batch_size: int
) -> Iterator[tuple[Sequence[int], Tensor, list[Tensor]]]:
    """Yields f and J τ of several linear vectors, batch by batch.

    If the evaluation set has a cache, results are read from the cache and stored in it.

    Args:
        model: The model.
        evaluation_set: The examples.
        directions: Linear vectors with the same base model.
        batch_size: Examples per forward pass.

    Yields:
        For each batch, the indices of its examples; f, (N, C); and a list with J τ, (N, C), for each vector.
    """
    directions[0].check(model.module, model.function)  # the others have the same base model
    cache = evaluation_set.outputs
    if cache and 8 * len(evaluation_set.numbers) * model.function.width > cache.max_bytes:  # f and J τ in float32
        cache = None
    keys = [(id(model.module), direction.digest, batch_size) for direction in directions] if cache else []
    stored = [cache.get(key) for key in keys] if cache else [None] * len(directions)
    missing = [direction for direction, batches in zip(directions, stored, strict=True) if batches is None]
    results: list[list[FAndChange]] = []
    with closing(_computed_outputs(model, evaluation_set, missing, batch_size)) as computed:
        for number, numbers in enumerate(batched(evaluation_set.numbers, batch_size)):
            new = iter(next(computed) if missing else ())
            pairs = [next(new) if batches is None else batches[number] for batches in stored]
            if cache:
                results.append(pairs)
            yield numbers, pairs[0][0], [change for _, change in pairs]
    if cache:
        for key, batches in zip(keys, zip(*results, strict=True), strict=True):
            cache.put(key, batches)


def _computed_outputs(
    model: Model, evaluation_set: EvaluationSet, directions: Sequence[TaskVector], batch_size: int
) -> Generator[list[FAndChange], None, None]:
    """Computes f and J τ batch by batch, and yields a list with a pair (f, J τ) for each vector."""
    linearized, taus = _linearized_along(model, directions)
    split, task = evaluation_set.split, evaluation_set.task.name
    for numbers, batch in prepared_batches(model, split, task, evaluation_set.numbers, batch_size):
        with torch.no_grad(), name_task_in_errors(split, task, numbers):
            results = [_f_and_change(linearized, batch, tau) for tau in taus]
        yield results


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
    """Yields f of the unedited model, (N, C), and the changes in f that the vectors cause, (V, N, C).

    In the linear regime, one pair is yielded for each batch of N examples. In other regimes, a single pair is yielded
    for all examples.

    Args:
        model: The model.
        evaluation_set: The examples.
        vectors: Vectors with the same base model and regime; see `require_compatible_vectors`.
        batch_size: Examples per forward pass.
        counter: Progress counter. Each example is counted once per pass; see `passes_needed`.
    """
    if vectors[0].is_linear:
        factors, directions = zip(*(vector.as_multiple() for vector in vectors), strict=True)
        for numbers, f, changes in linear_outputs(model, evaluation_set, directions, batch_size):
            yield f, torch.stack([factor * change for factor, change in zip(factors, changes, strict=True)])
            counter.add(len(numbers))
        return
    results = []
    for vector in (None, *vectors):
        with edited_model(model, vector) as forward:
            results.append(torch.cat(list(outputs_of(model, evaluation_set, forward, batch_size, counter))))
    f, *edited = results
    yield f, torch.stack(edited) - f


def passes_needed(vectors: Sequence[TaskVector]) -> int:
    """Returns the number of passes over the examples that `output_changes` makes.

    In the linear regime, one pass computes f and every J τ. In other regimes, there is one pass for f and one for each
    vector. Adding a vector to the weights takes longer than a forward pass, so each vector is added only once.
    """
    return 1 if vectors[0].is_linear else 1 + len(vectors)


def outputs_of(
    model: Model, evaluation_set: EvaluationSet, forward: BatchForward, batch_size: int, counter: ProgressCounter
) -> Iterator[Tensor]:
    """Yields the outputs of `forward` on the examples of an evaluation set, batch by batch."""
    split, task = evaluation_set.split, evaluation_set.task.name
    for numbers, f in outputs(model, split, task, evaluation_set.numbers, batch_size, forward):
        yield f
        counter.add(len(numbers))


def require_compatible_vectors(vectors: Sequence[TaskVector]) -> None:
    """Checks that there is at least one vector, and that the vectors can be added; see `vectors.sums.check_addable`.

    Raises:
        KfacpackError: If there are no vectors, or if their base models, regimes or functions f differ.
    """
    if not vectors:
        raise KfacpackError("nothing to measure: expected at least one task vector, got 0")
    sum(vectors)  # addition checks these conditions


def by_task_name(evaluation_sets: Sequence[EvaluationSet]) -> dict[str, EvaluationSet]:
    """Returns the evaluation sets by task name.

    Raises:
        KfacpackError: If two evaluation sets contain examples of the same task.
    """
    by_name = {evaluation_set.task.name: evaluation_set for evaluation_set in evaluation_sets}
    if len(by_name) < len(evaluation_sets):
        names = printable(", ".join(evaluation_set.task.name for evaluation_set in evaluation_sets))
        raise KfacpackError(f"expected examples of different tasks, got {names}")
    return by_name


def _linearized_along(
    model: Model, vectors: Sequence[Mapping[str, Tensor]]
) -> tuple[Linearized, list[dict[str, Tensor]]]:
    """Returns the model linearised in the parameters of the vectors, and the vectors on the device of the model."""
    parameters = select_parameters(model.module, list(vectors[0]))
    taus = [{name: vector[name].to(parameter.device) for name, parameter in parameters.items()} for vector in vectors]
    return Linearized(model.module, model.forward, parameters), taus
