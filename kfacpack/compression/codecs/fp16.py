"""`fp16`: 11 bits of precision for numbers from 6e-5 to 65504.

Gradients, and with them B, are often smaller than that. A matrix that float16 cannot hold, or holds worse than bfloat16
does in the same two bytes, is held in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kfacpack.compression.codecs.halves import Half

if TYPE_CHECKING:
    from kfacpack.curvature.matrices import Matrix


@dataclass(frozen=True)
class Fp16(Half):
    name = "fp16"
    usage = "fp16"
    file_type = "F16"

    def encode(self, matrix: Matrix) -> Matrix:
        stored = matrix.for_storage()
        numbers = stored.numbers(torch.float32)
        largest = torch.finfo(torch.float16).max
        if numbers.numel() and float(numbers.abs().amax()) <= largest:
            lost, otherwise = (
                float((numbers - numbers.to(dtype).float()).norm()) for dtype in (torch.float16, torch.bfloat16)
            )
            if lost <= otherwise:
                return stored.rounded(torch.float16)
        return stored.rounded(torch.bfloat16)
