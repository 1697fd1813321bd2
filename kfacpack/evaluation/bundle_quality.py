"""Whether a bundle is any good: the drift it predicts, τᵀ G τ, against the drift that is measured on its task's data.

G is the mean over examples of JᵀJ, so that both are the same quantity, E ‖J(x) τ‖²: a bundle's is an approximation that
leaves out what lies between blocks, and takes each block for a Kronecker product. Layer by layer, with the change of
one block's parameters alone, only the second is left.

The eigenvalues of a bundle's matrices: how many directions count, and how fast the others fade.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kfacpack.curvature.blocks import gather, scatter
from kfacpack.errors import KfacpackError, TaskVectorError, printable
from kfacpack.evaluation.accuracy import ProgressCounter
from kfacpack.evaluation.edited_model import named_by_task, output_changes, passes_needed, require_one_kind
from kfacpack.format.identity import function_difference
from kfacpack.format.units import OnProgress
from kfacpack.linearization.linearize import Linearized
from kfacpack.models.data_loading import prepare_batch
from kfacpack.models.functional import select_parameters

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfacpack.curvature.blocks import CurvatureBlock
    from kfacpack.curvature.curvature import Curvature
    from kfacpack.evaluation.accuracy import EvaluationSet
    from kfacpack.models.model import Batch, Model
    from kfacpack.vectors.task_vector import TaskVector


def drift(
    model: Model,
    exams: Sequence[EvaluationSet],
    vectors: Mapping[str, TaskVector],
    bundles: Mapping[str, Curvature],
    *,
    layer_examples: int = 64,
    batch_size: int = 64,
    on_progress: OnProgress = lambda done, total: None,
) -> dict[str, Any]:
    """{"pairs": [{"vector", "task", "predicted", "measured"}], "layers": [the same with "block"]}.

    `vectors` and `bundles` are by their tasks' names, `exams` are examples of each bundle's task; every vector is put
    to every bundle. Layers are the bundles' blocks, measured on the first `layer_examples` of each exam; with 0 they
    are left out. Outside the linear regime a pair is measured as E ‖f(θ0 + τ) − f(θ0)‖², a layer as E ‖J τ‖².
    """
    tasks, chosen = named_by_task(exams), list(vectors.values())
    require_one_kind(chosen)
    if not bundles:
        raise KfacpackError("there is no bundle whose prediction could be measured")
    for task, bundle in bundles.items():
        if task not in tasks:
            raise KfacpackError(f"there are no examples of {printable(task)} to measure its bundle's prediction on")
        _require_same(task, bundle, chosen[0])
    examples = {task: len(tasks[task].numbers) for task in bundles}
    few = {task: min(layer_examples, size) for task, size in examples.items()}
    blocks = {
        task: [block for block in bundle.blocks if any(name in chosen[0] for name in block.parameters)]
        for task, bundle in bundles.items()
    }
    total = sum(
        passes_needed(model, chosen) * examples[task] + len(chosen) * len(blocks[task]) * few[task] for task in bundles
    )
    count = ProgressCounter(total, on_progress)
    pairs: list[dict[str, Any]] = []
    layers: list[dict[str, Any]] = []
    for task, bundle in bundles.items():
        moved = torch.zeros(len(chosen), dtype=torch.float64)
        for _, changes in output_changes(model, tasks[task], chosen, batch_size, count):
            moved += changes.double().square().sum((-2, -1)).cpu()
        parts = _Layers(model, tasks[task], few[task], batch_size, chosen[0]) if few[task] else None
        for (own, vector), size in zip(vectors.items(), moved, strict=True):
            tau, shapes = dict(vector), {each.name: each.shape for each in bundle.about.base.parameters}
            whole = 0.0
            for block in blocks[task]:
                predicted = float(block.quadratic(tau, shapes))
                whole += predicted
                if parts:
                    said = {"vector": own, "task": task, "block": block.name, "predicted": predicted}
                    layers.append({**said, "measured": parts.measured(_restricted(tau, block, shapes), count)})
            measured = float(size) / examples[task]
            pairs.append({"vector": own, "task": task, "predicted": whole, "measured": measured})
    return {"pairs": pairs, "layers": layers}


class _Layers:
    """E ‖J τ‖² over a few examples, made ready once, for many τ."""

    def __init__(self, model: Model, exam: EvaluationSet, examples: int, batch_size: int, vector: TaskVector):
        self._examples = examples
        self._linearized = Linearized(model.module, model.forward, select_parameters(model.module, list(vector)))
        taken = prepare_batch(model, exam.split, exam.task.name, exam.numbers[:examples], batch_size)
        self._batches: list[Batch] = [batch for _, batch in taken]

    def measured(self, tau: Mapping[str, Tensor], count: ProgressCounter) -> float:
        total = 0.0
        for batch in self._batches:
            _, change = self._linearized.outputs(batch, tau)
            total += float(change.double().square().sum())
        count.add(self._examples)
        return total / self._examples


def _restricted(
    tau: Mapping[str, Tensor], block: CurvatureBlock, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """τ of this block's parameters, or of the rows of them that are in it; zero elsewhere."""
    found = scatter(gather(tau, block.join, shapes), block.join, shapes)
    return {name: value for name, value in found.items() if name in tau}


def _require_same(task: str, bundle: Curvature, vector: TaskVector) -> None:
    """Refuse a bundle of another model or f than the vectors', or one that does not cover what they change."""
    about, name = bundle.about, printable(task)
    if words := function_difference(about.function, vector.about.function):
        raise TaskVectorError(f"the bundle of {name} and the vectors are of different f: {words}")
    covered = {parameter.name: parameter for parameter in about.base.parameters}
    for parameter in vector.about.base.parameters:
        if parameter.name not in covered:
            problem = f"the vectors change {parameter.name!r}, which the bundle of {name} does not cover"
            raise TaskVectorError(f"{problem}: their drift cannot be predicted. Estimate it with --params")
        if covered[parameter.name] != parameter:
            models = f"{about.base.name} and {vector.about.base.name}"
            problem = f"are of different base models ({models}): {parameter.name!r} is not the same there"
            raise TaskVectorError(f"the bundle of {name} and the vectors {problem}")


MAX_EIGENVALUES = 64
"""How many eigenvalues of a matrix are listed."""


def spectra(
    curvature: Curvature, *, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """{"blocks": [{"name", "side": "A" | "B" | "G", "size", "trace", "effective_rank", "eigenvalues", "ranks"}]}.

    Of each matrix of each block at most `MOST` eigenvalues, in falling order, evenly spaced in the logarithm of their
    ranks, which count from 1. A block that keeps several terms has a matrix in each of them. `on_progress` hears how
    many matrices are done, and how many there are; layers with the same input share one.
    """
    listed = [(block.name, *found) for block in curvature.blocks for found in block.structure.matrices()]
    total = len({id(matrix) for _, _, matrix in listed})
    known: dict[int, dict[str, Any]] = {}
    on_progress(0, total)
    blocks = []
    for name, role, matrix in listed:
        if id(matrix) not in known:
            known[id(matrix)] = _describe_spectrum(matrix.eigenvalues())
            on_progress(len(known), total)
        side, _, term = role.partition(".")
        shown = f"{name} (term {int(term) + 1})" if term else name
        blocks.append({"name": shown, "side": side, **known[id(matrix)]})
    return {"blocks": blocks}


def effective_rank(values: Tensor) -> float:
    """exp of the entropy of the eigenvalues' shares (Roy and Vetterli): n for n equal ones, 1 for a single one.

    Those below zero, by rounding or by pruning, count as zero.
    """
    positive = values[values > 0].double()
    if not len(positive):
        return 0.0
    shares = positive / positive.sum()
    return float(torch.exp(-torch.special.xlogy(shares, shares).sum()))


def _describe_spectrum(values: Tensor) -> dict[str, Any]:
    """(n,), in falling order."""
    ranks = np.unique(np.geomspace(1, len(values), MAX_EIGENVALUES).round().astype(int))
    return {
        "size": len(values),
        "trace": float(values.sum()),
        "effective_rank": effective_rank(values),
        "eigenvalues": values[torch.from_numpy(ranks) - 1].tolist(),
        "ranks": ranks.tolist(),
    }
