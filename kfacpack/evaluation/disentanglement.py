"""Disentanglement error and localisation, which measure whether a vector changes the outputs only on its task.

The disentanglement error of two tasks is computed over a grid of coefficients:

    ξ(α1, α2) = Σ_t E_t [ pred(θ0 + α_t τ_t) ≠ pred(θ0 + α1 τ1 + α2 τ2) ]

Here, pred(θ) is the class that the model with the weights θ predicts, and E_t is the mean over the examples of task t.
The error is 0 if adding the other vector changes no prediction, and 2 if it changes every prediction.

Localisation is measured by the squared change in f on each example x, ‖J(x) τ_t‖². The AUROC is
the probability that this value is larger for an example of the vector's own task than for an example of another task,
where a tie counts as one half. If the AUROC is 1, the value identifies the examples of the vector's task.

Notation: N is the number of examples, V the number of vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kfacpack.errors import KfacpackError, printable
from kfacpack.evaluation.accuracy import EvaluationSet, ProgressCounter, head_of
from kfacpack.evaluation.edited_model import (
    by_task_name,
    device_of,
    edited_model,
    output_changes,
    outputs_of,
    passes_needed,
    require_compatible_vectors,
)
from kfacpack.format.units import OnProgress
from kfacpack.models.heads import Head, require_classes, require_matching_classes

if TYPE_CHECKING:
    from kfacpack.models.model import Model
    from kfacpack.vectors.task_vector import TaskVector

    AlphaPair = tuple[float, float]
    """Coefficients of the first and the second vector."""


def disentanglement(
    model: Model,
    evaluation_sets: tuple[EvaluationSet, EvaluationSet],
    vectors: tuple[TaskVector, TaskVector],
    *,
    alphas: Sequence[float],
    heads: Mapping[str, Head] | None = None,
    batch_size: int = 64,
    on_progress: OnProgress = lambda done, total: None,
) -> dict[str, Any]:
    """Computes the disentanglement error of two vectors over a grid of coefficients.

    In the linear regime, each example is processed once for the whole grid. In other regimes, or if the head of a task
    scores answers that consist of several tokens, each example is processed separately for each pair of
    coefficients.

    Args:
        model: The base model.
        evaluation_sets: Examples of the first vector's task, and examples of the second vector's task.
        vectors: Two vectors with the same base model and regime.
        alphas: Coefficients for both vectors. The grid consists of all pairs of these coefficients.
        heads: Heads by task name. The default is the head in the task's vector, or else `kp.head_for(model, task)`.
        batch_size: Examples per forward pass.
        on_progress: Called with the number of examples done and the total number.

    Returns:
        `{"tasks": [A, B], "alphas", "xi", "examples": {A: n, B: n}}`, where A and B are the names of the tasks. "xi"
        contains the errors. Its rows correspond to the coefficients of the first vector, and its columns correspond to
        the coefficients of the second vector. "examples" contains the number of examples of each task.

    Raises:
        KfacpackError: If the vectors, tasks and heads are incompatible, or if `alphas` is empty or contains NaN or Inf.

    Example:
        >>> sets = tuple(kp.EvaluationSet.of(kp.load_task(name)) for name in ("digits", "mnist"))
        >>> kp.disentanglement(model, sets, (digits, mnist), alphas=[0.0, 0.5, 1.0])["xi"]
    """
    alphas = [float(alpha) for alpha in alphas]
    if not alphas or not all(map(isfinite, alphas)):
        raise KfacpackError(f"alphas is {alphas}, expected one or more finite numbers")
    names = list(by_task_name(evaluation_sets))
    require_compatible_vectors(vectors)
    heads = heads or {}
    tasks = tuple(
        (evaluation_set, _head(model, evaluation_set, vector, heads))
        for evaluation_set, vector in zip(evaluation_sets, vectors, strict=True)
    )
    grid = _ErrorGrid(model, tasks, vectors, alphas, batch_size, on_progress)
    # Likelihoods of answers with several tokens are linear neither in f nor in the coefficients.
    affine = all(type(head) is Head for _, head in tasks)
    errors = grid.linear_errors() if vectors[0].is_linear and affine else grid.nonlinear_errors()
    sizes = [len(evaluation_set.numbers) for evaluation_set in evaluation_sets]
    first, second = (counts.cpu().double() / size for counts, size in zip(errors, sizes, strict=True))
    return {
        "tasks": names,
        "alphas": alphas,
        "xi": (first + second).tolist(),
        "examples": dict(zip(names, sizes, strict=True)),
    }


@dataclass(frozen=True)
class _ErrorGrid:
    """Counts the examples of each task whose prediction changes when the vector of the other task is added.

    Both methods return one tensor per task, which contains the count for every pair of coefficients. The rows of the
    tensor correspond to the coefficients of the first vector, and its columns to those of the second vector.
    """

    model: Model
    tasks: tuple[tuple[EvaluationSet, Head], ...]
    vectors: tuple[TaskVector, TaskVector]
    alphas: Sequence[float]
    batch_size: int
    on_progress: OnProgress

    def linear_errors(self) -> list[Tensor]:
        """Returns the counts for two vectors in the linear regime, computed from f, J τ1 and J τ2 of each example."""
        examples = sum(len(evaluation_set.numbers) for evaluation_set, _ in self.tasks)
        counter = ProgressCounter(examples, self.on_progress)
        grid = torch.tensor(self.alphas, dtype=torch.float64)
        errors = []
        for own, (evaluation_set, head) in enumerate(self.tasks):
            changed = torch.zeros(len(grid), len(grid), dtype=torch.int64)
            weight, bias = head.weight.cpu().double(), head.bias.cpu().double()
            for f, changes in output_changes(self.model, evaluation_set, self.vectors, self.batch_size, counter):
                # The head is affine, so the logits are affine in the coefficients, like f.
                start = f.cpu().double() @ weight.T + bias
                first, second = changes.cpu().double() @ weight.T
                columns = grid[:, None, None] * second
                single = (start + grid[:, None, None] * (first, second)[own]).argmax(-1)
                for row, alpha in enumerate(grid):
                    combined = ((start + alpha * first) + columns).argmax(-1)
                    changed[row] += (combined != (single[row] if own == 0 else single)).sum(-1)
            errors.append(changed)
        return errors

    def nonlinear_errors(self) -> list[Tensor]:
        """Returns the counts for two vectors of any regime. The model is evaluated at every pair of coefficients."""
        alphas = self.alphas
        pairs: dict[AlphaPair, None] = dict.fromkeys((a, b) for a in alphas for b in alphas)
        needed = [pairs | {(a, 0.0): None for a in alphas}, pairs | {(0.0, b): None for b in alphas}]
        total = sum(len(own) * len(task[0].numbers) for own, task in zip(needed, self.tasks, strict=True))
        counter = ProgressCounter(total, self.on_progress)
        predictions: list[dict[AlphaPair, Tensor]] = [{}, {}]
        device = device_of(self.model)
        tasks = [(evaluation_set, head.to(device)) for evaluation_set, head in self.tasks]
        for a, b in needed[0] | needed[1]:
            with edited_model(self.model, a * self.vectors[0] + b * self.vectors[1]) as forward:
                for own, (evaluation_set, head) in enumerate(tasks):
                    if (a, b) in needed[own]:
                        batches = outputs_of(self.model, evaluation_set, forward, self.batch_size, counter)
                        predictions[own][a, b] = torch.cat([head.logits(f).argmax(1).cpu() for f in batches])
        first, second = predictions
        return [
            torch.tensor([[int((first[a, b] != first[a, 0.0]).sum()) for b in alphas] for a in alphas]),
            torch.tensor([[int((second[a, b] != second[0.0, b]).sum()) for b in alphas] for a in alphas]),
        ]


def _head(model: Model, evaluation_set: EvaluationSet, vector: TaskVector, heads: Mapping[str, Head]) -> Head:
    task = evaluation_set.task
    if task.name not in vector.tasks:
        own = printable(", ".join(vector.tasks))
        raise KfacpackError(f"expected examples of a task of the vector ({own}), got {printable(task.name)}")
    head = heads.get(task.name) or head_of(model, task, vector)
    require_classes(task)
    require_matching_classes(head, task)
    return head


QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def localisation(
    model: Model,
    evaluation_sets: Sequence[EvaluationSet],
    vectors: Mapping[str, TaskVector],
    *,
    batch_size: int = 64,
    on_progress: OnProgress = lambda done, total: None,
) -> dict[str, Any]:
    """Measures how much each vector changes f on its own task and on other tasks.

    For each example, the squared norm of the change in f is computed: ‖J τ‖² in the linear regime, and
    ‖f(θ0 + τ) − f(θ0)‖² in other regimes.

    Args:
        model: The base model.
        evaluation_sets: Examples of each vector's task and, optionally, of further tasks.
        vectors: Task vectors by task name.
        batch_size: Examples per forward pass.
        on_progress: Called with the number of examples done and the total number.

    Returns:
        `{"vectors": {T: {"on": S, "off": S, "auroc", "by_task": {U: S}}}, "auroc"}`, where T and U are task names. Each
        S is a summary of squared norms, `{"examples", "mean", "quantiles"}`, with quantiles at 5, 25, 50, 75 and 95 %.
        "on" summarises the examples of the vector's own task, "off" summarises the examples of all other tasks, and
        "by_task" contains one summary per task. The "auroc" of a vector compares "on" with "off", and the outer "auroc"
        is the mean over the vectors.

    Raises:
        KfacpackError: If there are no examples of a vector's task, if there are fewer than two tasks, or if the vectors
            are incompatible.

    Example:
        >>> sets = [kp.EvaluationSet.of(kp.load_task(name)) for name in ("digits", "mnist")]
        >>> kp.localisation(model, sets, {"digits": vector})["auroc"]
    """
    tasks, taus = by_task_name(evaluation_sets), list(vectors.values())
    require_compatible_vectors(taus)
    if missing := [name for name in vectors if name not in tasks]:
        raise KfacpackError(f"got no examples of {printable(missing[0])}; expected examples of every vector's task")
    if len(tasks) < 2:
        only = printable(next(iter(tasks)))
        raise KfacpackError(f"got only examples of {only}; expected examples of at least one other task as well")
    examples = sum(len(evaluation_set.numbers) for evaluation_set in evaluation_sets)
    counter = ProgressCounter(passes_needed(taus) * examples, on_progress)
    sizes_by_task = {
        name: _squared_changes(model, evaluation_set, taus, batch_size, counter)
        for name, evaluation_set in tasks.items()
    }
    results: dict[str, dict[str, Any]] = {}
    for position, own in enumerate(vectors):
        by_task = {name: sizes[position] for name, sizes in sizes_by_task.items()}
        off = torch.cat([sizes for name, sizes in by_task.items() if name != own])
        results[own] = {
            "on": _describe(by_task[own]),
            "off": _describe(off),
            "auroc": auroc(by_task[own], off),
            "by_task": {name: _describe(sizes) for name, sizes in by_task.items()},
        }
    return {"vectors": results, "auroc": sum(result["auroc"] for result in results.values()) / len(results)}


def _squared_changes(
    model: Model,
    evaluation_set: EvaluationSet,
    vectors: Sequence[TaskVector],
    batch_size: int,
    counter: ProgressCounter,
) -> Tensor:
    """Returns the squared norm of the change in f for each vector and example, (V, N), in float64 on the CPU."""
    changes = output_changes(model, evaluation_set, vectors, batch_size, counter)
    return torch.cat([change.cpu().double().square().sum(-1) for _, change in changes], dim=1)


def auroc(on: Tensor, off: Tensor) -> float:
    """Returns the AUROC: P(on > off) + P(on = off) / 2 over all pairs of a value in `on` and a value in `off`.

    Args:
        on: Values on the vector's own task, (N,).
        off: Values on other tasks, (M,).
    """
    ordered = off.sort().values
    below = torch.searchsorted(ordered, on, right=False).sum()
    not_above = torch.searchsorted(ordered, on, right=True).sum()
    return int(below + not_above) / (2 * len(on) * len(off))


def _describe(sizes: Tensor) -> dict[str, Any]:
    """Returns the number, the mean and the quantiles of the given squared norms, (N,)."""
    quantiles = torch.quantile(sizes, torch.tensor(QUANTILES, dtype=sizes.dtype))
    return {"examples": len(sizes), "mean": float(sizes.mean()), "quantiles": quantiles.tolist()}
