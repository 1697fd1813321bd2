"""The penalty that needs data (τJp): how far τ moves f on other tasks' examples, λ/s Σ_t w_t E ‖f(x; τ) − f(x; 0)‖².

s is 1 for a normalised f; otherwise it is the variance of f, measured on a few examples of each task, so that λ does
not depend on the scale of f.

In the linearised model that is λ Σ_t w_t τᵀ G_t τ with the true G, of which a bundle keeps an approximation. A step
looks at one batch of one task, drawn by the sizes of the data sets, so that its mean over the steps is the sum.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import torch

from kfacpack.errors import KfacpackError
from kfacpack.models.data_loading import batches, outputs
from kfacpack.training.optimizer import BatchOrder
from kfacpack.training.penalty_weights import resolve_strength

if TYPE_CHECKING:
    from torch import Tensor

    from kfacpack.models.model import Batch, Model
    from kfacpack.tasks.task import Split, Task
    from kfacpack.training.regimes import Regime, Tau


_SCALE_EXAMPLES = 64
"""Examples of each task that the variance of f is measured on."""


class DataPenalty:
    def __init__(self, tasks: Sequence[Task], strength: float | None, batch_size: int, seed: int):
        if not tasks:
            raise KfacpackError("a penalty on data needs at least one other task")
        self.tasks = tuple(task.name for task in tasks)
        self.strength = resolve_strength(strength, on_data=True)
        self._splits = [task.split("train") for task in tasks]
        sizes = np.array([len(split) for split in self._splits], dtype=np.float64)
        self._shares = sizes / sizes.sum()
        self._orders = [BatchOrder(len(split), batch_size, seed) for split in self._splits]
        self._seed, self._batch_size = seed, batch_size
        self.output_scale = 1.0
        """Variance of f over the held tasks, by which the drift is divided; 1 for a normalised f."""
        self._coming: Generator[Batch, None, None] | None = None
        self._next: tuple[int, int | None] = 0, None

    def measure_output_scale(self, model: Model) -> None:
        """Measures the variance of f on the first examples of each task, unless f is normalised."""
        if model.function.normalized:
            return
        scale = 0.0
        for task, split, share in zip(self.tasks, self._splits, self._shares, strict=True):
            numbers = range(min(len(split), _SCALE_EXAMPLES))
            f = torch.cat([part for _, part in outputs(model, split, task, numbers, self._batch_size)])
            scale += float(share) * float((f - f.mean(0)).square().sum()) / max(len(f) - 1, 1)
        self.output_scale = scale or 1.0

    @property
    def splits(self) -> dict[str, Split]:
        """A task's name -> its examples."""
        return dict(zip(self.tasks, self._splits, strict=True))

    @property
    def settings(self) -> dict[str, float | str]:
        sizes = (len(split) for split in self._splits)
        scale = {"output_scale": self.output_scale} if self.output_scale != 1 else {}
        return {
            "strength": self.strength,
            **scale,
            "reg_data": ", ".join(f"{name} ({size})" for name, size in zip(self.tasks, sizes, strict=True)),
        }

    def add_grad(
        self, step: int, regime: Regime, tau: Tau, gradients: dict[str, Tensor], at_once: int | None = None
    ) -> Tensor:
        """This process's share of the value at this step's batch, and of its gradient, added in place."""
        weight = self.strength / self.output_scale * len(self.tasks) / self._batch_size
        value = torch.zeros((), dtype=torch.float64)
        coming = self._from(step, regime.model, at_once)
        for _ in self._wanted(step, at_once):
            change, moved = regime.drift(next(coming), tau)
            value += weight * float(change.square().sum())
            moved.add_gradient(2 * weight * change, gradients)
        self._next = step + 1, at_once
        return value

    def close(self) -> None:
        """Nothing more is asked for: who prepares the next steps' examples may go."""
        if self._coming is not None:
            self._coming.close()
            self._coming = None

    def _wanted(self, step: int, at_once: int | None) -> list[tuple[int, Sequence[int]]]:
        """Which task this step looks at, and its examples that are this process's; as many as are computed at once."""
        generator = np.random.Generator(np.random.Philox(key=self._seed, counter=[0, step, 3, 0]))
        chosen = int(generator.choice(len(self._splits), p=self._shares))
        return [(chosen, part) for part in self._orders[chosen].own(step, at_once)]

    def _from(self, step: int, model: Model, at_once: int | None) -> Iterator[Batch]:
        """The batches from a step on. Steps follow each other, so that the next ones can be prepared meanwhile."""
        if self._coming is None or self._next != (step, at_once):
            self.close()
            sources = list(zip(self._splits, self.tasks, strict=True))
            self._coming = batches(
                model, sources, (each for later in count(step) for each in self._wanted(later, at_once))
            )
        return self._coming
