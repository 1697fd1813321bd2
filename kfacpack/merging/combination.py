"""Inner products <M_s, M_t> of matrices, and what follows from them. T matrices of any size become T points.

Shapes: a Gram matrix is (T, T), and so are coordinates X with X Xᵀ = Gram. Row t of X is matrix t, as a point among T
points that have the matrices' own lengths and angles. All in float64.

Σ coefficient · matrix, made when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kfacpack.curvature.matrices.components import MatrixTensors
from kfacpack.merging.strips import Strip, StripLayout, layout_of, side_by_side, write_strip

if TYPE_CHECKING:
    from kfacpack.curvature.matrices.matrix import Matrix
    from kfacpack.merging.strips import Numbers


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


class CombinedTensors(MatrixTensors):
    """The numbers of Σ coefficient · matrix, added up in float64.

    Who asks for a part at a time, as a writer does, gets it from the inputs' files; nothing is kept. Who computes with
    the tensor has it made once.
    """

    def __init__(self, layout: StripLayout, matrices: Sequence[Matrix], coefficients: Sequence[float]):
        self._layout = layout
        self._matrices = matrices
        self._coefficients = np.array(coefficients)
        self._wide = any(matrix.dtype is torch.float64 for matrix in matrices)
        self.specs = {"data": ("F64" if self._wide else "F32", layout.shape)}
        self._made: Tensor | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._made is None:
            self._made = torch.cat(list(self.parts(name))).reshape(self.specs[name][1])
        return self._made

    def parts(self, name: str) -> Iterator[Tensor]:
        if self._made is not None:
            yield from super().parts(name)
            return
        for _, rows in side_by_side(self._layout, self._matrices):
            yield self._sum(rows)

    def span(self, name: str, start: int, stop: int) -> Tensor:
        """Whole rows of one triangle, as strips are; of anything else, all is made."""
        block, first = divmod(start, self._layout.shape[-1])
        strip = Strip(block, first, first + stop - start)
        if self._made is not None or not self._layout.is_strip(strip):
            return super().span(name, start, stop)
        return self._sum(
            write_strip(self._layout, self._matrices, strip, np.empty(len(self._matrices) * (stop - start)))
        )

    def _sum(self, rows: Numbers) -> Tensor:
        total = np.einsum("t,tn->n", self._coefficients, rows)
        return torch.from_numpy(total if self._wide else total.astype(np.float32))


class MatrixCombiner:
    """Makes each combination of the same matrices once, so that blocks that shared a matrix still do."""

    def __init__(self) -> None:
        self._made: dict[tuple[tuple[int, float], ...], tuple[Matrix, list[Matrix]]] = {}

    def __call__(self, matrices: Sequence[Matrix], coefficients: Sequence[float], *, psd: bool | None = None) -> Matrix:
        """Σ coefficient · matrix. It promises to be positive semi-definite if `psd` says so, or else if it must be."""
        coefficient_of: dict[int, float] = {}
        for matrix, coefficient in zip(matrices, coefficients, strict=True):
            coefficient_of[id(matrix)] = coefficient_of.get(id(matrix), 0.0) + coefficient
        key = tuple((which, value) for which, value in coefficient_of.items() if value) or ((id(matrices[0]), 0.0),)
        by_id = {id(matrix): matrix for matrix in matrices}
        used = [by_id[which] for which, _ in key]
        if len(used) == 1 and key[0][1] == 1:
            return used[0]
        if key not in self._made:
            values = [value for _, value in key]
            layout = layout_of(used)
            must = all(each.psd and value >= 0 for each, value in zip(used, values, strict=True))
            matrix = layout.hold(
                CombinedTensors(layout, used, values),
                psd=must if psd is None else psd,
                examples=_scaled_sum([each.examples for each in used], values),
                positions=_scaled_sum([each.positions for each in used], values),
            )
            # The addends are looked at when they are read; to look at their sum would be to make and keep it.
            matrix.take_for_sound()
            self._made[key] = matrix, used
        return self._made[key][0]


def _scaled_sum(counts: Sequence[int | None], coefficients: Sequence[float]) -> int | None:
    """Not known where something is subtracted: what it was subtracted from may have counted it otherwise."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) and min(coefficients) >= 0 else None
