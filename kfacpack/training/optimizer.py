"""Which examples a step takes: a function of the seed and the step, so that there is no state to keep or to lose.

Epochs follow each other, each in an order of its own; a batch that begins in one may end in the next. So every batch is
full, and every example is taken once an epoch, whatever the batch size.

A learning rate that fits the model.

The first step of Adam moves every parameter by the learning rate, in the direction of its gradient's sign. How far that
moves f differs from model to model by orders of magnitude, but can be computed: the model is linear there. So the rate
is the one with which such a step moves f by a given share of its own size: the length of a normalised f, the deviation
from its mean of any other.

AdamW on τ, with its state where it can be stored and put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kfacpack.errors import KfacpackError
from kfacpack.estimation import distributed
from kfacpack.linearization.linearize import Linearized
from kfacpack.models.functional import zeros_like_parameters
from kfacpack.tasks.task import batched

if TYPE_CHECKING:
    from kfacpack.models.heads import Head
    from kfacpack.models.model import Batch
    from kfacpack.training.regimes import Regime
    from kfacpack.training.settings import TrainingSettings


class BatchOrder:
    def __init__(self, size: int, batch_size: int, seed: int):
        self._size = size
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = lru_cache(maxsize=2)(self._shuffled)

    def batch(self, step: int) -> list[int]:
        """The examples of step number `step`, from 0, by their place in the split."""
        start = step * self._batch_size
        return [self._epoch(k // self._size)[k % self._size] for k in range(start, start + self._batch_size)]

    def own(self, step: int, at_once: int | None) -> list[Sequence[int]]:
        """Of a step's examples those of this process, as many together as are computed at once; None: all."""
        own = self.batch(step)[distributed.rank() :: distributed.world_size()]
        return list(batched(own, at_once or max(1, len(own))))

    def _shuffled(self, epoch: int) -> list[int]:
        # Other numbers than those that examples and probes are drawn by: those begin at other places.
        generator = np.random.Generator(np.random.Philox(key=self._seed, counter=[0, epoch, 2, 0]))
        found: list[int] = generator.permutation(self._size).tolist()
        return found


_DIGITS = 2
"""Of the rate: enough to train by, and the same whatever the order of additions."""


def find_learning_rate(regime: Regime, head: Head, batch: Batch, labels: Tensor) -> float:
    linearized = Linearized(regime.model.module, regime.model.forward, regime.wanted)
    point = linearized.at(batch, linearized.zeros())
    f = point.f.detach().float().requires_grad_()
    (u,) = torch.autograd.grad(cross_entropy(head.logits(f), labels), f)
    gradient = point.gradient(u.to(point.f))
    if not gradient:
        raise no_influence_error(regime)
    step = {name: each.sign() for name, each in gradient.items()}
    _, change = linearized.outputs(batch, step)
    moved = float(change.float().norm() / _size(point.f.float(), normalized=regime.model.function.normalized))
    if not 0 < moved < float("inf"):
        raise KfacpackError(
            "no learning rate can be found from the first batch: its gradient is zero; give one with --lr"
        )
    return float(f"{regime.reach / moved:.{_DIGITS}g}")


def _size(f: Tensor, *, normalized: bool) -> Tensor:
    """Norm that a change of f (N, C) is compared with.

    An f that is not normalised may have a mean that is large compared with its variation over examples, and only the
    variation tells examples apart. So such an f is centred, unless that leaves nothing.
    """
    centred = f - f.mean(0)
    size: Tensor = f.norm() if normalized or not bool(centred.any()) else centred.norm()
    return size


def require_influence(regime: Regime, batch: Batch) -> None:
    """Refuse parameters that f does not depend on: nothing can be learnt by moving them."""
    linearized = Linearized(regime.model.module, regime.model.forward, regime.wanted)
    point = linearized.at(batch, linearized.zeros())
    if not point.gradient(torch.ones_like(point.f)):
        raise no_influence_error(regime)


def no_influence_error(regime: Regime) -> KfacpackError:
    names = list(regime.wanted)
    some = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return KfacpackError(
        f"f does not depend on the parameters that were chosen ({some}); there is nothing to learn by moving them. "
        "Choose others with --params"
    )


class AdamWState:
    """τ, its gradient, and the optimiser's moments: all that a step changes."""

    def __init__(self, wanted: Mapping[str, Tensor], settings: TrainingSettings):
        self.tau = zeros_like_parameters(wanted)
        self.gradients = {name: torch.zeros_like(each) for name, each in self.tau.items()}
        self._optimizer = torch.optim.AdamW(list(self.tau.values()), lr=0.0, weight_decay=settings.weight_decay)
        # As torch does at its first step, so that there is something to put stored moments into.
        for each in self.tau.values():
            self._optimizer.state[each] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(each),
                "exp_avg_sq": torch.zeros_like(each),
            }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, each in self.tau.items():
            yield f"tau/{name}", each
            for moment, value in self._optimizer.state[each].items():
                yield f"{moment}/{name}", value

    def clear(self) -> None:
        for gradient in self.gradients.values():
            gradient.zero_()

    def gradients_are_finite(self) -> bool:
        return _finite(self.gradients)

    def gradients_are_zero(self) -> bool:
        return not any(bool(gradient.any()) for gradient in self.gradients.values())

    def step(self, lr: float) -> bool:
        """Whether τ is finite after it, in the float32 that its file will have."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        for name, each in self.tau.items():
            each.grad = self.gradients[name]
        self._optimizer.step()
        for each in self.tau.values():
            each.grad = None
        return _finite(self.tau)


def _finite(tensors: Mapping[str, Tensor]) -> bool:
    return bool(torch.stack([each.abs().amax().float() for each in tensors.values()]).isfinite().all())
