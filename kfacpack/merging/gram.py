"""Inner products <M_s, M_t> of matrices, and what follows from them. T matrices of any size become T points.

Shapes: a Gram matrix is (T, T), and so are coordinates X with X Xᵀ = Gram. Row t of X is matrix t, as a point among T
points that have the matrices' own lengths and angles. All in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kfacpack.merging.strips import layout_of, side_by_side

if TYPE_CHECKING:
    from kfacpack.curvature.matrices import Matrix


def gram(matrices: Sequence[Matrix]) -> Tensor:
    """(T, T), from one pass over the matrices."""
    places = {id(matrix): matrix for matrix in matrices}
    each = list(places.values())
    layout = layout_of(each)
    products = np.zeros((len(each), len(each)))
    for strip, rows in side_by_side(layout, each):
        on_diagonal = rows[:, layout.diagonal(strip).numpy()]
        # numpy sees that a matrix meets its own transpose, and does half the work.
        products += 2 * (rows @ rows.T) - on_diagonal @ on_diagonal.T
    order = list(places)
    index = torch.tensor([order.index(id(matrix)) for matrix in matrices])
    return torch.from_numpy(products)[index][:, index]


def coordinates(products: Tensor) -> Tensor:
    """X (T, T) with X Xᵀ = the Gram matrix. Each row is scaled by itself, so that small ones are as exact as large."""
    lengths = products.diagonal().clamp(min=0).sqrt()
    scale = torch.where(lengths > 0, lengths, 1.0)
    values, vectors = torch.linalg.eigh(products / scale[:, None] / scale)
    found: Tensor = lengths[:, None] * vectors * values.clamp(min=0).sqrt()
    return found
