"""Between parameters by name and the one matrix ΔW (rows, columns) their block acts on.

A bias stands as last column beside its weight; a fused projection's rows may belong to several blocks; a parameter used
as `x @ W` stands transposed. The pieces say so; these two functions do it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kfacpack.bundle.manifest import Join, Piece

    Shapes = Mapping[str, tuple[int, ...]]


def gather(tau: Mapping[str, Tensor], join: Join, shapes: Shapes) -> Tensor:
    """The parameters' matrix, at least in float32. A parameter that `tau` leaves out is zero."""
    given = [tau[piece.parameter] for piece in join.pieces if piece.parameter in tau]
    dtype = torch.float32
    for tensor in given:
        dtype = torch.promote_types(dtype, tensor.dtype)
    if len(join.pieces) == 1 and given:
        return _as_matrix(given[0], join.pieces[0]).to(dtype)
    # Pieces tile the matrix, so that with all of them there, nothing of it stays as it is made.
    blank = torch.empty if len(given) == len(join.pieces) else torch.zeros
    delta = blank((join.rows, join.columns), dtype=dtype, device=given[0].device)
    for piece in join.pieces:
        if piece.parameter in tau:
            _place(delta, piece, shapes).copy_(_as_matrix(tau[piece.parameter], piece))
    return delta


def scatter(delta: Tensor, join: Join, shapes: Shapes) -> dict[str, Tensor]:
    """The matrix's parameters, each in its own shape. Rows of a parameter that no piece covers are zero."""
    found: dict[str, Tensor] = {}
    for piece in join.pieces:
        shape = shapes[piece.parameter]
        place = _place(delta, piece, shapes)
        values = place.T if piece.view == "transposed" else place
        if piece.rows is None:
            found[piece.parameter] = values.reshape(shape)
        else:
            start, stop = piece.rows
            whole = found.setdefault(piece.parameter, delta.new_zeros(shape))
            whole[start:stop] = values.reshape((stop - start, *shape[1:]))
    return found


def accumulate(delta: Tensor, join: Join, shapes: Shapes, sums: Mapping[str, Tensor], factor: float) -> None:
    """Add `factor` times the matrix's parameters to those of `sums`, in place. Those it lacks are left out."""
    for piece in join.pieces:
        if piece.parameter in sums:
            place = _place(delta, piece, shapes)
            values = place.T if piece.view == "transposed" else place
            whole = sums[piece.parameter]
            target = whole if piece.rows is None else whole[piece.rows[0] : piece.rows[1]]
            target.add_(values.reshape(target.shape).to(target.device), alpha=factor)


def _place(delta: Tensor, piece: Piece, shapes: Shapes) -> Tensor:
    height, width = piece.matrix_shape(shapes[piece.parameter])
    top, left = piece.at
    return delta[top : top + height, left : left + width]


def _as_matrix(tensor: Tensor, piece: Piece) -> Tensor:
    if piece.rows is not None:
        tensor = tensor[piece.rows[0] : piece.rows[1]]
    if piece.view == "column":
        return tensor.reshape(-1, 1)
    matrix = tensor.reshape(tensor.shape[0], -1)
    return matrix.T if piece.view == "transposed" else matrix
