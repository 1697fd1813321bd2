"""Disentanglement error of two tasks over a grid of coefficients.

    ξ(α1, α2) = Σ_t E_t [ pred(θ0 + α_t τ_t) ≠ pred(θ0 + α1 τ1 + α2 τ2) ]

It ranges from 0, where adding the other vector changes no prediction, to 2.

Notation: N is the number of examples, K the number of classes, C the width of f.
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
    require_compatible_vectors,
)
from kfacpack.format.units import OnProgress
from kfacpack.models.heads import require_matching_classes

if TYPE_CHECKING:
    from kfacpack.models.heads import Head
    from kfacpack.models.model import Model
    from kfacpack.vectors.task_vector import TaskVector

    AlphaPair = tuple[float, float]
    """Coefficients of the first and of the second vector."""


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

    In the linear regime each example is processed once for any grid; in other regimes once per pair of coefficients.

    Args:
        model: The base model.
        evaluation_sets: Examples of the first vector's task, and of the second vector's task.
        vectors: Two vectors of one base model and one regime.
        alphas: Coefficients of both axes of the grid.
        heads: Heads by task name. Defaults to the vector's head for its task, or else to `kp.head_for(model, task)`.
        batch_size: Examples per forward pass.
        on_progress: Called with the number of examples done and their total.

    Returns:
        `{"tasks": [A, B], "alphas", "xi", "examples": {A: n, B: n}}`; rows of `xi` are α of A, columns α of B.

    Raises:
        KfacpackError: If vectors, tasks and heads do not fit together, or `alphas` is empty or not finite.

    Example:
        >>> sets = tuple(kp.EvaluationSet.of(kp.load_task(name)) for name in ("digits", "mnist"))
        >>> kp.disentanglement(model, sets, (digits, mnist), alphas=[0.0, 0.5, 1.0])["xi"]
    """
    alphas = [float(alpha) for alpha in alphas]
    if not alphas or not all(map(isfinite, alphas)):
        raise KfacpackError(f"alphas {alphas}: expected at least one number, all finite")
    names = list(by_task_name(evaluation_sets))
    require_compatible_vectors(vectors)
    heads = heads or {}
    tasks = tuple(
        (evaluation_set, _head(model, evaluation_set, vector, heads))
        for evaluation_set, vector in zip(evaluation_sets, vectors, strict=True)
    )
    grid = _ErrorGrid(model, tasks, vectors, alphas, batch_size, on_progress)
    errors = grid.linear_errors() if vectors[0].is_linear else grid.nonlinear_errors()
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
    """Counts, per task and pair of coefficients, the examples whose prediction the other vector changes.

    Both methods return one tensor per task, (alphas, alphas).
    """

    model: Model
    tasks: tuple[tuple[EvaluationSet, Head], ...]
    vectors: tuple[TaskVector, TaskVector]
    alphas: Sequence[float]
    batch_size: int
    on_progress: OnProgress

    def linear_errors(self) -> list[Tensor]:
        """Computes the predictions of the whole grid from f, J τ1 and J τ2."""
        examples = sum(len(evaluation_set.numbers) for evaluation_set, _ in self.tasks)
        counter = ProgressCounter(examples, self.on_progress)
        grid = torch.tensor(self.alphas, dtype=torch.float64)
        errors = []
        for own, (evaluation_set, head) in enumerate(self.tasks):
            changed = torch.zeros(len(grid), len(grid), dtype=torch.int64)
            weight, bias = head.weight.cpu().double(), head.bias.cpu().double()
            for f, changes in output_changes(self.model, evaluation_set, self.vectors, self.batch_size, counter):
                # The head is affine, so logits are linear in the coefficients like f.
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
        """Computes the predictions by applying every combination of the vectors to the model."""
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
        raise KfacpackError(f"expected examples of {own}, the task of the vector, got {printable(task.name)}")
    head = heads.get(task.name) or head_of(model, task, vector)
    require_matching_classes(head, task)
    return head
