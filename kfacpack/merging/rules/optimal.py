"""The nearest Kronecker sum of r terms, in the Frobenius norm.

Σ w_t B_t ⊗ A_t, rearranged, is the matrix Σ w_t vec(B_t) vec(A_t)ᵀ of rank T; its best approximation of rank r is its
truncated singular value decomposition. In coordinates (gram.py) that matrix is N = Xᵀ diag(w) Y, of T × T numbers. With
singular vectors p and q of N, N q = Σ w_t <A_t, q> B_t and Nᵀ p = Σ w_t <B_t, p> A_t give the factors' coefficients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kfacpack.errors import KfacpackError
from kfacpack.merging.rules.base import Combination, Rule, Terms

_EQUAL = 1e-9
"""Singular values that differ by less, relatively, are one, and any rotation of their vectors is as good."""


class Optimal(Rule):
    name = "optimal"
    ranked = True

    def __init__(self, rank: int = 1):
        super().__init__(rank)
        if rank < 1:
            raise KfacpackError(f"the rank is at least 1, not {rank}")

    def kronecker(self, terms: Terms) -> Combination:
        w = terms.weights
        if self.rank >= len(w):
            each = torch.eye(len(w), dtype=torch.float64)
            return Combination(w, (each, each))
        X, Y = terms.coordinates
        N = X.T @ (w[:, None] * Y)
        # λ A summed, as in the paper's rule: a direction in which no task pulls against another.
        mean = Y.T @ (terms.tasks * w / terms.tasks.sum())
        p, s, q = _decomposed(N, mean)
        kept = [k for k in range(self.rank) if k == 0 or s[k] > s[0] * torch.finfo(s.dtype).eps]
        # A is made as large as the paper's, and B takes the rest.
        size = float(mean.norm()) or 1.0
        B = w * (Y @ q[:, kept]).T / size
        A = w * (X @ p[:, kept]).T * torch.where(s[kept] > 0, size / s[kept], 0.0)[:, None]
        if all(matrix.psd for side in terms.sides for matrix in side) and bool((w >= 0).all()):
            # By Perron and Frobenius the first pair is not negative, but for rounding.
            B[0].clamp_(min=0)
            A[0].clamp_(min=0)
        return Combination(torch.ones(len(kept), dtype=torch.float64), (B, A))


def _decomposed(N: Tensor, mean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """N = p diag(s) qᵀ; of equally good q, the first is the one nearest to `mean`, and points its way."""
    p, s, qh = torch.linalg.svd(N)
    q = qh.T.clone()
    alike = int((s >= s[0] * (1 - _EQUAL)).sum())
    toward = q[:, :alike].T @ mean
    if float(s[0]) > 0 and float(toward.norm()) > 0:
        q[:, :alike] = q[:, :alike] @ _reflection(toward / toward.norm())
        p[:, :alike] = N @ q[:, :alike] / s[:alike]
    return p, s, q


def _reflection(first: Tensor) -> Tensor:
    """An orthogonal matrix with this unit vector as its first column."""
    identity = torch.eye(len(first), dtype=first.dtype)
    normal = first - identity[0]
    length = float(normal.dot(normal))
    return identity - 2 * torch.outer(normal, normal) / length if length > 0 else identity
