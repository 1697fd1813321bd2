"""How an estimate is made: everything a user may choose, checked at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from kfacpack.bundle.manifest import EXPAND, REDUCE, Estimate, Fisher, FloatType, Probe, Scaling, Sharing
from kfacpack.compression.chain import Chain
from kfacpack.compression.codecs.block import Block
from kfacpack.errors import KfacpackError
from kfacpack.estimation.collect import Settings
from kfacpack.estimation.probes import Probes

Structure = Literal["kronecker", "diagonal"]

_FLOAT_TYPES: dict[torch.dtype, FloatType] = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


@dataclass(frozen=True)
class Options:
    fisher: Fisher = "mc"
    samples: int = 1
    probe: Probe = "orthogonal"
    seed: int = 0
    sharing: Sharing = "expand"
    structure: Structure = "kronecker"
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
    def chain(self) -> Chain:
        """How the result is compressed."""
        return Chain() if self.compress is None else Chain.parse(self.compress)

    @property
    def diagonal_blocks(self) -> int:
        """K of 'block:K': how many diagonal blocks of each factor are kept, and never more computed."""
        return self.chain.structure.count if isinstance(self.chain.structure, Block) else 1

    @property
    def scaling(self) -> Scaling:
        return EXPAND if self.sharing == "expand" else REDUCE

    def settings(self, dtype: torch.dtype, device: torch.device) -> Settings:
        """For a model of this dtype on this device."""
        return Settings(
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
