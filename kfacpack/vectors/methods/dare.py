"""DARE (Yu et al., 2024): of each vector, numbers are dropped at random and the rest made larger to make up for it.

Each number is dropped with probability `drop`, what is left divided by 1 − drop, so that the expectation is τ; then
the vectors are added up. Which numbers are dropped follows from the seed, the vector's digest and the parameter's name:
the same whatever else is added, and in whatever order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kfacpack._random import CounterRandom
from kfacpack.errors import KfacpackError
from kfacpack.vectors.methods.method import MergeMethod, MethodInput

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DareMethod(MergeMethod):
    name = "dare"
    scale = (
        "α is the scaling coefficient of task arithmetic, by which the paper merges what it has dropped and rescaled"
    )

    drop: float = 0.9
    """The probability; the paper's p."""
    seed: int = 0

    def __post_init__(self) -> None:
        self.require_share("drop", zero=True, one=False)
        if type(self.seed) is not int or not 0 <= self.seed < 2**64:
            raise KfacpackError(f"dare: seed is {self.seed!r}, expected a whole number from 0 to 2^64 - 1")

    def parameter(self, inputs: Sequence[MethodInput], name: str) -> Tensor:
        total = torch.zeros(())
        for each in inputs:
            part = each.read(name)
            dropped = CounterRandom(f"dare/{self.seed}/{each.digest}/{name}").chance(self.drop, tuple(part.shape))
            part[torch.from_numpy(dropped).to(part.device)] = 0.0
            total = total.to(part.device) + part / (1 - self.drop)
        return total
