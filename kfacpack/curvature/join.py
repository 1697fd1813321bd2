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
    delta = torch.zeros((join.rows, join.columns), dtype=dtype, device=given[0].device)
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
