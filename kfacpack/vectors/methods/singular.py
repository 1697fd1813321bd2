"""Singular vectors, for the methods that merge matrices by them. A matrix is (m, n), r = min(m, n).

Parameters of two dimensions are matrices, as in the authors' codes; all others (biases, norms, tokens, kernels of
convolutions) are added up, or averaged where `mean` is asked for, as there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ROUNDING = torch.finfo(torch.float32).eps
"""Singular values below this share of the largest are what rounding the numbers to float32 makes of zero.

Their vectors are arbitrary: a method that gave them weight would add noise, and would not know its own result again.
"""


class Svd(NamedTuple):
    """U diag(s) Vh, of the k largest singular values: (m, k), (k,), (k, n)."""

    U: Tensor
    s: Tensor
    Vh: Tensor

    def first(self, k: int) -> Svd:
        """A copy, so that the rest can be forgotten."""
        return Svd(self.U[:, :k].clone(), self.s[:k].clone(), self.Vh[:k].clone())


def decomposed(matrix: Tensor, largest: Tensor | None = None) -> Svd:
    """Without directions that the matrix does not have: k is its rank. `largest`: what zero is measured by."""
    U, s, Vh = torch.linalg.svd(matrix, full_matrices=False)
    rank = int((s > ROUNDING * (s[:1] if largest is None else largest)).sum())
    return Svd(U, s, Vh).first(rank)


def orthogonalized(columns: Tensor) -> Tensor:
    """The matrix (m, k) with orthonormal columns that is nearest to this one (Procrustes): P Qᵀ of its P D Qᵀ.

    Of columns that depend on each other, the part that every nearest one has in common: they share a direction.
    """
    P, _, Qh = decomposed(columns)
    return P @ Qh


def joined(parts: list[Svd]) -> Svd:
    """Side by side, made orthogonal again."""
    U = orthogonalized(torch.cat([part.U for part in parts], 1))
    V = orthogonalized(torch.cat([part.Vh for part in parts]).T)
    return Svd(U, torch.cat([part.s for part in parts]), V.T)
