"""Quality of a bundle: the drift it predicts against the drift measured on data, and the spectra of its matrices.

The predicted drift is τᵀ G τ. G is the mean over examples of JᵀJ, so this is an approximation of E ‖J(x) τ‖² that
neglects the terms between blocks and assumes that each block is a Kronecker product. The comparison by
layer, with only the change of one block's parameters, isolates the second approximation.
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
from kfacpack.evaluation.edited_model import by_task_name, output_changes, passes_needed, require_compatible_vectors
from kfacpack.format.identity import function_difference
from kfacpack.format.units import OnProgress
from kfacpack.linearization.linearize import Linearized
from kfacpack.models.data_loading import prepared_batches
from kfacpack.models.functional import select_parameters

if TYPE_CHECKING:
    from kfacpack.curvature.blocks import CurvatureBlock
    from kfacpack.curvature.curvature import Curvature
    from kfacpack.evaluation.accuracy import EvaluationSet
    from kfacpack.models.model import Batch, Model
    from kfacpack.vectors.task_vector import TaskVector


def drift(
    model: Model,
    evaluation_sets: Sequence[EvaluationSet],
    vectors: Mapping[str, TaskVector],
    bundles: Mapping[str, Curvature],
    *,
    layer_examples: int = 64,
    batch_size: int = 64,
    on_progress: OnProgress = lambda done, total: None,
) -> dict[str, Any]:
    """Compares the drift that bundles predict with the drift measured on data, for every vector and every bundle.

    Args:
        model: The base model.
        evaluation_sets: Examples of each bundle's task.
        vectors: Task vectors by task name.
        bundles: Curvatures by task name.
        layer_examples: Number of examples on which single blocks are measured; 0 to measure no blocks.
        batch_size: Examples per forward pass.
        on_progress: Called with the number of examples done and their total.

    Returns:
        `{"pairs": [{"vector", "task", "predicted", "measured"}], "layers": [the same with "block"]}`. Outside the
        linear regime a pair is measured as E ‖f(θ0 + τ) − f(θ0)‖²; a layer always as E ‖J τ‖².

    Raises:
        KfacpackError: If there is no bundle, or a bundle's task has no examples.
        TaskVectorError: If a bundle is for another model or f, or does not cover the parameters of the vectors.

    Example:
        >>> sets = [kp.EvaluationSet.of(kp.load_task("digits"))]
        >>> kp.drift(model, sets, {"mnist": vector}, {"digits": kp.load("digits.kfac")})["pairs"]
    """
    tasks, taus = by_task_name(evaluation_sets), list(vectors.values())
    require_compatible_vectors(taus)
    if not bundles:
        raise KfacpackError("expected at least one bundle to compare with the measured drift, got 0")
    for task, bundle in bundles.items():
        if task not in tasks:
            raise KfacpackError(f"no examples of {printable(task)} to measure the drift that its bundle predicts")
        _require_comparable(task, bundle, taus[0])
    examples = {task: len(tasks[task].numbers) for task in bundles}
    layer_counts = {task: min(layer_examples, size) for task, size in examples.items()}
    blocks = {
        task: [block for block in bundle.blocks if any(name in taus[0] for name in block.parameters)]
        for task, bundle in bundles.items()
    }
    passes = passes_needed(model, taus)
    total = sum(passes * examples[task] + len(taus) * len(blocks[task]) * layer_counts[task] for task in bundles)
    counter = ProgressCounter(total, on_progress)
    pairs: list[dict[str, Any]] = []
    layers: list[dict[str, Any]] = []
    for task, bundle in bundles.items():
        squared = torch.zeros(len(taus), dtype=torch.float64)
        for _, changes in output_changes(model, tasks[task], taus, batch_size, counter):
            squared += changes.cpu().double().square().sum((-2, -1))
        layer_drift = None
        if layer_counts[task]:
            layer_drift = _LayerDrift(model, tasks[task], layer_counts[task], batch_size, taus[0])
        shapes = {parameter.name: parameter.shape for parameter in bundle.about.base.parameters}
        for (vector_name, vector), total_change in zip(vectors.items(), squared, strict=True):
            tau = dict(vector)
            predicted = 0.0
            for block in blocks[task]:
                block_predicted = float(block.quadratic(tau, shapes))
                predicted += block_predicted
                if layer_drift:
                    row = {"vector": vector_name, "task": task, "block": block.name, "predicted": block_predicted}
                    measured = layer_drift.measure(_restricted(tau, block, shapes), counter)
                    layers.append({**row, "measured": measured})
            measured = float(total_change) / examples[task]
            pairs.append({"vector": vector_name, "task": task, "predicted": predicted, "measured": measured})
    return {"pairs": pairs, "layers": layers}


class _LayerDrift:
    """Measures E ‖J τ‖² for many τ on the first examples of an evaluation set, which are prepared once."""

    def __init__(self, model: Model, evaluation_set: EvaluationSet, examples: int, batch_size: int, vector: TaskVector):
        self._examples = examples
        self._linearized = Linearized(model.module, model.forward, select_parameters(model.module, list(vector)))
        numbers, task = evaluation_set.numbers[:examples], evaluation_set.task.name
        prepared = prepared_batches(model, evaluation_set.split, task, numbers, batch_size)
        self._batches: list[Batch] = [batch for _, batch in prepared]

    def measure(self, tau: Mapping[str, Tensor], counter: ProgressCounter) -> float:
        total = 0.0
        for batch in self._batches:
            _, change = self._linearized.outputs(batch, tau)
            total += float(change.cpu().double().square().sum())
        counter.add(self._examples)
        return total / self._examples


def _restricted(
    tau: Mapping[str, Tensor], block: CurvatureBlock, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Returns the part of τ that a block covers; rows of its parameters that are in other blocks are zero."""
    restricted = scatter(gather(tau, block.join, shapes), block.join, shapes)
    return {name: value for name, value in restricted.items() if name in tau}


def _require_comparable(task: str, bundle: Curvature, vector: TaskVector) -> None:
    """Rejects a bundle for another model or f, or one that does not cover the parameters of the vectors."""
    about, name = bundle.about, printable(task)
    if difference := function_difference(about.function, vector.about.function):
        raise TaskVectorError(f"the bundle of {name} and the vectors are for different f: {difference}")
    covered = {parameter.name: parameter for parameter in about.base.parameters}
    for parameter in vector.about.base.parameters:
        if parameter.name not in covered:
            problem = f"the vectors change {parameter.name!r}, which the bundle of {name} does not cover"
            remedy = "Estimate a bundle that covers it with --params (params=...)"
            raise TaskVectorError(f"{problem}, so it cannot predict their drift. {remedy}")
        if covered[parameter.name] != parameter:
            models = f"{about.base.name} and {vector.about.base.name}"
            problem = f"have different base models ({models}): {parameter.name!r} differs"
            raise TaskVectorError(f"the bundle of {name} and the vectors {problem}")


MAX_EIGENVALUES = 64
"""Maximum number of eigenvalues listed per matrix."""


def spectra(curvature: Curvature, *, on_progress: OnProgress = lambda done, total: None) -> dict[str, Any]:
    """Computes the eigenvalues of each matrix of each block.

    At most `MAX_EIGENVALUES` of a matrix are listed, in descending order, evenly spaced in the logarithm of their
    ranks. A block with several terms has a matrix in each of them.

    Args:
        curvature: The curvature.
        on_progress: Called with the number of matrices done and their total; a matrix that several blocks share counts
            once.

    Returns:
        `{"blocks": [{"name", "side", "size", "trace", "effective_rank", "eigenvalues", "ranks"}]}`, where `side` is
        "A", "B" or "G", and ranks count from 1.

    Example:
        >>> for block in kp.spectra(kp.load("digits.kfac"))["blocks"]:
        ...     print(block["name"], block["side"], block["effective_rank"])
    """
    matrices = [(block.name, *entry) for block in curvature.blocks for entry in block.structure.matrices()]
    total = len({id(matrix) for _, _, matrix in matrices})
    spectrum_of: dict[int, dict[str, Any]] = {}
    on_progress(0, total)
    blocks = []
    for name, role, matrix in matrices:
        if id(matrix) not in spectrum_of:
            spectrum_of[id(matrix)] = _describe_spectrum(matrix.eigenvalues())
            on_progress(len(spectrum_of), total)
        side, _, term = role.partition(".")
        label = f"{name} (term {int(term) + 1})" if term else name
        blocks.append({"name": label, "side": side, **spectrum_of[id(matrix)]})
    return {"blocks": blocks}


def effective_rank(values: Tensor) -> float:
    """Returns the exponential of the entropy of the normalised eigenvalues (Roy and Vetterli).

    It is n for n equal eigenvalues, and 1 if only one is nonzero. Negative eigenvalues, which result from rounding or
    pruning, count as zero.
    """
    positive = values[values > 0].cpu().double()
    if not len(positive):
        return 0.0
    shares = positive / positive.sum()
    return float(torch.exp(-torch.special.xlogy(shares, shares).sum()))


def _describe_spectrum(values: Tensor) -> dict[str, Any]:
    """Summarises eigenvalues, (n,), in descending order."""
    ranks = np.unique(np.geomspace(1, len(values), MAX_EIGENVALUES).round().astype(int))
    return {
        "size": len(values),
        "trace": float(values.sum()),
        "effective_rank": effective_rank(values),
        "eigenvalues": values[torch.from_numpy(ranks) - 1].tolist(),
        "ranks": ranks.tolist(),
    }
