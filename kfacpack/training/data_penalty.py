"""The data penalty (τJp). λ/s Σ_t w_t E ‖f(x; τ) − f(x; 0)‖² measures how much τ changes f on the data of other tasks.

The weight w_t is proportional to the size of the dataset of task t, and the mean weight is 1. The divisor s makes λ
independent of the scale of f. It is 1 if f is normalised, and otherwise the variance of f on a few examples of each
task (see `OutputScale.reference`). In the linearised model, the penalty is λ/s Σ_t w_t τᵀ G_t τ with the exact G_t that
a bundle approximates. Each step uses one batch from one task. The task is sampled with a probability proportional to
the size of its dataset, so that the expected penalty of a step is the sum above.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import torch

from kfacpack.errors import KfacpackError
from kfacpack.format.manifest import OutputScale
from kfacpack.merging.inputs import weighted_scale
from kfacpack.models.data_loading import outputs, step_batches
from kfacpack.training.optimizer import BatchOrder
from kfacpack.training.penalty_weights import resolve_strength

if TYPE_CHECKING:
    from torch import Tensor

    from kfacpack.models.model import Batch, Model
    from kfacpack.tasks.task import Split, Task
    from kfacpack.training.regimes import Regime, Tau


_SCALE_EXAMPLES = 64
"""Number of examples per task on which the scale of f is measured."""


class DataPenalty:
    """A penalty on the change that τ causes in f, computed on training examples of other tasks.

    Args:
        tasks: The other tasks, on whose examples f should not change. At least one task is required.
        strength: λ. Defaults to `STRENGTH_ON_DATA`.
        batch_size: Number of examples per step, summed over all processes.
        seed: Seed for choosing tasks and examples.

    Raises:
        KfacpackError: If there are no tasks, or `strength` is out of range.
    """

    def __init__(self, tasks: Sequence[Task], strength: float | None, batch_size: int, seed: int):
        if not tasks:
            raise KfacpackError("expected at least one other task for the data penalty, got none")
        self.tasks = tuple(task.name for task in tasks)
        self.strength = resolve_strength(strength, on_data=True)
        self._splits = [task.split("train") for task in tasks]
        sizes = np.array([len(split) for split in self._splits], dtype=np.float64)
        self._shares = sizes / sizes.sum()
        self._orders = [BatchOrder(len(split), batch_size, seed) for split in self._splits]
        self._seed, self._batch_size = seed, batch_size
        self.output_scale = 1.0
        """Divisor s of the penalty: the scale of f on examples of the tasks, or 1 if f is normalised."""
        self._upcoming: Generator[list[Batch], None, None] | None = None
        self._next: tuple[int, int | None] = 0, None

    def measure_output_scale(self, model: Model) -> None:
        """Measures the scale of f on the first examples of each task, unless f is normalised."""
        if model.function.normalized:
            return
        scales = []
        for task, split in zip(self.tasks, self._splits, strict=True):
            numbers = range(min(len(split), _SCALE_EXAMPLES))
            f = torch.cat([part.cpu().double() for _, part in outputs(model, split, task, numbers, self._batch_size)])
            variance = float(f.var(0).sum()) if len(f) > 1 else 0.0
            scales.append(OutputScale(mean_square=float(f.square().sum()) / len(f), variance=variance))
        self.output_scale = weighted_scale(scales, self._shares.tolist()).reference or 1.0

    @property
    def splits(self) -> dict[str, Split]:
        """Training split of each task, by task name."""
        return dict(zip(self.tasks, self._splits, strict=True))

    @property
    def settings(self) -> dict[str, float | str]:
        """Settings of the penalty, which are recorded in the vector's file."""
        sizes = (len(split) for split in self._splits)
        scale = {"output_scale": self.output_scale} if self.output_scale != 1 else {}
        return {
            "strength": self.strength,
            **scale,
            "reg_data": ", ".join(f"{name} ({size})" for name, size in zip(self.tasks, sizes, strict=True)),
        }

    def add_grad(
        self, step: int, regime: Regime, tau: Tau, gradients: dict[str, Tensor], micro_batch_size: int | None = None
    ) -> Tensor:
        """Computes this process's share of the penalty at a step, and adds the gradient of this share to `gradients`.

        Args:
            step: Index of the step, from 0.
            regime: The training regime.
            tau: τ by parameter name.
            gradients: Gradients to add to, by parameter name.
            micro_batch_size: Maximum number of examples per forward pass. Defaults to this process's share of the
                batch.

        Returns:
            This process's share of the penalty, a 0-d tensor on the device of the model.
        """
        weight = self.strength / self.output_scale * len(self.tasks) / self._batch_size
        values = [torch.zeros((), device=next(iter(tau.values())).device)]
        batches = next(self._batches_from(step, regime.model, micro_batch_size))
        for (_, part), batch in zip(self._parts(step, micro_batch_size), batches, strict=True):
            change, result = regime.drift(batch, tau)
            row_weight = weight * len(part) / len(change)  # for a language model, f may have several rows per example
            values.append(row_weight * change.square().sum())
            result.add_gradient(2 * row_weight * change, gradients)
        self._next = step + 1, micro_batch_size
        return torch.stack(values).sum()

    def close(self) -> None:
        """Stops the workers that prepare the batches of the next steps."""
        if self._upcoming is not None:
            self._upcoming.close()
            self._upcoming = None

    def _parts(self, step: int, micro_batch_size: int | None) -> list[tuple[int, Sequence[int]]]:
        """Returns the task index and the example indices of each forward pass that this process makes in a step."""
        generator = np.random.Generator(np.random.Philox(key=self._seed, counter=[0, step, 3, 0]))
        task = int(generator.choice(len(self._splits), p=self._shares))
        return [(task, part) for part in self._orders[task].own(step, micro_batch_size)]

    def _batches_from(self, step: int, model: Model, micro_batch_size: int | None) -> Iterator[list[Batch]]:
        """Returns an iterator that prepares the batches of `step` and later steps ahead of time.

        Calls for consecutive steps return the same iterator.
        """
        if self._upcoming is None or self._next != (step, micro_batch_size):
            self.close()
            sources = list(zip(self._splits, self.tasks, strict=True))
            self._upcoming = step_batches(model, sources, (self._parts(k, micro_batch_size) for k in count(step)))
        return self._upcoming
