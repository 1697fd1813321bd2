"""A head, as it is used and as a vector's file keeps it; `kfacpack/heads.py` makes it. K classes, C the width of f."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from kfacpack.vectors.manifest import Origin


@dataclass(frozen=True, eq=False)
class Head:
    weight: Tensor
    """(K, C), at least float32, on the model's device."""
    bias: Tensor
    """(K,)"""
    classes: tuple[str, ...]
    origin: Origin

    def logits(self, f: Tensor) -> Tensor:
        """(N, C) -> (N, K)."""
        return f.to(self.weight.dtype) @ self.weight.T + self.bias

    def to(self, device: torch.device) -> Head:
        return Head(self.weight.to(device), self.bias.to(device), self.classes, self.origin)

    def difference(self, other: Head) -> str | None:
        """How another head differs, in words, or None."""
        if self.classes != other.classes:
            first = next((pair for pair in zip(self.classes, other.classes, strict=False) if pair[0] != pair[1]), None)
            counts = f"{len(self.classes)} and {len(other.classes)} classes"
            return f"one calls a class {first[0]!r}, the other {first[1]!r}" if first else f"they have {counts}"
        if self.origin != other.origin:
            return f"one is from {self.origin}, the other from {other.origin}"
        for what, ours, theirs in (("weight", self.weight, other.weight), ("bias", self.bias, other.bias)):
            if ours.shape != theirs.shape or not torch.equal(ours.cpu().float(), theirs.cpu().float()):
                return f"their {what}s are not the same numbers"
        return None
