"""Iso-C (Marczak et al., 2025): the sum with a flat spectrum.

The matrices are added up, and all singular values of the sum replaced by their mean, so that its nuclear norm stays.
The paper multiplies the result by α, chosen on validation data. Its code averages the parameters that are no matrices;
`mean` does so, too, and else they are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfacpack.vectors.methods.base import Input, Method, summed
from kfacpack.vectors.methods.singular import decomposed

if TYPE_CHECKING:
    from torch import Tensor

SCALE = (
    "α is the paper's, which chooses it on validation data; parameters that are no matrices are added up, in its code "
    "averaged: with 'mean', here too"
)


@dataclass(frozen=True)
class Iso(Method):
    name = "iso"
    scale = SCALE

    mean: bool = False

    def __post_init__(self) -> None:
        self.require_switch("mean")

    def parameter(self, inputs: Sequence[Input], name: str) -> Tensor:
        if inputs[0].tensors[name].ndim != 2:
            return summed(inputs, name, mean=self.mean)
        total = summed(inputs, name)
        U, s, Vh = decomposed(total)
        return s.mean() * (U @ Vh) if len(s) else total
