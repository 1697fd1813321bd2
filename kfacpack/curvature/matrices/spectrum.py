"""The leading eigenvalues of a symmetric matrix and their vectors, without the others where that is cheaper."""

from __future__ import annotations

import torch
from torch import Tensor

_WIDTHS = (1 / 32, 1 / 8, 1 / 3)
"""Widths of the subspace that is looked for, as shares of the side."""
_SPARE = 0.8
"""Of a subspace, this share is good; the spare dimensions speed up the iteration."""
_WHOLE_BELOW = 256
"""A matrix of a smaller side is decomposed as a whole."""
_ENOUGH, _MOST = 1e-5, 100
"""Iterations end when one has lessened the squared error by no more than this share of it, or after this many."""


def width_for(side: int, rank: int) -> int:
    """How many eigenvalues are looked for where `rank` are wanted. Few widths serve all ranks."""
    widths = (int(share * side) for share in _WIDTHS) if side >= _WHOLE_BELOW else ()
    return next((width for width in widths if rank <= _SPARE * width), side)


def leading(matrix: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Eigenvalues, the largest magnitudes first, and their vectors, (w,) and (n, w), of a (n, n) float64 matrix.

    Subspace iteration: a random subspace, multiplied by the matrix and made orthonormal over and over, turns towards
    the leading eigenvectors. That takes a fraction of the time of a whole decomposition.
    """
    if width == len(matrix):
        values, vectors = torch.linalg.eigh(matrix)
    else:
        values, vectors = _iterated(matrix, width)
    order = values.abs().argsort(descending=True, stable=True)
    return values[order], vectors[:, order]


def _iterated(matrix: Tensor, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(len(matrix), width, dtype=matrix.dtype, generator=generator).to(matrix.device)
    size, kept, good = float(matrix.square().sum()), 0.0, int(_SPARE * width)
    for _ in range(_MOST):
        basis = torch.linalg.qr(matrix @ image).Q
        image = matrix @ basis
        values, rotation = torch.linalg.eigh(basis.T @ image)
        found = float(values.square().sort(descending=True).values[:good].sum())
        if found - kept <= _ENOUGH * (size - found) + 1e-14 * size:
            break
        kept = found
    return values, basis @ rotation
