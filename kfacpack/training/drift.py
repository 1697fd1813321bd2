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
from kfacpack.running import processes
from kfacpack.tasks.sampling import batched
from kfacpack.training.groups import checked_strength
from kfacpack.training.order import Order

if TYPE_CHECKING:
    from torch import Tensor

    from kfacpack.tasks.base import Split, Task
    from kfacpack.training.regimes import Regime
    from kfacpack.training.regimes.base import Tau


class Drift:
    def __init__(self, tasks: Sequence[Task], strength: float | None, batch_size: int, seed: int):
        if not tasks:
            raise KfacpackError("a penalty on data needs at least one other task")
        self.tasks = tuple(task.name for task in tasks)
        self.strength = checked_strength(strength)
        self._splits = [task.split("train") for task in tasks]
        sizes = np.array([len(split) for split in self._splits], dtype=np.float64)
        self._shares = sizes / sizes.sum()
        self._orders = [Order(len(split), batch_size, seed) for split in self._splits]
        self._seed = seed

    @property
    def splits(self) -> dict[str, Split]:
        """A task's name -> its examples."""
        return dict(zip(self.tasks, self._splits, strict=True))

    @property
    def settings(self) -> dict[str, float | str]:
        sizes = (len(split) for split in self._splits)
        return {
            "strength": self.strength,
            "reg_data": ", ".join(f"{name} ({size})" for name, size in zip(self.tasks, sizes, strict=True)),
        }

    def add_grad(
        self, step: int, regime: Regime, tau: Tau, gradients: dict[str, Tensor], at_once: int | None = None
    ) -> Tensor:
        """This process's share of the value at this step's batch, and of its gradient, added in place."""
        generator = np.random.Generator(np.random.Philox(key=self._seed, counter=[0, step, 3, 0]))
        chosen = int(generator.choice(len(self._splits), p=self._shares))
        numbers = self._orders[chosen].batch(step)
        own = numbers[processes.rank() :: processes.count()]
        split, model = self._splits[chosen], regime.model
        weight = self.strength * len(self.tasks) / len(numbers)
        value = torch.zeros((), dtype=torch.float64)
        for part in batched(own, at_once or max(1, len(own))):
            change, moved = regime.drift(model.prepare([split[n] for n in part], self.tasks[chosen]), tau)
            value += weight * float(change.square().sum())
            moved.add_gradient(2 * weight * change, gradients)
        return value
