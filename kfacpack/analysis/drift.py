"""Whether a bundle is any good: the drift it predicts, τᵀ G τ, against the drift that is measured on its task's data.

G is the mean over examples of JᵀJ, so that both are the same quantity, E ‖J(x) τ‖²: a bundle's is an approximation that
leaves out what lies between blocks, and takes each block for a Kronecker product. Layer by layer, with the change of
one block's parameters alone, only the second is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kfacpack.analysis.moves import by_task, looks, moves, require_one_kind
from kfacpack.bundle.identity import function_difference
from kfacpack.curvature.join import gather, scatter
from kfacpack.errors import KfacpackError, TaskVectorError, printable
from kfacpack.function.parameters import choose
from kfacpack.linear.linearize import Linearized
from kfacpack.models.outputs import prepared
from kfacpack.running.progress import Count, OnProgress

if TYPE_CHECKING:
    from torch import Tensor

    from kfacpack.curvature.block import CurvatureBlock
    from kfacpack.curvature.curvature import Curvature
    from kfacpack.evaluation.accuracy import Exam
    from kfacpack.models.base import Batch, Model
    from kfacpack.vectors.vector import TaskVector


def drift(
    model: Model,
    exams: Sequence[Exam],
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
    tasks, chosen = by_task(exams), list(vectors.values())
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
    total = sum(looks(model, chosen) * examples[task] + len(chosen) * len(blocks[task]) * few[task] for task in bundles)
    count = Count(total, on_progress)
    pairs: list[dict[str, Any]] = []
    layers: list[dict[str, Any]] = []
    for task, bundle in bundles.items():
        moved = torch.zeros(len(chosen), dtype=torch.float64)
        for _, changes in moves(model, tasks[task], chosen, batch_size, count):
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

    def __init__(self, model: Model, exam: Exam, examples: int, batch_size: int, vector: TaskVector):
        self._examples = examples
        self._linearized = Linearized(model.module, model.forward, choose(model.module, list(vector)))
        taken = prepared(model, exam.split, exam.task.name, exam.numbers[:examples], batch_size)
        self._batches: list[Batch] = [batch for _, batch in taken]

    def measured(self, tau: Mapping[str, Tensor], count: Count) -> float:
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
