"""DARE (Yu et al., 2024): drops entries of each vector at random and rescales the others.

Each entry is dropped with probability `drop` and the others are divided by 1 − drop, so that the expectation is τ;
then the vectors are summed. Which entries are dropped depends only on the seed, the vector's digest and the
parameter's name, not on the other vectors or their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfacpack.vectors.methods.method import MergeMethod, MethodInput, setting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DareMethod(MergeMethod):
    """Sum of vectors with randomly dropped entries."""

    name = "dare"
    help = "Drops entries at random, rescales the others and sums."
    scale = (
        "α is the scaling coefficient of task arithmetic, with which the paper merges the dropped and rescaled vectors"
    )

    drop: float = setting(0.9, "Probability of dropping an entry; the paper's p.", interval="[0, 1)")
    seed: int = setting(0, "Seed of the random choice of the dropped entries.", interval=f"[0, {2**64 - 1}]")

    def parameter(self, inputs: Sequence[MethodInput], name: str) -> Tensor:
        """Merges one parameter."""
        import torch

        from kfacpack._random import CounterRandom

        total = torch.zeros(())
        for vector in inputs:
            part = vector.read(name)
            dropped = CounterRandom(f"dare/{self.seed}/{vector.digest}/{name}").bernoulli(self.drop, tuple(part.shape))
            part[torch.from_numpy(dropped).to(part.device)] = 0.0
            total = total.to(part.device) + part / (1 - self.drop)
        return total
