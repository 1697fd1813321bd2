"""Interference: the drift that each task vector causes on other tasks, predicted from bundles alone.

The drift is the mean squared change in f on the examples of a task. The predicted drift of vector s on task t is
τ_sᵀ G_t τ_s, which requires neither data nor the model. Because G is block-diagonal, this prediction is the sum of the
drifts q_b of the individual blocks, as if the changes in f that different blocks cause were uncorrelated. However,
blocks that were trained together change f in similar directions. If all these changes were aligned, the drift would be
(Σ_b √q_b)².

Both the sum Σ_b q_b and the aligned drift (Σ_b √q_b)² are returned. If the q_b are exact, the aligned drift is an upper
bound on the drift, by the Cauchy-Schwarz inequality for the products between blocks. Kronecker factors may
underestimate q_b, so the measured drift can exceed the aligned drift. In measurements with exact blocks, the drift was
several times the sum, so most of the drift comes from the products between blocks. With every seed that was tried, the
aligned drift ranked the pairs of a vector and a task more accurately than the sum (docs/results). Therefore,
`kfacpack measure interference` sorts the pairs by the aligned drift.

If examples are given, the measured drift is reported as well. Predictions and measurements are compared by rank
correlation, because a user who decides which vectors to merge needs the order of the pairs rather than their values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from typing_extensions import TypedDict

from kfacpack.curvature.curvature import Curvature
from kfacpack.errors import KfacpackError, printable
from kfacpack.evaluation.accuracy import EvaluationSet, ProgressCounter
from kfacpack.evaluation.bundle_quality import measured_drift, predicted_drift, require_comparable
from kfacpack.evaluation.edited_model import by_task_name, passes_needed, require_compatible_vectors
from kfacpack.format.units import OnProgress
from kfacpack.vectors.task_vector import TaskVector

if TYPE_CHECKING:
    from kfacpack.models.model import Model


class InterferencePair(TypedDict):
    """The drift that one vector causes on one task."""

    vector: str
    """Name of the vector's task."""
    task: str
    """Name of the bundle: its task, or the name of a merged bundle."""
    own: bool
    """Whether the bundle contains the vector's own task."""
    predicted: float
    """τᵀ G τ, the predicted drift."""
    aligned: float
    """Predicted drift if all blocks change f in the same direction: (Σ √q)², where q is the drift of one block."""
    relative: float | None
    """Predicted drift divided by the vector's predicted drift on its own task; null if the latter is unknown or 0."""
    measured: float | None
    """Drift measured on examples of the task; null if there are no examples."""
    blocks: dict[str, float]
    """Contribution of each block to the predicted drift, by block name, in the order of the blocks in the bundle."""


class InterferenceTask(TypedDict):
    """The drift that the vectors of all other tasks cause on one task."""

    task: str
    """Name of the bundle."""
    tasks: list[str]
    """Tasks that the bundle contains."""
    own: float | None
    """Predicted drift of the task's own vector; null if this vector was not passed or the bundle has several tasks."""
    others: float
    """Sum of the drifts that the vectors of other tasks are predicted to cause on this task."""
    relative: float | None
    """`others` divided by `own`; null if `own` is null or zero."""


class InterferenceBlock(TypedDict):
    """The contribution of one block to the predicted interference."""

    block: str
    predicted: float
    """Predicted drift, summed over all pairs of a vector and a task other than its own."""
    share: float
    """`predicted` divided by the sum of `predicted` over all blocks."""


class InterferenceResult(TypedDict):
    """Predicted drift for every vector and every bundle, in total and by block."""

    vectors: list[str]
    """Names of the vectors' tasks. Each vector is a row of the table of drifts."""
    pairs: list[InterferencePair]
    tasks: list[InterferenceTask]
    """One entry per bundle. Each bundle is a column of the table of drifts."""
    blocks: list[InterferenceBlock]
    """The contributions of all blocks, in descending order."""
    spearman: float | None
    """Rank correlation of `predicted` and `measured` over all pairs of a vector and a task other than its own.

    Null if fewer than three of these pairs were measured.
    """
    spearman_aligned: float | None
    """Rank correlation of `aligned` and `measured` over the same pairs as for `spearman`."""


def interference(
    vectors: Mapping[str, TaskVector],
    bundles: Mapping[str, Curvature],
    *,
    model: Model | None = None,
    evaluation_sets: Sequence[EvaluationSet] = (),
    batch_size: int = 64,
    on_progress: OnProgress = lambda done, total: None,
) -> InterferenceResult:
    """Predicts from bundles the drift that each vector causes on each task, in total and by block.

    The prediction needs neither the model nor data. If a model and examples are passed, the drift is also measured.

    Args:
        vectors: Task vectors by task name.
        bundles: Curvatures by task name. A merged curvature may have any other name.
        model: The base model, which is used only to measure the drift.
        evaluation_sets: Examples of the tasks on which the drift is also measured.
        batch_size: Examples per forward pass.
        on_progress: Called with the number of blocks done and the total number of blocks, and then with the number of
            examples done and the total number of examples.

    Returns:
        The drift for every pair of a vector and a bundle, and the sums of these drifts by task and by block. If the
        drift was measured, the result also contains the rank correlation of the predicted and the measured drifts.

    Raises:
        KfacpackError: If there is no vector or no bundle, or if examples are passed without a model or without a bundle
            for their task.
        TaskVectorError: If a bundle is for another model or another f, or does not cover the parameters of a vector.

    Example:
        >>> tasks = ("digits", "mnist")
        >>> vectors = {task: kp.TaskVector.load(f"{task}.safetensors") for task in tasks}
        >>> result = kp.interference(vectors, {task: kp.load(f"{task}.kfac") for task in tasks})
        >>> [(pair["vector"], pair["task"], pair["relative"]) for pair in result["pairs"]]
    """
    _check_types(vectors, bundles, evaluation_sets)
    if not vectors or not bundles:
        counts = f"vectors: {len(vectors)}, bundles: {len(bundles)}"
        raise KfacpackError(f"interference: expected at least one vector and one bundle, got {counts}")
    for task, bundle in bundles.items():
        for vector in vectors.values():
            require_comparable(task, bundle, vector)
    sets = _check_sets(model, evaluation_sets, vectors, bundles)
    predicted = predicted_drift(vectors, bundles, on_progress=on_progress)
    measured: dict[tuple[str, str], float] = {}
    if model is not None and sets:
        taus = list(vectors.values())
        total = passes_needed(taus) * sum(len(examples.numbers) for examples in evaluation_sets)
        counter = ProgressCounter(total, on_progress)
        for task, examples in sets.items():
            drifts = measured_drift(model, examples, taus, batch_size, counter)
            measured |= {(name, task): drift for name, drift in zip(vectors, drifts, strict=True)}
    tasks_of = {name: merged_tasks(bundle) if bundle.about.merge else (name,) for name, bundle in bundles.items()}
    pairs = _pairs(vectors, tasks_of, predicted, measured)
    others = [pair for pair in pairs if not pair["own"]]
    return {
        "vectors": list(vectors),
        "pairs": pairs,
        "tasks": [_task(name, tasks, pairs) for name, tasks in tasks_of.items()],
        "blocks": _blocks(others),
        "spearman": _rank_correlation(others, "predicted"),
        "spearman_aligned": _rank_correlation(others, "aligned"),
    }


def _check_types(vectors: object, bundles: object, evaluation_sets: object) -> None:
    for argument, values, kind in (("vectors", vectors, TaskVector), ("bundles", bundles, Curvature)):
        # A TaskVector is itself a mapping from parameter names to tensors.
        if not isinstance(values, Mapping) or isinstance(values, TaskVector):
            problem = f"expected a dict of {kind.__name__} objects by task name, got {type(values).__name__}"
            raise KfacpackError(f"interference: {argument}: {problem}")
        for name, value in values.items():
            if not isinstance(name, str):
                problem = f"expected task names as keys, got {name!r} of type {type(name).__name__}"
                raise KfacpackError(f"interference: {argument}: {problem}")
            if not isinstance(value, kind):
                problem = f"{name!r}: expected a {kind.__name__}, got {type(value).__name__}"
                raise KfacpackError(f"interference: {argument}: {problem}")
    if not isinstance(evaluation_sets, Sequence) or not all(
        isinstance(item, EvaluationSet) for item in evaluation_sets
    ):
        problem = f"expected a list of EvaluationSet objects, got {printable(repr(evaluation_sets), 100)}"
        raise KfacpackError(f"interference: evaluation_sets: {problem}")


def merged_tasks(bundle: Curvature) -> tuple[str, ...]:
    """Returns the names of the tasks in a merged bundle, or an empty tuple if the bundle is not merged."""
    parents = bundle.about.merge.parents if bundle.about.merge else ()
    return tuple(dict.fromkeys(parent.task for parent in parents if parent.task))


def spearman(first: Tensor, second: Tensor) -> float | None:
    """Returns Spearman's rank correlation of two lists of numbers. Tied numbers are assigned the mean of their ranks.

    Args:
        first: Numbers, (n,).
        second: Numbers, (n,).

    Returns:
        The correlation, from -1 to 1, or None if all numbers of one list are equal.
    """
    x, y = (_ranks(values) - (len(values) + 1) / 2 for values in (first, second))
    scale = float(x.norm() * y.norm())
    return float(x @ y) / scale if scale else None


def _rank_correlation(pairs: Sequence[InterferencePair], key: Literal["predicted", "aligned"]) -> float | None:
    compared = [(pair[key], pair["measured"]) for pair in pairs if pair["measured"] is not None]
    return spearman(*map(torch.tensor, zip(*compared, strict=True))) if len(compared) > 2 else None


def _ranks(values: Tensor) -> Tensor:
    """Returns the ranks of numbers, counted from 1, in float64. Tied numbers are assigned the mean of their ranks."""
    ordered = values.double().sort().values
    below = torch.searchsorted(ordered, values.double(), right=False)
    not_above = torch.searchsorted(ordered, values.double(), right=True)
    return (below + 1 + not_above).double() / 2


def _check_sets(
    model: Model | None,
    evaluation_sets: Sequence[EvaluationSet],
    vectors: Mapping[str, TaskVector],
    bundles: Mapping[str, Curvature],
) -> dict[str, EvaluationSet]:
    """Checks that the drift can be measured on the evaluation sets, and returns them by task name."""
    sets = by_task_name(evaluation_sets)
    if sets and model is None:
        raise KfacpackError("got examples, but no model with which to measure the drift; pass the model (model=...)")
    if unused := [name for name in sets if name not in bundles]:
        problem = f"got examples of {printable(unused[0])}, but there is no bundle with this name"
        raise KfacpackError(f"{problem}; expected examples of tasks with a bundle: {printable(', '.join(bundles))}")
    if sets:
        require_compatible_vectors(list(vectors.values()))
    return sets


def _pairs(
    vectors: Mapping[str, TaskVector],
    tasks_of: Mapping[str, Sequence[str]],
    predicted: Mapping[tuple[str, str], dict[str, float]],
    measured: Mapping[tuple[str, str], float],
) -> list[InterferencePair]:
    pairs: list[InterferencePair] = []
    for vector in vectors:
        has_own = tuple(tasks_of.get(vector, ())) == (vector,)
        own_drift = sum(predicted[vector, vector].values()) if has_own else 0.0
        for task, contained in tasks_of.items():
            blocks = predicted[vector, task]
            drift = sum(blocks.values())
            pairs.append(
                {
                    "vector": vector,
                    "task": task,
                    "own": vector in contained,
                    "predicted": drift,
                    # Compressed matrices may have negative eigenvalues, so a contribution may be negative.
                    "aligned": sum(max(part, 0.0) ** 0.5 for part in blocks.values()) ** 2,
                    "relative": drift / own_drift if own_drift else None,
                    "measured": measured.get((vector, task)),
                    "blocks": blocks,
                }
            )
    return pairs


def _task(name: str, tasks: Sequence[str], pairs: Sequence[InterferencePair]) -> InterferenceTask:
    of_task = [pair for pair in pairs if pair["task"] == name]
    own = next((pair["predicted"] for pair in of_task if list(tasks) == [pair["vector"]]), None)
    others = sum(pair["predicted"] for pair in of_task if not pair["own"])
    return {
        "task": name,
        "tasks": list(tasks),
        "own": own,
        "others": others,
        "relative": others / own if own else None,
    }


def _blocks(pairs: Sequence[InterferencePair]) -> list[InterferenceBlock]:
    """Returns the sum of each block's contributions to the predicted drifts of all pairs, in descending order."""
    totals: dict[str, float] = {}
    for pair in pairs:
        for block, value in pair["blocks"].items():
            totals[block] = totals.get(block, 0.0) + value
    total = sum(totals.values())
    return [
        {"block": block, "predicted": value, "share": value / total if total else 0.0}
        for block, value in sorted(totals.items(), key=lambda entry: -entry[1])
    ]
