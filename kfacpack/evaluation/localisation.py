"""Whether a vector acts on its own task alone: ‖J(x) τ_t‖², by example, on its task and on the others.

Where the two do not overlap, the size of the change tells which task an example is of. The AUROC says how well: the
probability that an example of the vector's own task is moved further than one of another task, a tie counting half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kfacpack.errors import KfacpackError, printable
from kfacpack.evaluation.accuracy import ProgressCounter
from kfacpack.evaluation.edited_model import named_by_task, output_changes, passes_needed, require_one_kind
from kfacpack.format.units import OnProgress

if TYPE_CHECKING:
    from kfacpack.evaluation.accuracy import EvaluationSet
    from kfacpack.models.model import Model
    from kfacpack.vectors.task_vector import TaskVector


QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def localisation(
    model: Model,
    exams: Sequence[EvaluationSet],
    vectors: Mapping[str, TaskVector],
    *,
    batch_size: int = 64,
    on_progress: OnProgress = lambda done, total: None,
) -> dict[str, Any]:
    """{"vectors": {T: {"on": S, "off": S, "auroc", "by_task": {U: S}}}, "auroc": their mean}.

    `vectors` are by their tasks' names. `exams` are examples of each of these tasks, and of others if you like: all
    examples that are not of a vector's own task are off-task to it. S says of the squared changes {"examples", "mean",
    "quantiles" at 5, 25, 50, 75 and 95 %}. Outside the linear regime they are ‖f(θ0 + τ) − f(θ0)‖².
    """
    tasks, chosen = named_by_task(exams), list(vectors.values())
    require_one_kind(chosen)
    if missing := [name for name in vectors if name not in tasks]:
        raise KfacpackError(f"there are no examples of {printable(missing[0])}, which one of the vectors is of")
    if len(tasks) < 2:
        raise KfacpackError(f"there are only examples of {printable(next(iter(tasks)))}; another task is needed")
    count = ProgressCounter(passes_needed(model, chosen) * sum(len(exam.numbers) for exam in exams), on_progress)
    # By task, (V, N).
    sizes = {
        name: torch.cat(
            [
                change.double().square().sum(-1).cpu()
                for _, change in output_changes(model, exam, chosen, batch_size, count)
            ],
            dim=1,
        )
        for name, exam in tasks.items()
    }
    found: dict[str, dict[str, Any]] = {}
    for place, own in enumerate(vectors):
        by = {name: each[place] for name, each in sizes.items()}
        off = torch.cat([each for name, each in by.items() if name != own])
        found[own] = {
            "on": _describe(by[own]),
            "off": _describe(off),
            "auroc": auroc(by[own], off),
            "by_task": {name: _describe(each) for name, each in by.items()},
        }
    return {"vectors": found, "auroc": sum(each["auroc"] for each in found.values()) / len(found)}


def auroc(on: Tensor, off: Tensor) -> float:
    """P(on > off) + P(on = off) / 2, (N,) and (M,): all N M pairs counted, by one sort."""
    ordered = off.sort().values
    below = torch.searchsorted(ordered, on, right=False).sum()
    not_above = torch.searchsorted(ordered, on, right=True).sum()
    return int(below + not_above) / (2 * len(on) * len(off))


def _describe(sizes: Tensor) -> dict[str, Any]:
    """(N,)"""
    quantiles = torch.quantile(sizes, torch.tensor(QUANTILES, dtype=sizes.dtype))
    return {"examples": len(sizes), "mean": float(sizes.mean()), "quantiles": quantiles.tolist()}
