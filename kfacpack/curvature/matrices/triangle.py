"""Symmetric matrices as their lower triangles, row by row: m[0,0], m[1,0], m[1,1], m[2,0], …

Shapes: a full matrix is (..., n, n), its triangle (..., n(n+1)/2); leading dimensions are carried along.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kfacpack.bundle.layout import triangle

_PANEL = 256


def pack(full: Tensor) -> Tensor:
    """(..., n, n) -> (..., n(n+1)/2). What stands above the diagonal is not looked at."""
    side = full.shape[-1]
    out = full.new_empty((*full.shape[:-2], triangle(side)))
    end = 0
    for row in range(side):
        start, end = end, end + row + 1
        out[..., start:end] = full[..., row, : row + 1]
    return out


def unpack(packed: Tensor, side: int) -> Tensor:
    """(..., n(n+1)/2) -> (..., n, n), symmetric."""
    full = packed.new_empty((*packed.shape[:-1], side, side))
    for row, numbers in enumerate(packed.split(list(range(1, side + 1)), dim=-1)):
        full[..., row, : row + 1] = numbers
    for start in range(0, side, _PANEL):
        stop = min(start + _PANEL, side)
        corner = full[..., start:stop, start:stop]
        corner.copy_(corner.tril() + corner.tril(-1).mT)
        full[..., start:stop, stop:] = full[..., stop:, start:stop].mT
    return full


def row_of_each(side: int) -> Tensor:
    """For every number of a triangle, the row it stands in: 0, 1, 1, 2, 2, 2, …"""
    rows = torch.arange(side)
    return rows.repeat_interleave(rows + 1)


def asymmetry(full: Tensor) -> float:
    """Largest |m - mᵀ| of (n, n), a panel at a time."""
    side, worst = full.shape[-1], 0.0
    for start in range(0, side, _PANEL):
        stop = min(start + _PANEL, side)
        gap = (full[start:stop, :stop] - full[:stop, start:stop].mT).abs().amax()
        worst = max(worst, float(gap))
    return worst
