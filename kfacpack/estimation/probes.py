"""Directions in which the output is asked, E[s sᵀ] = I: one backward pass each.

The probes of an example follow from the seed and the example's number alone. So they are the same whatever the batch
size, the number of processes, or the batch at which a run was taken up again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kfacpack.bundle.manifest import Fisher, Probe
from kfacpack.errors import KfacpackError


@dataclass(frozen=True)
class Probes:
    fisher: Fisher = "mc"
    kind: Probe = "orthogonal"
    samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.fisher not in ("mc", "exact"):
            raise KfacpackError(f"fisher {self.fisher!r}: expected 'mc' or 'exact'")
        if self.kind not in ("orthogonal", "rademacher", "gaussian"):
            raise KfacpackError(f"probe {self.kind!r}: expected 'orthogonal', 'rademacher' or 'gaussian'")
        if not isinstance(self.samples, int) or self.samples < 1:
            raise KfacpackError(f"samples {self.samples}: expected at least one probe for each example")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            raise KfacpackError(f"seed {self.seed}: expected 0 to 2^64 - 1")

    def check(self, width: int) -> None:
        if self.fisher == "mc" and self.kind == "orthogonal" and self.samples > width:
            problem = f"there are only {width} orthogonal probes for an output of width {width}, not {self.samples}"
            raise KfacpackError(f"{problem}. At {width} they are exact already: use fisher 'exact'")

    def passes(self, width: int) -> int:
        """How many backward passes a batch takes."""
        return width if self.fisher == "exact" else self.samples

    @property
    def divisor(self) -> int:
        """What the sum over the passes is divided by."""
        return 1 if self.fisher == "exact" else self.samples

    def draw(self, examples: Sequence[int], width: int) -> Iterator[Tensor]:
        """The probes of some examples, by their numbers: one (N, C) for each pass."""
        if self.fisher == "exact":
            for k in range(width):
                unit = torch.zeros(len(examples), width)
                unit[:, k] = 1
                yield unit
            return
        drawn = torch.stack([self._of_example(number, width) for number in examples])
        if self.kind == "orthogonal":
            drawn = torch.linalg.qr(drawn.mT).Q.mT * width**0.5
        yield from drawn.unbind(1)

    def _of_example(self, number: int, width: int) -> Tensor:
        """(M, C), float64: signs, or normal numbers."""
        generator = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 0, number]))
        shape = (self.samples, width)
        if self.kind == "rademacher":
            return torch.from_numpy(generator.integers(0, 2, shape) * 2.0 - 1.0)
        return torch.from_numpy(generator.standard_normal(shape))
