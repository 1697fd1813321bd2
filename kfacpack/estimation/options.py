"""How an estimate is made: everything a user may choose, checked at once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import torch

from kfacpack.bundle.manifest import EXPAND, REDUCE, Estimate, Fisher, FloatType, Probe, Scaling, Sharing
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
        blocks, _ = self.diagonal_blocks, self.probes
        if self.sharing not in ("expand", "reduce"):
            raise KfacpackError(f"sharing {self.sharing!r}: expected 'expand' or 'reduce'")
        if self.structure not in ("kronecker", "diagonal"):
            raise KfacpackError(f"structure {self.structure!r}: expected 'kronecker' or 'diagonal'")
        if self.structure == "diagonal" and blocks > 1:
            raise KfacpackError(f"compress {self.compress!r}: a diagonal has no blocks to keep")

    @property
    def probes(self) -> Probes:
        return Probes(self.fisher, self.probe, self.samples, self.seed)

    @property
    def diagonal_blocks(self) -> int:
        """K of 'block:K': how many diagonal blocks of each factor are kept, and never more computed."""
        if self.compress is None:
            return 1
        match = re.fullmatch(r"block:([1-9][0-9]{0,5})", str(self.compress))
        if match is None:
            raise KfacpackError(f"compress {self.compress!r}: while estimating, expected block:K, such as block:8")
        return int(match[1])

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
