"""The eigenvalues of a bundle's matrices: how many directions count, and how fast the others fade."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfacpack.curvature.curvature import Curvature

MOST = 64
"""How many eigenvalues of a matrix are listed."""


def spectra(
    curvature: Curvature, *, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """{"blocks": [{"name", "side": "A" | "B" | "G", "size", "trace", "effective_rank", "eigenvalues", "ranks"}]}.

    Of each matrix of each block at most `MOST` eigenvalues, in falling order, evenly spaced in the logarithm of their
    ranks, which count from 1. A block that keeps several terms has a matrix in each of them. `on_progress` hears how
    many matrices are done, and how many there are; layers with the same input share one.
    """
    listed = [(block.name, *found) for block in curvature.blocks for found in block.structure.matrices()]
    total = len({id(matrix) for _, _, matrix in listed})
    known: dict[int, dict[str, Any]] = {}
    on_progress(0, total)
    blocks = []
    for name, role, matrix in listed:
        if id(matrix) not in known:
            known[id(matrix)] = _said(matrix.eigenvalues())
            on_progress(len(known), total)
        side, _, term = role.partition(".")
        shown = f"{name} (term {int(term) + 1})" if term else name
        blocks.append({"name": shown, "side": side, **known[id(matrix)]})
    return {"blocks": blocks}


def effective_rank(values: Tensor) -> float:
    """exp of the entropy of the eigenvalues' shares (Roy and Vetterli): n for n equal ones, 1 for a single one.

    Those below zero, by rounding or by pruning, count as zero.
    """
    positive = values[values > 0].double()
    if not len(positive):
        return 0.0
    shares = positive / positive.sum()
    return float(torch.exp(-torch.special.xlogy(shares, shares).sum()))


def _said(values: Tensor) -> dict[str, Any]:
    """(n,), in falling order."""
    ranks = np.unique(np.geomspace(1, len(values), MOST).round().astype(int))
    return {
        "size": len(values),
        "trace": float(values.sum()),
        "effective_rank": effective_rank(values),
        "eigenvalues": values[torch.from_numpy(ranks) - 1].tolist(),
        "ranks": ranks.tolist(),
    }
