"""The optimizer for τ: hyperparameters and schedule, the order of the examples, the default learning rate, and AdamW.

The order of the examples is a function of the seed and the step, so no state needs to be stored. Each epoch has its own
order, and a batch may begin in one epoch and end in the next. Every batch is therefore full, and every example occurs
once per epoch for any batch size.

The default learning rate is derived from the model. The first step of Adam changes every element of τ by the learning
rate, in the direction opposite to the sign of its gradient. The resulting change in f differs between models by orders
of magnitude, but can be computed from the linearised model. The learning rate is chosen so that such a step changes f
by a fixed fraction of the size of f. The size is the norm of f if f is normalised, and otherwise the norm of the
deviation of f from its mean over the examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, cos, isfinite, pi
from numbers import Real
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kfacpack._torch import largest_magnitude, set_to_zero
from kfacpack.errors import KfacpackError
from kfacpack.estimation import distributed
from kfacpack.linearization.linearize import Linearized
from kfacpack.models.functional import zeros_like_parameters
from kfacpack.tasks.task import batched
from kfacpack.training.penalty_weights import MAX_RATE

if TYPE_CHECKING:
    from kfacpack.linearization.linearize import Linearization
    from kfacpack.models.heads import Head
    from kfacpack.models.model import Batch
    from kfacpack.training.regimes import Regime


STEPS = 500
"""Default number of steps if neither the number of steps nor the number of epochs is given."""


@dataclass(frozen=True)
class TrainingSettings:
    """Hyperparameters of one training run.

    Raises:
        KfacpackError: If a value is out of range, or both `steps` and `epochs` are given.
    """

    steps: int | None = None
    """Number of optimizer steps; 500 if neither `steps` nor `epochs` is given."""
    epochs: float | None = None
    """Number of passes over the training examples, as an alternative to `steps`."""
    batch_size: int = 32
    """Number of examples per step, summed over all processes."""
    micro_batch_size: int | None = None
    """Maximum number of examples per forward pass. Defaults to all examples that a process handles in a step."""
    lr: float | None = None
    """Peak learning rate. Defaults to 1e-5 in the regime `sparse`; in other regimes, see `find_learning_rate`."""
    warmup: float = 0.1
    """Fraction of the steps over which the learning rate rises linearly. A cosine decay to zero follows."""
    weight_decay: float = 0.1
    """Weight decay of τ, which pulls the model towards the base model."""
    clip: float | None = None
    """Maximum norm of the gradient. Defaults to 1 in the regime `sparse`, and to no limit in the other regimes."""
    seed: int = 0
    """Seed for the order of the examples."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise KfacpackError("expected either steps or epochs, got both")
        for name, value, minimum in (
            ("steps", self.steps, 1),
            ("epochs", self.epochs, 1e-6),
            ("batch size", self.batch_size, 1),
            ("micro_batch_size", self.micro_batch_size, 1),
            ("learning rate", self.lr, 0),
            ("weight decay", self.weight_decay, 0),
            ("clip", self.clip, 1e-30),
        ):
            is_number = isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)
            if value is not None and not (is_number and value >= minimum):
                raise KfacpackError(f"{name} {value!r}: expected a number of at least {minimum}")
            if name in ("steps", "batch size", "micro_batch_size") and isinstance(value, float):
                raise KfacpackError(f"{name} {value}: expected an integer")
        for name, rate in (("learning rate", self.lr), ("weight decay", self.weight_decay)):
            if rate is not None and rate > MAX_RATE:
                raise KfacpackError(f"{name} {rate}: expected a number of at most {MAX_RATE:g}")
        if not 0 <= self.seed < 2**64:
            raise KfacpackError(f"seed {self.seed}: expected an integer from 0 to 2^64 - 1")
        if not 0 <= self.warmup <= 1:
            raise KfacpackError(f"warmup {self.warmup}: expected a fraction of the steps, from 0 to 1")

    def step_count(self, examples: int) -> int:
        """Returns the number of steps for a training split of `examples` examples.

        With `epochs`, the number is rounded up, so that no example of the last epoch is left out.
        """
        if self.epochs is None:
            return STEPS if self.steps is None else self.steps
        return max(1, ceil(self.epochs * examples / self.batch_size))

    def lr_factor(self, step: int, steps: int) -> float:
        """Returns the learning rate of a step as a fraction of the peak learning rate.

        Args:
            step: Index of the step, from 0.
            steps: Total number of steps.
        """
        warmup_steps = round(self.warmup * steps)
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return 0.5 * (1 + cos(pi * (step - warmup_steps) / max(1, steps - warmup_steps)))


class BatchOrder:
    """The assignment of examples to steps.

    Args:
        size: Number of examples in the split.
        batch_size: Number of examples per step, summed over all processes.
        seed: Seed for the order.
    """

    def __init__(self, size: int, batch_size: int, seed: int):
        self._size = size
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = lru_cache(maxsize=2)(self._shuffled)

    def batch(self, step: int) -> list[int]:
        """Returns the indices of the examples in a step.

        Args:
            step: Index of the step, from 0.
        """
        start = step * self._batch_size
        return [self._epoch(k // self._size)[k % self._size] for k in range(start, start + self._batch_size)]

    def own(self, step: int, micro_batch_size: int | None) -> list[Sequence[int]]:
        """Returns the indices of the examples that this process handles in a step, divided into chunks.

        Args:
            step: Index of the step, from 0.
            micro_batch_size: Maximum number of examples per chunk, or None for a single chunk.
        """
        own = self.batch(step)[distributed.rank() :: distributed.world_size()]
        return list(batched(own, micro_batch_size or max(1, len(own))))

    def _shuffled(self, epoch: int) -> list[int]:
        # The third counter word separates this stream from the streams that sample examples and probes.
        generator = np.random.Generator(np.random.Philox(key=self._seed, counter=[0, epoch, 2, 0]))
        order: list[int] = generator.permutation(self._size).tolist()
        return order


_DIGITS = 2
"""Number of significant digits of the derived learning rate.

Rounding removes small differences that depend on the order of summation.
"""


def find_learning_rate(regime: Regime, head: Head, batch: Batch, labels: Tensor) -> float:
    """Returns the learning rate at which the first step changes f by the share `regime.relative_step` of the size of f.

    Args:
        regime: The regime to train in.
        head: The head with which the loss is computed.
        batch: N examples, on the model's device.
        labels: Labels, (N,), as indices into the head's classes.

    Raises:
        KfacpackError: If f does not depend on the parameters, or the gradient is zero.
    """
    linearized, point = _linearization_at_zero(regime, batch)
    f = point.f.detach().float().requires_grad_()
    (u,) = torch.autograd.grad(head.loss(f, labels, batch)[0] / len(labels), f)
    gradient = point.gradient(u.to(point.f))
    if not gradient:
        raise no_influence_error(regime)
    signs = {name: tensor.sign() for name, tensor in gradient.items()}
    _, change = linearized.outputs(batch, signs)
    size = _reference_norm(point.f.float(), normalized=regime.model.function.normalized)
    relative_change = float(change.float().norm() / size)
    if not 0 < relative_change < float("inf"):
        invalid = "f, or its change in a trial step, is zero, NaN or Inf"
        reason = "the gradient of its loss is zero" if relative_change == 0 else invalid
        raise KfacpackError(f"no learning rate can be derived from the first batch: {reason}; set --lr (lr)")
    return float(f"{regime.relative_step / relative_change:.{_DIGITS}g}")


def _reference_norm(f: Tensor, *, normalized: bool) -> Tensor:
    """Returns the norm of f, (N, C), relative to which a change in f is measured.

    If f is not normalised, its mean may be large compared with its variation over the examples, but only the variation
    distinguishes examples. Therefore, the mean is subtracted from f, unless the difference is zero.
    """
    centred = f - f.mean(0)
    size: Tensor = f.norm() if normalized or not bool(centred.any()) else centred.norm()
    return size


def require_influence(regime: Regime, batch: Batch) -> None:
    """Checks that f depends on at least one of the trained parameters.

    Raises:
        KfacpackError: If f depends on none of the trained parameters.
    """
    _, point = _linearization_at_zero(regime, batch)
    if not point.gradient(torch.ones_like(point.f)):
        raise no_influence_error(regime)


def _linearization_at_zero(regime: Regime, batch: Batch) -> tuple[Linearized, Linearization]:
    linearized = Linearized(regime.model.module, regime.model.forward, regime.parameters)
    return linearized, linearized.at(batch, linearized.zeros())


def no_influence_error(regime: Regime) -> KfacpackError:
    """Returns the error to raise if f does not depend on any of the trained parameters."""
    names = list(regime.parameters)
    listed = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return KfacpackError(
        f"f does not depend on the chosen parameters ({listed}), so training them has no effect. "
        "Choose other parameters with --params (params)"
    )


def clip_scale(gradients: Sequence[Tensor], limit: float) -> Tensor:
    """Returns the factor, at most 1, by which gradients are multiplied to limit their norm.

    The factor is returned as a tensor, so that the call does not synchronise with the device.

    Args:
        gradients: The gradients.
        limit: Maximum norm.
    """
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    scale: Tensor = (limit / (norm + 1e-6)).clamp(max=1.0)
    return scale


class AdamWState:
    """The state that a training step changes: τ, its gradient, and the moments of AdamW.

    Args:
        parameters: Parameters to train, by name. τ has the same shapes and starts at zero.
        settings: Hyperparameters. Only the weight decay is used.
        clip: Maximum norm of the gradient, or None for no limit.
        masks: Boolean tensors by parameter name, which are True for the elements to train. By default, all elements
            are trained.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        settings: TrainingSettings,
        clip: float | None = None,
        masks: Mapping[str, Tensor] | None = None,
    ):
        self._clip, self._masks = clip, masks or {}
        self.tau = zeros_like_parameters(parameters)
        self.gradients = {name: torch.zeros_like(tensor) for name, tensor in self.tau.items()}
        self._optimizer = torch.optim.AdamW(
            list(self.tau.values()), lr=0.0, weight_decay=settings.weight_decay, foreach=True
        )
        # torch creates the moments in the first step, but a resumed run needs them earlier.
        for tensor in self.tau.values():
            self._optimizer.state[tensor] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(tensor),
                "exp_avg_sq": torch.zeros_like(tensor),
            }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the name and value of each tensor to store. A state is restored by copying values into the tensors."""
        for name, tensor in self.tau.items():
            yield f"tau/{name}", tensor
            for moment, value in self._optimizer.state[tensor].items():
                yield f"{moment}/{name}", value

    def clear(self) -> None:
        """Sets the gradients to zero."""
        set_to_zero(list(self.gradients.values()))

    def largest_gradient(self) -> Tensor:
        """Returns the largest magnitude in the gradients, as a 0-d float32 tensor. NaN and Inf propagate."""
        return largest_magnitude(list(self.gradients.values()))

    def largest_change(self) -> Tensor:
        """Returns the largest magnitude in τ, as a 0-d float32 tensor. NaN and Inf propagate."""
        return largest_magnitude(list(self.tau.values()))

    def step(self, lr: float) -> None:
        """Performs one optimizer step with the learning rate `lr`."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if self._clip is not None:
            scale = clip_scale(list(self.gradients.values()), self._clip)
            for gradient in self.gradients.values():
                gradient.mul_(scale)
        for name, mask in self._masks.items():
            # For elements without a gradient, τ and the moments stay zero, and weight decay has no effect.
            self.gradients[name].mul_(mask)
        for name, tensor in self.tau.items():
            tensor.grad = self.gradients[name]
        self._optimizer.step()
        for tensor in self.tau.values():
            tensor.grad = None
