"""Whether two tasks leave each other alone: the disentanglement error over a grid of coefficients,

    ξ(α1, α2) = Σ_t E_t [ pred(θ0 + α_t τ_t) ≠ pred(θ0 + α1 τ1 + α2 τ2) ],

from 0, where adding the other vector changes no answer, to 2. N examples, K classes, C the width of f.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kfacpack.errors import KfacpackError, printable
from kfacpack.evaluation.accuracy import EvaluationSet, ProgressCounter, head_of
from kfacpack.evaluation.edited_model import (
    device_of,
    edited_model,
    named_by_task,
    output_changes,
    output_of,
    require_one_kind,
)
from kfacpack.format.units import OnProgress
from kfacpack.models.heads import require_fitting

if TYPE_CHECKING:
    from kfacpack.models.heads import Head
    from kfacpack.models.model import Model
    from kfacpack.vectors.task_vector import TaskVector

    AlphaPair = tuple[float, float]

    """Coefficients of the first and of the second vector."""


def disentanglement(
    model: Model,
    exams: tuple[EvaluationSet, EvaluationSet],
    vectors: tuple[TaskVector, TaskVector],
    alphas: Sequence[float],
    *,
    heads: Mapping[str, Head] | None = None,
    batch_size: int = 64,
    on_progress: OnProgress = lambda done, total: None,
) -> dict[str, Any]:
    """{"tasks": [A, B], "alphas", "xi": rows α of A, columns α of B, "examples": {A: n, B: n}}.

    The first exam is of the first vector's task, the second of the second's. A task's head is the one in `heads`, else
    its vector's own, else `kp.head_for(model, task)`. In the linear regime each example is looked at once, whatever the
    grid; in the others once for each pair of coefficients.
    """
    alphas = [float(alpha) for alpha in alphas]
    if not alphas or not all(map(isfinite, alphas)):
        raise KfacpackError(f"alphas {alphas}: expected finite numbers, at least one")
    names = list(named_by_task(exams))
    require_one_kind(vectors)
    own = [_head(model, exam, vector, heads or {}) for exam, vector in zip(exams, vectors, strict=True)]
    measured = _linear_errors if vectors[0].is_linear else _nonlinear_errors
    wrong = measured(model, exams, vectors, own, alphas, batch_size, on_progress)
    shares = [each.double() / len(exam.numbers) for each, exam in zip(wrong, exams, strict=True)]
    return {
        "tasks": names,
        "alphas": alphas,
        "xi": (shares[0] + shares[1]).tolist(),
        "examples": {name: len(exam.numbers) for name, exam in zip(names, exams, strict=True)},
    }


def _linear_errors(
    model: Model,
    exams: Sequence[EvaluationSet],
    vectors: Sequence[TaskVector],
    heads: Sequence[Head],
    alphas: Sequence[float],
    batch_size: int,
    on_progress: OnProgress,
) -> list[Tensor]:
    """How many answers differ on each exam, (alphas, alphas) each, from f, J τ1 and J τ2 alone."""
    count = ProgressCounter(sum(len(exam.numbers) for exam in exams), on_progress)
    grid = torch.tensor(alphas, dtype=torch.float64)
    found = []
    for own, (exam, head) in enumerate(zip(exams, heads, strict=True)):
        wrong = torch.zeros(len(alphas), len(alphas), dtype=torch.int64)
        weight, bias = head.weight.double().cpu(), head.bias.double().cpu()
        for f, changes in output_changes(model, exam, vectors, batch_size, count):
            # A head is affine, so that logits add up like f does.
            start = f.double().cpu() @ weight.T + bias
            first, second = changes.double().cpu() @ weight.T
            columns = grid[:, None, None] * second
            alone = (start + grid[:, None, None] * (first, second)[own]).argmax(-1)
            for row, alpha in enumerate(grid):
                together = ((start + alpha * first) + columns).argmax(-1)
                wrong[row] += (together != (alone[row] if own == 0 else alone)).sum(-1)
        found.append(wrong)
    return found


def _nonlinear_errors(
    model: Model,
    exams: Sequence[EvaluationSet],
    vectors: Sequence[TaskVector],
    heads: Sequence[Head],
    alphas: Sequence[float],
    batch_size: int,
    on_progress: OnProgress,
) -> list[Tensor]:
    """The same by putting every combination into the model."""
    pairs: dict[AlphaPair, None] = dict.fromkeys((a, b) for a in alphas for b in alphas)
    asked = [pairs | {(a, 0.0): None for a in alphas}, pairs | {(0.0, b): None for b in alphas}]
    count = ProgressCounter(
        sum(len(each) * len(exam.numbers) for each, exam in zip(asked, exams, strict=True)), on_progress
    )
    answers: list[dict[AlphaPair, Tensor]] = [{}, {}]
    on_device = [head.to(device_of(model)) for head in heads]
    for a, b in asked[0] | asked[1]:
        with edited_model(model, a * vectors[0] + b * vectors[1]) as forward:
            for own, (exam, head) in enumerate(zip(exams, on_device, strict=True)):
                if (a, b) in asked[own]:
                    found = [head.logits(f).argmax(1).cpu() for f in output_of(model, exam, forward, batch_size, count)]
                    answers[own][a, b] = torch.cat(found)
    first, second = answers
    return [
        torch.tensor([[int((first[a, b] != first[a, 0.0]).sum()) for b in alphas] for a in alphas]),
        torch.tensor([[int((second[a, b] != second[0.0, b]).sum()) for b in alphas] for a in alphas]),
    ]


def _head(model: Model, exam: EvaluationSet, vector: TaskVector, heads: Mapping[str, Head]) -> Head:
    task = exam.task
    if task.name not in vector.tasks:
        expected = f"expected those of {printable(', '.join(vector.tasks))}, which the vector is of"
        raise KfacpackError(f"these are examples of {printable(task.name)}; {expected}")
    head = heads.get(task.name) or head_of(model, task, vector)
    require_fitting(head, task)
    return head
