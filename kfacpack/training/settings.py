"""Hyperparameters of training, and the length and learning-rate schedule that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, cos, isfinite, pi

from kfacpack.errors import KfacpackError

STEPS = 500
"""Default number of steps, if neither steps nor epochs are given."""
MAX_RATE = 1e18
"""Upper limit of learning rate, weight decay, λ and group weights.

τ is float32; the product of two such numbers, or one divided by Adam's denominator, must stay in its range.
"""


@dataclass(frozen=True)
class TrainingSettings:
    """Hyperparameters of one training run.

    Raises:
        KfacpackError: If a value is out of range, or both `steps` and `epochs` are given.
    """

    steps: int | None = None
    """Number of optimizer steps; 500 if neither `steps` nor `epochs` is given."""
    epochs: float | None = None
    """Passes over the training examples, as an alternative to `steps`."""
    batch_size: int = 32
    """Examples per step, summed over all processes."""
    micro_batch_size: int | None = None
    """Examples per forward pass; gradients of a step are accumulated. Defaults to the whole share of a process."""
    lr: float | None = None
    """Peak learning rate. By default, it is derived from the model by `optimizer.find_learning_rate`."""
    warmup: float = 0.1
    """Fraction of the steps with a linearly rising learning rate, followed by a cosine decay to zero."""
    weight_decay: float = 0.1
    """Weight decay of τ, which pulls the model towards the base model."""
    seed: int = 0
    """Seed of the order of the examples."""

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
        ):
            if value is not None and not (isfinite(value) and value >= minimum):
                raise KfacpackError(f"{name} {value}: expected a number of at least {minimum}")
        for name, rate in (("learning rate", self.lr), ("weight decay", self.weight_decay)):
            if rate is not None and rate > MAX_RATE:
                raise KfacpackError(f"{name} {rate}: expected a number of at most {MAX_RATE:g}")
        if not 0 <= self.seed < 2**64:
            raise KfacpackError(f"seed {self.seed}: expected an integer from 0 to 2^64 - 1")
        if not 0 <= self.warmup <= 1:
            raise KfacpackError(f"warmup {self.warmup}: expected a fraction of the steps, from 0 to 1")

    def step_count(self, examples: int) -> int:
        """Returns the number of steps for a training split of `examples` examples.

        With `epochs`, the last batch is rounded up, so that no example of the last epoch is left out.
        """
        if self.epochs is None:
            return STEPS if self.steps is None else self.steps
        return max(1, ceil(self.epochs * examples / self.batch_size))

    def lr_factor(self, step: int, steps: int) -> float:
        """Returns the learning rate of a step as a fraction of its peak.

        Args:
            step: Index of the step, from 0.
            steps: Total number of steps.
        """
        warmup_steps = round(self.warmup * steps)
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return 0.5 * (1 + cos(pi * (step - warmup_steps) / max(1, steps - warmup_steps)))
