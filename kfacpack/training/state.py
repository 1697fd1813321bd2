"""AdamW on τ, with its state where it can be stored and put back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfacpack.function.parameters import zeros_for

if TYPE_CHECKING:
    from kfacpack.training.settings import Settings


class State:
    """τ, its gradient, and the optimiser's moments: all that a step changes."""

    def __init__(self, wanted: Mapping[str, Tensor], settings: Settings):
        self.tau = zeros_for(wanted)
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
