"""Merge methods that drop entries: TIES and DARE.

TIES (Yadav et al., 2023) trims the vectors, elects signs, and sums the entries that agree in sign. From each vector,
the share `keep` of entries with the largest magnitudes is kept, counted over all of its parameters together; entries
that tie with the smallest kept magnitude are kept as well. At each position, the sign of Σ α_t τ_t over the kept
entries is elected; entries with that sign are summed, and the others are dropped. If the sum is zero, no sign is
elected and the result is zero.

The paper multiplies the mean of the entries that agree in sign by λ, which is 1 if there is no validation data. This
implementation uses the sum of these entries, so that vectors that do not overlap are added as in task arithmetic. With
`mean`, the result matches the paper, and α is the paper's λ.

DARE (Yu et al., 2024) drops entries of each vector at random and rescales the others. Each entry is dropped with
probability `drop` and the others are divided by 1 − drop, so that the expected value is τ. The vectors are then summed.
The choice of the dropped entries depends only on the seed, the digest of the vector and the name of the parameter, not
on the other vectors or their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kfacpack.vectors.methods.method import MergeMethod, MethodInput, setting

if TYPE_CHECKING:
    from torch import Tensor

    from kfacpack.vectors.methods.method import MergedParameter


_HALF = 16
"""Number of bits of a magnitude that each counting pass covers."""


@dataclass(frozen=True)
class TiesMethod(MergeMethod):
    """TIES: sums the largest entries of each vector, except those that do not have the elected sign."""

    name = "ties"
    help = "Keeps the largest entries of each vector, elects a sign per position and sums the entries with this sign."
    scale = (
        "α multiplies the sum of the entries that agree in sign; in the paper, λ multiplies their mean and is 1 if "
        "there is no validation data; with 'mean', α is the λ of the paper"
    )

    keep: float = setting(
        0.2, "Share of each vector's entries to keep, largest magnitudes first; k in the paper.", interval="(0, 1]"
    )
    mean: bool = setting(False, "Average the entries that agree in sign, as in the paper, instead of summing them.")

    def begin(self, inputs: Sequence[MethodInput]) -> MergedParameter:
        """Finds the smallest magnitude to keep in each vector, and returns a function that merges one parameter."""
        return partial(self._merge_trimmed, inputs, [threshold(vector.tensors, self.keep) for vector in inputs])

    def parameter(self, inputs: Sequence[MethodInput], name: str) -> Tensor:
        """Returns the merged change to one parameter."""
        return self.begin(inputs)(name)

    def _merge_trimmed(self, inputs: Sequence[MethodInput], thresholds: Sequence[float], name: str) -> Tensor:
        # Each vector is read twice, so that the trimmed vectors need not all be in memory at the same time.
        elected = self._total(inputs, thresholds, name).sign_()
        return self._total(inputs, thresholds, name, elected)

    def _total(
        self, inputs: Sequence[MethodInput], thresholds: Sequence[float], name: str, elected: Tensor | None = None
    ) -> Tensor:
        """Sums the kept entries of one parameter over all vectors.

        If `elected` is passed, only entries with the elected sign are summed or, with the setting `mean`, averaged.
        """
        import torch

        total, count = torch.zeros(()), torch.zeros(())
        for vector, smallest in zip(inputs, thresholds, strict=True):
            part = vector.read(name).where(vector.tensors[name].abs() >= smallest, 0.0)
            if elected is not None:
                agrees = (part * elected.to(part.device)) > 0
                part = part.where(agrees, 0.0)
                count = count.to(part.device) + agrees
            total = total.to(part.device) + part
        return total / count.clamp(min=1) if self.mean and elected is not None else total


def threshold(tensors: Mapping[str, Tensor], keep: float) -> float:
    """Finds the smallest magnitude among the largest entries, which make up the share `keep` of all entries.

    Only one parameter is in memory at a time. Magnitudes in float32 have the same order as their bits read as integers.
    A first pass counts the magnitudes by the upper half of their bits, which gives the upper bits of the threshold. A
    second pass counts only the magnitudes with these upper bits, by the lower half of their bits. The result is exact.

    Args:
        tensors: Tensors by parameter name.
        keep: The share of the entries to keep, in (0, 1].

    Returns:
        The smallest magnitude that is kept.
    """
    import torch

    size = sum(tensors[name].numel() for name in tensors)
    upper, rank = _nth_largest(_count_halves(tensors), max(1, round(keep * size)))
    lower, _ = _nth_largest(_count_halves(tensors, upper), rank)
    return float(torch.tensor(upper << _HALF | lower, dtype=torch.int32).view(torch.float32))


def _count_halves(tensors: Mapping[str, Tensor], upper: int | None = None) -> Tensor:
    """Counts magnitudes by the upper half of their bits or, for a given upper half, by the lower half.

    Returns:
        The counts, of shape (2^16,).
    """
    import torch

    counts = torch.zeros(1 << _HALF, dtype=torch.int64)
    for name in tensors:
        bits = tensors[name].float().abs().contiguous().view(-1).view(torch.int32)
        half = bits >> _HALF
        if upper is not None:
            half = bits[half == upper] & ((1 << _HALF) - 1)
        counts += torch.bincount(half, minlength=1 << _HALF).cpu()
    return counts


def _nth_largest(counts: Tensor, n: int) -> tuple[int, int]:
    """Returns the bin of the n-th largest value, where n starts at 1, and its rank among the values in this bin."""
    import torch

    from_above = counts.flip(0).cumsum(0)
    index = int(torch.searchsorted(from_above, n))
    before = int(from_above[index - 1]) if index else 0
    return len(counts) - 1 - index, n - before


@dataclass(frozen=True)
class DareMethod(MergeMethod):
    """DARE: drops entries of each vector at random, rescales the others and sums the vectors."""

    name = "dare"
    help = "Drops entries at random, rescales the others and sums the vectors."
    scale = "α is the scaling coefficient of task arithmetic, which the paper applies after dropping entries"

    drop: float = setting(0.9, "Probability of dropping an entry; p in the paper.", interval="[0, 1)")
    seed: int = setting(0, "Seed for the random choice of the dropped entries.", interval=f"[0, {2**64 - 1}]")

    def parameter(self, inputs: Sequence[MethodInput], name: str) -> Tensor:
        """Returns the merged change to one parameter."""
        import torch

        from kfacpack._random import CounterRandom

        total = torch.zeros(())
        for vector in inputs:
            part = vector.read(name)
            dropped = CounterRandom(f"dare/{self.seed}/{vector.digest}/{name}").bernoulli(self.drop, tuple(part.shape))
            part[torch.from_numpy(dropped).to(part.device)] = 0.0
            total = total.to(part.device) + part / (1 - self.drop)
        return total
