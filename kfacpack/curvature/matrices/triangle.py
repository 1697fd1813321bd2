"""Symmetric matrices as their lower triangles, row by row: m[0,0], m[1,0], m[1,1], m[2,0], …

Shapes: a full matrix is (..., n, n), its triangle (..., n(n+1)/2); leading dimensions are carried along.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kfacpack.bundle.layout import triangle

_TILE = 512


def pack(full: Tensor) -> Tensor:
    """(..., n, n) -> (..., n(n+1)/2). What stands above the diagonal is not looked at."""
    if full.device.type != "cpu":
        return pack(full.cpu()).to(full.device)
    side = full.shape[-1]
    packed = full.new_empty((*full.shape[:-2], triangle(side)))
    _copy_rows(_for_copying(full), _for_copying(packed), range(side))
    return packed


def pack_rows(part: Tensor, row: int, left: int, packed: Tensor) -> None:
    """Put a part of a full matrix, from its row `row` and column `left` on, to its place in the triangle."""
    source, target = _for_copying(part), _for_copying(packed)
    width = part.shape[1]
    for values in source:
        start, count = triangle(row) + left, min(width, row + 1 - left)
        target[start : start + count] = values[:count]
        row += 1


def pack_in_parts(full: Tensor, limit: int) -> Iterator[Tensor]:
    """The numbers of `pack(full)`, some rows at a time: at most `limit` numbers, or one row."""
    full = full.cpu()
    side, start = full.shape[-1], 0
    source = _for_copying(full)
    while start < side:
        stop = start + 1
        while stop < side and triangle(stop + 1) - triangle(start) <= limit:
            stop += 1
        part = full.new_empty(triangle(stop) - triangle(start))
        _copy_rows(source, _for_copying(part), range(start, stop))
        yield part
        start = stop


def _copy_rows(source: Any, target: Any, rows: range) -> None:
    end = 0
    for row in rows:
        start, end = end, end + row + 1
        target[..., start:end] = source[..., row, : row + 1]


def unpack(packed: Tensor, side: int, scale: Tensor | None = None) -> Tensor:
    """(..., n(n+1)/2) -> (..., n, n), symmetric; with `scale`, (..., n), row i of the triangle times scale[i]."""
    if packed.device.type != "cpu" or not _has_memory(packed):
        if scale is not None:
            packed = packed * scale[..., row_of_each(side).to(scale.device)]
        # One gather; n small copies would be n kernels.
        i, j = torch.meshgrid(*(torch.arange(side, device=packed.device),) * 2, indexing="ij")
        high, low = torch.maximum(i, j), torch.minimum(i, j)
        return packed[..., high * (high + 1) // 2 + low]
    full = packed.new_empty((*packed.shape[:-1], side, side), dtype=packed.dtype if scale is None else scale.dtype)
    source, target = _for_copying(packed), _for_copying(full)
    factors = None if scale is None else _for_copying(scale)
    for row in range(side):
        values, place = source[..., triangle(row) : triangle(row + 1)], target[..., row, : row + 1]
        if factors is None:
            place[...] = values
        else:
            np.multiply(values, factors[..., row, None], out=place)
    for rows in _tiles(side):
        for columns in _tiles(rows.start):
            full[..., columns, rows] = full[..., rows, columns].mT
        corner = full[..., rows, rows]
        corner.copy_(corner.tril() + corner.tril(-1).mT)
    return full


def _has_memory(tensor: Tensor) -> bool:
    """Whether numpy may look at a tensor's memory; inside torch.func's transforms it may not."""
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True


def _for_copying(tensor: Tensor) -> Any:
    """A numpy view: copying a row costs a quarter of what torch takes. It has no bfloat16; its bits travel as int16."""
    return tensor.detach().view(torch.int16 if tensor.dtype is torch.bfloat16 else tensor.dtype).numpy()


def row_of_each(side: int) -> Tensor:
    """For every number of a triangle, the row it stands in: 0, 1, 1, 2, 2, 2, …"""
    rows = torch.arange(side)
    return rows.repeat_interleave(rows + 1)


def asymmetry(full: Tensor) -> float:
    """Largest |m - mᵀ| of (n, n); NaN where there is one."""
    gaps = [
        (full[rows, columns] - full[columns, rows].mT).abs().amax()
        for rows in _tiles(full.shape[-1])
        for columns in _tiles(rows.stop)
    ]
    return float(torch.stack(gaps).amax())


def _tiles(side: int) -> list[slice]:
    """Square tiles that stay in a core's cache while they are read along rows and columns."""
    return [slice(start, min(start + _TILE, side)) for start in range(0, side, _TILE)]
