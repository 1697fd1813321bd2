"""TIES (Yadav et al., 2023): trim, elect a sign, add up what agrees with it.

Of each vector, the share `keep` of its numbers that are largest in magnitude stays, counted over all its parameters
together (numbers equal to the smallest of these stay, too). For each number of the model, the sign of Σ α_t τ_t of what
stays is elected; vectors of that sign are added up, the others left out. Where the sum is zero, no sign is elected and
the result is zero.

The paper takes the mean of those that agree, and multiplies it by λ (1 without validation data). Here it is their sum:
vectors that do not overlap are then added, as by task arithmetic. `mean` gives the paper's, and α is then its λ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfacpack.vectors.methods.method import MergeMethod, MethodInput

if TYPE_CHECKING:
    from kfacpack.vectors.methods.method import MergedParameter


_HALF = 16
"""Bits of a magnitude that are counted at a time."""


@dataclass(frozen=True)
class TiesMethod(MergeMethod):
    name = "ties"
    scale = (
        "α multiplies the sum of the numbers that agree in sign; the paper multiplies their mean by λ, "
        "1 without validation data: with 'mean', α is that λ"
    )

    keep: float = 0.2
    """The share of a vector's numbers that stays; the paper's k is 20 %."""
    mean: bool = False

    def __post_init__(self) -> None:
        self.require_share("keep", zero=False, one=True)
        self.require_switch("mean")

    def begin(self, inputs: Sequence[MethodInput]) -> MergedParameter:
        return partial(self._of_trimmed, inputs, [threshold(each.tensors, self.keep) for each in inputs])

    def parameter(self, inputs: Sequence[MethodInput], name: str) -> Tensor:
        return self.begin(inputs)(name)

    def _of_trimmed(self, inputs: Sequence[MethodInput], thresholds: Sequence[float], name: str) -> Tensor:
        # Each vector is read twice, so that two tensors at a time are enough.
        elected = self._total(inputs, thresholds, name).sign_()
        return self._total(inputs, thresholds, name, elected)

    def _total(
        self, inputs: Sequence[MethodInput], thresholds: Sequence[float], name: str, elected: Tensor | None = None
    ) -> Tensor:
        """The sum of what stays of the vectors; with elected signs, of what agrees with them."""
        total, count = torch.zeros(()), torch.zeros(())
        for each, smallest in zip(inputs, thresholds, strict=True):
            part = each.read(name).where(each.tensors[name].abs() >= smallest, 0.0)
            if elected is not None:
                agrees = (part * elected.to(part.device)) > 0
                part = part.where(agrees, 0.0)
                count = count.to(part.device) + agrees
            total = total.to(part.device) + part
        return total / count.clamp(min=1) if self.mean and elected is not None else total


def threshold(tensors: Mapping[str, Tensor], keep: float) -> float:
    """The smallest magnitude that stays: exact, over all parameters, holding one of them at a time.

    Magnitudes in float32 are in the order of their bits, read as whole numbers: one pass counts the upper half of the
    bits, a second one the lower half of those numbers that share the upper half of the one that is looked for.
    """
    size = sum(tensors[name].numel() for name in tensors)
    upper, left = _nth_largest(_counted(tensors), max(1, round(keep * size)))
    lower, _ = _nth_largest(_counted(tensors, upper), left)
    return float(torch.tensor(upper << _HALF | lower, dtype=torch.int32).view(torch.float32))


def _counted(tensors: Mapping[str, Tensor], upper: int | None = None) -> Tensor:
    """(2^16,): how many magnitudes have which upper half; with `upper`, which lower half those have that share it."""
    counts = torch.zeros(1 << _HALF, dtype=torch.int64)
    for name in tensors:
        bits = tensors[name].float().abs().contiguous().view(-1).view(torch.int32)
        half = bits >> _HALF
        if upper is not None:
            half = bits[half == upper] & ((1 << _HALF) - 1)
        counts += torch.bincount(half, minlength=1 << _HALF).cpu()
    return counts


def _nth_largest(counts: Tensor, n: int) -> tuple[int, int]:
    """Where the n-th largest, from 1, is counted, and the how many-th largest it is there."""
    from_above = counts.flip(0).cumsum(0)
    place = int(torch.searchsorted(from_above, n))
    before = int(from_above[place - 1]) if place else 0
    return len(counts) - 1 - place, n - before
