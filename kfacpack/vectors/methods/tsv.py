"""Singular vectors, for the methods that merge matrices by them. A matrix is (m, n), r = min(m, n).

Parameters of two dimensions are matrices, as in the authors' codes; all others (biases, norms, tokens, kernels of
convolutions) are added up, or averaged where `mean` is asked for, as there.

TSV-M (Gargiulo et al., 2025): task singular vectors, made orthogonal to each other.

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
from typing import NamedTuple

import torch
from torch import Tensor

from kfacpack.vectors.methods.method import MergeMethod, MethodInput, weighted_sum

ROUNDING = torch.finfo(torch.float32).eps
"""Singular values below this share of the largest are what rounding the numbers to float32 makes of zero.

Their vectors are arbitrary: a method that gave them weight would add noise, and would not know its own result again.
"""


class SingularVectors(NamedTuple):
    """U diag(s) Vh, of the k largest singular values: (m, k), (k,), (k, n)."""

    U: Tensor
    s: Tensor
    Vh: Tensor

    def first(self, k: int) -> SingularVectors:
        """A copy, so that the rest can be forgotten."""
        return SingularVectors(self.U[:, :k].clone(), self.s[:k].clone(), self.Vh[:k].clone())


def decomposed(matrix: Tensor, largest: Tensor | None = None) -> SingularVectors:
    """Without directions that the matrix does not have: k is its rank. `largest`: what zero is measured by."""
    U, s, Vh = torch.linalg.svd(matrix, full_matrices=False)
    rank = int((s > ROUNDING * (s[:1] if largest is None else largest)).sum())
    return SingularVectors(U, s, Vh).first(rank)


def orthogonalized(columns: Tensor) -> Tensor:
    """The matrix (m, k) with orthonormal columns that is nearest to this one (Procrustes): P Qᵀ of its P D Qᵀ.

    Of columns that depend on each other, the part that every nearest one has in common: they share a direction.
    """
    P, _, Qh = decomposed(columns)
    return P @ Qh


def joined(parts: list[SingularVectors]) -> SingularVectors:
    """Side by side, made orthogonal again."""
    U = orthogonalized(torch.cat([part.U for part in parts], 1))
    V = orthogonalized(torch.cat([part.Vh for part in parts]).T)
    return SingularVectors(U, torch.cat([part.s for part in parts]), V.T)


@dataclass(frozen=True)
class TsvMethod(MergeMethod):
    name = "tsv"
    scale = (
        "α is the paper's, which finds that 1 serves; parameters that are no matrices are added up, in its code "
        "averaged: with 'mean', here too"
    )

    mean: bool = False

    def __post_init__(self) -> None:
        self.require_switch("mean")

    def parameter(self, inputs: Sequence[MethodInput], name: str) -> Tensor:
        shape = inputs[0].tensors[name].shape
        if len(shape) != 2:
            return weighted_sum(inputs, name, mean=self.mean)
        share = max(1, min(shape) // len(inputs))
        U, s, Vh = joined([decomposed(each.read(name)).first(share) for each in inputs])
        return (U * s) @ Vh
