"""How a vector is trained: the numbers that decide, and what they mean at each step."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, cos, isfinite, pi

from kfacpack.errors import KfacpackError

STEPS = 500
"""Where neither steps nor epochs are given."""
MAX_RATE = 1e18
"""Of a rate, of λ and of a group's weight: τ is float32, and two of them multiplied, or one divided by what Adam
divides by, must be in its range."""


@dataclass(frozen=True)
class TrainingSettings:
    steps: int | None = None
    epochs: float | None = None
    """In the place of `steps`: how often the training examples are gone through."""
    batch_size: int = 32
    """Examples of one step, of all processes together."""
    at_once: int | None = None
    """How many examples are computed at a time; a step adds up what it takes. None: all of a process's share."""
    lr: float | None = None
    """At its peak; None: one that fits the model, see rate.py."""
    warmup: float = 0.1
    """The share of steps in which the learning rate rises to its peak; after it, it falls along a cosine to zero."""
    weight_decay: float = 0.1
    """Of τ, towards the base model."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise KfacpackError("the length of training is given by steps or by epochs, found both")
        for name, value, least in (
            ("steps", self.steps, 1),
            ("epochs", self.epochs, 1e-6),
            ("batch size", self.batch_size, 1),
            ("number at once", self.at_once, 1),
            ("learning rate", self.lr, 0),
            ("weight decay", self.weight_decay, 0),
        ):
            if value is not None and not (isfinite(value) and value >= least):
                raise KfacpackError(f"{name} {value}: expected a number of at least {least}")
        for name, rate in (("learning rate", self.lr), ("weight decay", self.weight_decay)):
            if rate is not None and rate > MAX_RATE:
                raise KfacpackError(f"{name} {rate}: expected a number of at most {MAX_RATE:g}")
        if not 0 <= self.seed < 2**64:
            raise KfacpackError(f"seed {self.seed}: expected a whole number from 0 to 2^64 - 1")
        if not 0 <= self.warmup <= 1:
            raise KfacpackError(f"warmup {self.warmup}: expected a share of the steps, from 0 to 1")

    def length(self, examples: int) -> int:
        """How many steps there are. No example of the last epoch is left out."""
        if self.epochs is None:
            return STEPS if self.steps is None else self.steps
        return max(1, ceil(self.epochs * examples / self.batch_size))

    def share_of_lr(self, step: int, steps: int) -> float:
        """At step number `step`, from 0, of `steps`: what share of its peak the learning rate has."""
        rising = round(self.warmup * steps)
        if step < rising:
            return (step + 1) / rising
        return 0.5 * (1 + cos(pi * (step - rising) / max(1, steps - rising)))
