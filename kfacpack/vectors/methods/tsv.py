"""TSV-M (Gargiulo et al., 2025): task singular vectors, made orthogonal to each other.

Of each task's matrix, the largest ⌊r / T⌋ singular values stay (one at least), with their vectors. Left vectors of all
tasks, side by side, are replaced by the nearest matrix with orthonormal columns, and so are the right ones; then
U diag(s) Vᵀ. Nothing is averaged: tasks whose singular vectors are orthogonal to each other are added up as they are.
One vector alone stays what it is.

The paper multiplies the result by α, and finds that 1 serves without validation data. Its code averages the parameters
that are no matrices; `mean` does so, too, and else they are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfacpack.vectors.methods.base import Input, Method, summed
from kfacpack.vectors.methods.singular import decomposed, joined

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Tsv(Method):
    name = "tsv"
    scale = (
        "α is the paper's, which finds that 1 serves; parameters that are no matrices are added up, in its code "
        "averaged: with 'mean', here too"
    )

    mean: bool = False

    def __post_init__(self) -> None:
        self.require_switch("mean")

    def parameter(self, inputs: Sequence[Input], name: str) -> Tensor:
        shape = inputs[0].tensors[name].shape
        if len(shape) != 2:
            return summed(inputs, name, mean=self.mean)
        share = max(1, min(shape) // len(inputs))
        U, s, Vh = joined([decomposed(each.read(name)).first(share) for each in inputs])
        return (U * s) @ Vh
