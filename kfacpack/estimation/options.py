"""Directions in which the output is asked, E[s sᵀ] = I: one backward pass each.

The probes of an example follow from the seed and the example's number alone. So they are the same whatever the batch
size, the number of processes, or the batch at which a run was taken up again.

How an estimate is made: everything a user may choose, checked at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kfacpack.compression.chain import CodecChain
from kfacpack.compression.codecs import BlockCodec
from kfacpack.errors import KfacpackError
from kfacpack.estimation.collectors import CollectorSettings
from kfacpack.format.manifest import EXPAND, REDUCE, Estimate, Fisher, FloatType, Probe, Scaling, Sharing


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


EstimateStructure = Literal["kronecker", "diagonal"]

_FLOAT_TYPES: dict[torch.dtype, FloatType] = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


@dataclass(frozen=True)
class EstimateOptions:
    fisher: Fisher = "mc"
    samples: int = 1
    probe: Probe = "orthogonal"
    seed: int = 0
    sharing: Sharing = "expand"
    structure: EstimateStructure = "kronecker"
    compress: str | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        chain, _ = self.chain, self.probes
        if self.sharing not in ("expand", "reduce"):
            raise KfacpackError(f"sharing {self.sharing!r}: expected 'expand' or 'reduce'")
        if self.structure not in ("kronecker", "diagonal"):
            raise KfacpackError(f"structure {self.structure!r}: expected 'kronecker' or 'diagonal'")
        if self.structure == "diagonal" and chain.structure:
            problem = "of a diagonal there is nothing to leave out; use fp16 or bf16"
            raise KfacpackError(f"compress {self.compress!r}: {problem}")

    @property
    def probes(self) -> Probes:
        return Probes(self.fisher, self.probe, self.samples, self.seed)

    @cached_property
    def chain(self) -> CodecChain:
        """How the result is compressed."""
        return CodecChain() if self.compress is None else CodecChain.parse(self.compress)

    @property
    def diagonal_blocks(self) -> int:
        """K of 'block:K': how many diagonal blocks of each factor are kept, and never more computed."""
        return self.chain.structure.count if isinstance(self.chain.structure, BlockCodec) else 1

    @property
    def scaling(self) -> Scaling:
        return EXPAND if self.sharing == "expand" else REDUCE

    def settings(self, dtype: torch.dtype, device: torch.device) -> CollectorSettings:
        """For a model of this dtype on this device."""
        return CollectorSettings(
            dtype=torch.promote_types(torch.float32, dtype),
            device=torch.device("cpu") if self.offload else device,
            reduce=self.sharing == "reduce",
            blocks=self.diagonal_blocks,
        )

    def manifest(self, dtype: torch.dtype) -> Estimate:
        """What the bundle says of it."""
        sums = _FLOAT_TYPES[torch.promote_types(torch.float32, dtype)]
        common = {"model_dtype": _FLOAT_TYPES.get(dtype), "accumulation_dtype": sums}
        if self.fisher == "exact":
            return Estimate(fisher="exact", **common)
        return Estimate(fisher="mc", probe=self.probe, probes=self.samples, seed=self.seed, **common)
