"""In which precision numbers are gone on with that a model gave."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(tensor: Tensor) -> Tensor:
    """In float32 at least: in bfloat16, a small change would vanish beside f."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
