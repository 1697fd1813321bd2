"""`bf16`: float32's range, 8 bits of precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kfacpack.compression.codecs.halves import Half

if TYPE_CHECKING:
    from kfacpack.curvature.matrices import Matrix


@dataclass(frozen=True)
class Bf16(Half):
    name = "bf16"
    usage = "bf16"
    file_type = "BF16"

    def encode(self, matrix: Matrix) -> Matrix:
        return matrix.for_storage().rounded(torch.bfloat16)
