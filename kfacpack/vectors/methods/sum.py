"""Task arithmetic (Ilharco et al., 2023): Σ α_t τ_t."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfacpack.vectors.methods.base import Input, Method, summed

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sum(Method):
    name = "sum"
    scale = "α is the paper's scaling coefficient λ, which it chooses on validation data"
    is_sum = True

    def parameter(self, inputs: Sequence[Input], name: str) -> Tensor:
        return summed(inputs, name)
