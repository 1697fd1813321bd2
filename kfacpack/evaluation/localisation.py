"""Localisation: whether a vector changes outputs on its own task only, measured by ‖J(x) τ_t‖² per example.

If the values on the vector's own task and on other tasks do not overlap, they identify the task of an example. The
AUROC is the probability that an example of the vector's own task has a larger value than one of another task; a tie
counts one half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kfacpack.errors import KfacpackError, printable
from kfacpack.evaluation.accuracy import ProgressCounter
from kfacpack.evaluation.edited_model import by_task_name, output_changes, passes_needed, require_compatible_vectors
from kfacpack.format.units import OnProgress

if TYPE_CHECKING:
    from kfacpack.evaluation.accuracy import EvaluationSet
    from kfacpack.models.model import Model
    from kfacpack.vectors.task_vector import TaskVector

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def localisation(
    model: Model,
    evaluation_sets: Sequence[EvaluationSet],
    vectors: Mapping[str, TaskVector],
    *,
    batch_size: int = 64,
    on_progress: OnProgress = lambda done, total: None,
) -> dict[str, Any]:
    """Measures how far each vector changes f on its own task and on other tasks.

    Args:
        model: The base model.
        evaluation_sets: Examples of each vector's task and, optionally, of further tasks. Examples of other
            tasks are off-task for a vector.
        vectors: Task vectors by task name.
        batch_size: Examples per forward pass.
        on_progress: Called with the number of examples done and their total.

    Returns:
        `{"vectors": {T: {"on": S, "off": S, "auroc", "by_task": {U: S}}}, "auroc": their mean}`, where S describes
        squared changes: `{"examples", "mean", "quantiles"}`, with quantiles at 5, 25, 50, 75 and 95 %. Outside the
        linear regime, changes are f(θ0 + τ) − f(θ0) instead of J τ.

    Raises:
        KfacpackError: If a vector's task has no examples, there are fewer than two tasks, or vectors are incompatible.

    Example:
        >>> sets = [kp.EvaluationSet.of(kp.load_task(name)) for name in ("digits", "mnist")]
        >>> kp.localisation(model, sets, {"digits": vector})["auroc"]
    """
    tasks, taus = by_task_name(evaluation_sets), list(vectors.values())
    require_compatible_vectors(taus)
    if missing := [name for name in vectors if name not in tasks]:
        raise KfacpackError(f"no examples of {printable(missing[0])}, the task of one of the vectors")
    if len(tasks) < 2:
        raise KfacpackError(f"only examples of {printable(next(iter(tasks)))}; examples of another task are needed")
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
    """Returns the squared norm of the change of f by each vector for each example, (V, N), float64 on the CPU."""
    changes = output_changes(model, evaluation_set, vectors, batch_size, counter)
    return torch.cat([change.cpu().double().square().sum(-1) for _, change in changes], dim=1)


def auroc(on: Tensor, off: Tensor) -> float:
    """Returns P(on > off) + P(on = off) / 2 over all pairs, in one sort.

    Args:
        on: Values on the vector's own task, (N,).
        off: Values on other tasks, (M,).
    """
    ordered = off.sort().values
    below = torch.searchsorted(ordered, on, right=False).sum()
    not_above = torch.searchsorted(ordered, on, right=True).sum()
    return int(below + not_above) / (2 * len(on) * len(off))


def _describe(sizes: Tensor) -> dict[str, Any]:
    """Summarises squared changes, (N,)."""
    quantiles = torch.quantile(sizes, torch.tensor(QUANTILES, dtype=sizes.dtype))
    return {"examples": len(sizes), "mean": float(sizes.mean()), "quantiles": quantiles.tolist()}
