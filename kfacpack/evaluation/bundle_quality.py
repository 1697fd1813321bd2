"""Quality of a bundle: comparison of the predicted and the measured drift, and spectra of the bundle's matrices.

The drift is the mean squared change in f that a vector τ causes on the examples of a task, E ‖J(x) τ‖². If G
were exactly the mean of JᵀJ over the examples, the drift would be equal to τᵀ G τ. A bundle only approximates this
mean: it omits the terms between different blocks, and replaces most blocks by Kronecker products. If only the
parameters of a single block change, the omitted terms have no effect on the drift.
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
from kfacpack.models.functional import select_parameters, tensors_of

if TYPE_CHECKING:
    from kfacpack.curvature.blocks import BlockStructure, CurvatureBlock
    from kfacpack.curvature.curvature import Curvature
    from kfacpack.evaluation.accuracy import EvaluationSet
    from kfacpack.format.manifest import Join
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

    The drift is the mean squared change in f that a vector causes on the examples of a task.

    Args:
        model: The base model.
        evaluation_sets: Examples of each bundle's task.
        vectors: Task vectors by task name.
        bundles: Curvatures by task name.
        layer_examples: Number of examples per task on which the drift of individual blocks is measured. With 0, this
            measurement is skipped.
        batch_size: Examples per forward pass.
        on_progress: Called with the number of examples done and the total number.

    Returns:
        `{"pairs": [{"vector", "task", "predicted", "measured"}], "layers": [{"vector", "task", "block", "predicted",
        "measured"}]}`. "pairs" contains one entry per pair of a vector and a bundle. "layers" contains one entry per
        block of each pair, with the drift that the block's part of the vector causes. In "pairs", the measured drift is
        E ‖J τ‖² in the linear regime and E ‖f(θ0 + τ) − f(θ0)‖² in other regimes. In "layers", it is always E ‖J τ‖².

    Raises:
        KfacpackError: If there is no vector or no bundle, or if there are no examples of a bundle's task.
        TaskVectorError: If a bundle is for another model or another f, or does not cover the parameters of the vectors.

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
            problem = f"got no examples of {printable(task)}"
            raise KfacpackError(f"{problem}; expected examples of every bundle's task")
        for vector in taus:
            require_comparable(task, bundle, vector)
    examples = {task: len(tasks[task].numbers) for task in bundles}
    layer_counts = {task: min(layer_examples, size) for task, size in examples.items()}
    blocks = {(name, task): blocks_of(bundles[task], vector) for name, vector in vectors.items() for task in bundles}
    total = sum(passes_needed(taus) * examples[task] for task in bundles)
    total += sum(len(covered) * layer_counts[task] for (_, task), covered in blocks.items())
    counter = ProgressCounter(total, on_progress)
    measured_layers = _measure_layers(model, tasks, layer_counts, bundles, blocks, vectors, batch_size, counter)
    predicted = predicted_drift(vectors, bundles)
    pairs: list[dict[str, Any]] = []
    layers: list[dict[str, Any]] = []
    for task in bundles:
        measured = measured_drift(model, tasks[task], taus, batch_size, counter)
        for vector_name, total_change in zip(vectors, measured, strict=True):
            by_block = predicted[vector_name, task]
            names = {"vector": vector_name, "task": task}
            pairs.append({**names, "predicted": sum(by_block.values()), "measured": total_change})
            for block in blocks[vector_name, task] if layer_counts[task] else ():
                row = {**names, "block": block.name, "predicted": by_block[block.name]}
                layers.append({**row, "measured": measured_layers[vector_name, task, block.join]})
    return {"pairs": pairs, "layers": layers}


def predicted_drift(
    vectors: Mapping[str, TaskVector],
    bundles: Mapping[str, Curvature],
    *,
    on_progress: OnProgress = lambda done, total: None,
) -> dict[tuple[str, str], dict[str, float]]:
    """Computes τᵀ G τ for every vector and every bundle, block by block.

    To save memory, the blocks are processed one at a time. If a vector stores a change as low-rank factors, and the
    block has Kronecker factors, the drift is computed without multiplying the low-rank factors.

    Args:
        vectors: Task vectors by name. The bundles must cover the parameters of all vectors.
        bundles: Curvatures by name.
        on_progress: Called with the number of blocks done and the total number.

    Returns:
        For each pair (vector name, bundle name), a dict that maps block names to drifts. Blocks without a parameter of
        the vector are omitted.
    """
    by_join: dict[Join, list[tuple[str, CurvatureBlock]]] = {}
    for name, bundle in bundles.items():
        for block in bundle.blocks:
            by_join.setdefault(block.join, []).append((name, block))
    shapes = {name: _shapes(bundle) for name, bundle in bundles.items()}
    values: dict[tuple[str, str, str], float] = {}
    done, total = 0, sum(len(bundle.blocks) for bundle in bundles.values())
    on_progress(0, total)
    for join, members in by_join.items():
        changes = {
            name: _block_change(vector, join, shapes[members[0][0]])
            for name, vector in vectors.items()
            if any(piece.parameter in vector for piece in join.pieces)
        }
        for name, block in members:
            # The matrices are unpacked once for all vectors.
            kept = block.structure.map_matrices(lambda matrix: matrix.resident(torch.float32, torch.device("cpu")))
            for vector_name, change in changes.items():
                values[vector_name, name, block.name] = float(_quadratic(kept, change))
            done += 1
            on_progress(done, total)
    return {
        (vector_name, name): {block.name: values[vector_name, name, block.name] for block in blocks_of(bundle, vector)}
        for vector_name, vector in vectors.items()
        for name, bundle in bundles.items()
    }


def blocks_of(bundle: Curvature, vector: TaskVector) -> list[CurvatureBlock]:
    """Returns the blocks of a bundle that cover a parameter of a vector."""
    return [block for block in bundle.blocks if any(name in vector for name in block.parameters)]


def _block_change(
    vector: TaskVector, join: Join, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Tensor, Tensor | None]:
    """Returns the change ΔW that a vector makes to the parameters of a block, if possible as factors U and V.

    Args:
        vector: The vector.
        join: Position of each parameter in ΔW.
        shapes: Shapes of the parameters, by name.

    Returns:
        U, (rows, r), and V, (r, columns), with ΔW = U V, if the changes to all parameters are available as factors.
        Otherwise, ΔW, (rows, columns), and None.
    """
    left, right = [], []
    for piece in join.pieces:
        if piece.parameter not in vector:
            continue
        factors = vector.factors(piece.parameter)
        height, width = piece.matrix_shape(shapes[piece.parameter])
        if factors is None and width > 1:
            return gather(vector, join, shapes).cpu(), None
        if factors is None:  # a single column, such as a bias, has rank one
            factors = vector[piece.parameter].reshape(-1, 1), torch.ones(1, 1)
        U, V = (factor.cpu() for factor in factors)
        if piece.rows is not None:
            U = U[piece.rows[0] : piece.rows[1]]
        if piece.view == "transposed":
            U, V = V.T, U.T
        if (len(U), V.shape[1]) != (height, width):  # a parameter with several dimensions, joined as a single column
            return gather(vector, join, shapes).cpu(), None
        top, below = piece.at
        left.append(torch.nn.functional.pad(U, (0, 0, top, join.rows - top - height)))
        right.append(torch.nn.functional.pad(V, (below, join.columns - below - width)))
    return torch.cat(left, dim=1), torch.cat(right)


def _quadratic(structure: BlockStructure, change: tuple[Tensor, Tensor | None]) -> Tensor:
    """Computes <ΔW, G ΔW> for a block.

    If the block has Kronecker factors and ΔW = U V, this is Σ weight · tr((Uᵀ B U)(V A Vᵀ)) over the terms of G.

    Args:
        structure: The structure of the block, which defines G.
        change: U and V, or ΔW and None; see `_block_change`.

    Returns:
        A 0-d tensor.
    """
    delta, V = change
    if not delta.numel():  # factors of rank zero
        return delta.new_zeros(())
    if V is not None and len(structure.sides) == 2:
        B, A = structure.sides
        terms = zip(B, A, structure.weights, strict=True)
        # Both products are symmetric, so the trace of their product is the sum of the elementwise product.
        traces = [weight * ((delta.T @ b.matmul(delta)) * (V @ a.matmul(V.T))).sum() for b, a, weight in terms]
        return torch.stack(traces).sum()
    delta = delta if V is None else delta @ V
    return (delta * structure.apply(delta)).sum()


def measured_drift(
    model: Model,
    evaluation_set: EvaluationSet,
    vectors: Sequence[TaskVector],
    batch_size: int,
    counter: ProgressCounter,
) -> list[float]:
    """Measures the mean squared change in f that each vector causes on the examples of one task.

    Args:
        model: The base model.
        evaluation_set: The examples.
        vectors: Vectors with the same base model and regime; see `require_compatible_vectors`.
        batch_size: Examples per forward pass.
        counter: Progress counter. Each example is counted once per pass; see `passes_needed`.

    Returns:
        The mean for each vector: E ‖J τ‖² in the linear regime, and E ‖f(θ0 + τ) − f(θ0)‖² in other regimes.
    """
    squared = torch.zeros(len(vectors), dtype=torch.float64)
    for _, changes in output_changes(model, evaluation_set, vectors, batch_size, counter):
        squared += changes.cpu().double().square().sum((-2, -1))
    return (squared / len(evaluation_set.numbers)).tolist()


def _measure_layers(
    model: Model,
    evaluation_sets: Mapping[str, EvaluationSet],
    examples: Mapping[str, int],
    bundles: Mapping[str, Curvature],
    blocks: Mapping[tuple[str, str], Sequence[CurvatureBlock]],
    vectors: Mapping[str, TaskVector],
    batch_size: int,
    counter: ProgressCounter,
) -> dict[tuple[str, str, Join], float]:
    """Measures E ‖J τ‖² for every vector and block, where τ is the part of the vector that the block covers.

    A block that occurs in several bundles is measured on the examples of all of their tasks together, because a forward
    pass over a few examples takes nearly as long as a pass over many examples.

    Args:
        model: The base model.
        evaluation_sets: Evaluation sets by task.
        examples: Number of examples to use, by task. A task with 0 examples is not measured.
        bundles: Curvatures by task.
        blocks: The blocks to measure, by vector name and task.
        vectors: Task vectors by name.
        batch_size: Examples per forward pass.
        counter: Progress counter. Each example is counted once per vector and block.

    Returns:
        The mean for each triple (vector name, task, join), where the join identifies the block.
    """
    prepared: dict[str, list[Batch]] = {}
    for task, count in examples.items():
        if count:
            evaluation_set = evaluation_sets[task]
            numbers = evaluation_set.numbers[:count]
            prepared[task] = [
                batch for _, batch in prepared_batches(model, evaluation_set.split, task, numbers, batch_size)
            ]
    groups: dict[tuple[str, ...], list[tuple[Batch, list[tuple[str, int]]]]] = {}
    shapes = {task: _shapes(bundle) for task, bundle in bundles.items()}
    measured: dict[tuple[str, str, Join], float] = {}
    for vector_name, vector in vectors.items():
        linearized = Linearized(model.module, model.forward, select_parameters(model.module, list(vector)))
        tau = dict(vector)
        tasks_of: dict[Join, tuple[str, ...]] = {}
        for task in prepared:
            for block in blocks[vector_name, task]:
                tasks_of[block.join] = (*tasks_of.get(block.join, ()), task)
        for join, tasks in tasks_of.items():
            if tasks not in groups:
                groups[tasks] = _joined({task: prepared[task] for task in tasks}, batch_size)
            restricted = _restricted(tau, join, shapes[tasks[0]])
            totals = dict.fromkeys(tasks, 0.0)
            for batch, sizes in groups[tasks]:
                _, change = linearized.outputs(batch, restricted)
                squared = change.cpu().double().square().sum(1)
                for (task, _), part in zip(sizes, squared.split([size for _, size in sizes]), strict=True):
                    totals[task] += float(part.sum())
            for task, total in totals.items():
                measured[vector_name, task, join] = total / examples[task]
                counter.add(examples[task])
    return measured


def _joined(prepared: Mapping[str, Sequence[Batch]], batch_size: int) -> list[tuple[Batch, list[tuple[str, int]]]]:
    """Concatenates consecutive batches of several tasks where possible.

    Batches are concatenated if they are tensors, if their examples have the same shape, and if the result contains at
    most `batch_size` examples.

    Args:
        prepared: Batches by task.
        batch_size: Maximum number of examples in a concatenated batch.

    Returns:
        The resulting batches, each with a list of pairs (task, number of examples), one for each original batch in it.
    """
    joined: list[tuple[Batch, list[tuple[str, int]]]] = []
    for task, batches in prepared.items():
        for batch in batches:
            part = (task, len(tensors_of(batch)[0]))
            if joined:
                last, parts = joined[-1]
                fits = sum(size for _, size in parts) + part[1] <= batch_size
                if (
                    fits
                    and isinstance(last, Tensor)
                    and isinstance(batch, Tensor)
                    and last.shape[1:] == batch.shape[1:]
                ):
                    joined[-1] = (torch.cat([last, batch]), [*parts, part])
                    continue
            joined.append((batch, [part]))
    return joined


def _shapes(bundle: Curvature) -> dict[str, tuple[int, ...]]:
    return {parameter.name: parameter.shape for parameter in bundle.about.base.parameters}


def _restricted(tau: Mapping[str, Tensor], join: Join, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Returns the part of τ that a block covers. Rows of a parameter that other blocks cover are set to zero."""
    restricted = scatter(gather(tau, join, shapes), join, shapes)
    return {name: value for name, value in restricted.items() if name in tau}


def require_comparable(task: str, bundle: Curvature, vector: TaskVector) -> None:
    """Checks that a bundle can predict the drift of a vector.

    Args:
        task: Name of the bundle, for error messages.
        bundle: The bundle.
        vector: The vector.

    Raises:
        TaskVectorError: If the bundle is for another model or another f, or does not cover the parameters of the
            vector.
    """
    about, name = bundle.about, printable(task)
    if difference := function_difference(about.function, vector.about.function):
        raise TaskVectorError(f"the bundle for {name} and the vectors are for different functions f: {difference}")
    covered = {parameter.name: parameter for parameter in about.base.parameters}
    for parameter in vector.about.base.parameters:
        if parameter.name not in covered:
            problem = f"the vectors change {parameter.name!r}, which the bundle for {name} does not cover"
            remedy = (
                "Estimate a bundle that covers this parameter, with --params (params=...). If f does not depend on the "
                "parameter, for example because the parameter is in the text tower of a CLIP model, remove it from the "
                "checkpoint or adapter and extract the vector again"
            )
            raise TaskVectorError(f"{problem}, so this bundle cannot predict the drift of the vectors. {remedy}")
        if covered[parameter.name] != parameter:
            models = f"{about.base.name} and {vector.about.base.name}"
            problem = f"have different base models ({models}): the parameter {parameter.name!r} differs"
            raise TaskVectorError(f"the bundle for {name} and the vectors {problem}")


MAX_EIGENVALUES = 64
"""Maximum number of eigenvalues that are listed for each matrix."""


def spectra(curvature: Curvature, *, on_progress: OnProgress = lambda done, total: None) -> dict[str, Any]:
    """Computes the eigenvalues of all matrices in a curvature.

    At most `MAX_EIGENVALUES` eigenvalues of each matrix are listed, in descending order. The largest eigenvalue has
    rank 1, and the ranks of the listed eigenvalues are approximately evenly spaced on a logarithmic scale. If a block
    is a sum of several terms, the matrices of each term are listed separately.

    Args:
        curvature: The curvature.
        on_progress: Called with the number of matrices done and the total number. A matrix that several blocks share
            counts once.

    Returns:
        `{"blocks": [{"name", "side", "size", "trace", "effective_rank", "eigenvalues", "ranks"}]}`, with one entry per
        matrix. "name" is the name of the block, followed by "(term 1)", "(term 2)" and so on if the block has several
        terms. "side" is "A", "B" or "G", "size" is the number of rows, and "ranks" contains the rank of each listed
        eigenvalue.

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
    """Returns the effective rank of a matrix: the exponential of the entropy of its normalised eigenvalues.

    This is the definition of Roy and Vetterli (2007). The effective rank is n if n eigenvalues are equal and all others
    are zero. Negative eigenvalues, which result from rounding or pruning, count as zero.
    """
    positive = values[values > 0].cpu().double()
    if not len(positive):
        return 0.0
    shares = positive / positive.sum()
    return float(torch.exp(-torch.special.xlogy(shares, shares).sum()))


def _describe_spectrum(values: Tensor) -> dict[str, Any]:
    """Returns the size, trace and effective rank of a matrix, and a selection of its eigenvalues with their ranks.

    Args:
        values: Eigenvalues, (n,), in descending order.
    """
    ranks = np.unique(np.geomspace(1, len(values), MAX_EIGENVALUES).round().astype(int))
    return {
        "size": len(values),
        "trace": float(values.sum()),
        "effective_rank": effective_rank(values),
        "eigenvalues": values[torch.from_numpy(ranks) - 1].tolist(),
        "ranks": ranks.tolist(),
    }
