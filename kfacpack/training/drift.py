"""The penalty that needs data (τJp): how far τ moves f on other tasks' examples, λ Σ_t w_t E ‖f(x; τ) − f(x; 0)‖².

In the linearised model that is λ Σ_t w_t τᵀ G_t τ with the true G, of which a bundle keeps an approximation. A step
looks at one batch of one task, drawn by the sizes of the data sets, so that its mean over the steps is the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kfacpack.errors import KfacpackError
from kfacpack.training.order import Order

if TYPE_CHECKING:
    from torch import Tensor

    from kfacpack.tasks.base import Task
    from kfacpack.training.regimes import Regime
    from kfacpack.training.regimes.base import Tau


class Drift:
    def __init__(self, tasks: Sequence[Task], strength: float, batch_size: int, seed: int):
        if not tasks:
            raise KfacpackError("a penalty on data needs at least one other task")
        self.tasks = tuple(task.name for task in tasks)
        self._strength = strength
        self._splits = [task.split("train") for task in tasks]
        sizes = np.array([len(split) for split in self._splits], dtype=np.float64)
        self._shares = sizes / sizes.sum()
        self._orders = [Order(len(split), batch_size, seed) for split in self._splits]
        self._seed = seed

    @property
    def settings(self) -> dict[str, float | str]:
        return {"strength": self._strength, "reg_data": ", ".join(self.tasks)}

    def add_grad(self, step: int, regime: Regime, tau: Tau, gradients: dict[str, Tensor]) -> Tensor:
        """The value at this step's batch, and its gradient added in place."""
        generator = np.random.Generator(np.random.Philox(key=self._seed, counter=[0, step, 3, 0]))
        chosen = int(generator.choice(len(self._splits), p=self._shares))
        numbers = self._orders[chosen].batch(step)
        split, model = self._splits[chosen], regime.model
        change, moved = regime.drift(model.prepare([split[n] for n in numbers], self.tasks[chosen]), tau)
        weight = self._strength * len(self.tasks) / len(numbers)
        with torch.no_grad():
            value = weight * change.float().square().sum()
            moved.add_gradient(2 * weight * change, gradients)
        return value
