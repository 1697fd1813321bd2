"""Inner products and linear combinations of matrices that may not fit into memory.

A Gram matrix of T matrices has shape (T, T), with entries <M_s, M_t>. Coordinates X, also of shape (T, T), satisfy
X Xᵀ = Gram: row t represents matrix t as a vector with the same norm and the same angles to the other rows.
Everything is computed in float64, one strip of the matrices at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kfacpack.curvature.matrices.components import MatrixTensors
from kfacpack.merging.strips import Strip, StripLayout, iterate_strips, layout_of, write_strip

if TYPE_CHECKING:
    from kfacpack.curvature.matrices.matrix import Matrix
    from kfacpack.merging.strips import FloatArray


def gram(matrices: Sequence[Matrix]) -> Tensor:
    """Computes the Gram matrix of symmetric matrices in one pass over them.

    Args:
        matrices: T matrices of the same side. A matrix that occurs more than once is read once.

    Returns:
        The inner products <M_s, M_t>, of shape (T, T), in float64.
    """
    unique = {id(matrix): matrix for matrix in matrices}
    distinct = list(unique.values())
    layout = layout_of(distinct)
    products = np.zeros((len(distinct), len(distinct)))
    for strip, rows in iterate_strips(layout, distinct):
        on_diagonal = rows[:, layout.diagonal(strip).numpy()]
        # numpy recognises a product of a matrix with its own transpose and does half the work.
        products += 2 * (rows @ rows.T) - on_diagonal @ on_diagonal.T
    order = list(unique)
    index = torch.tensor([order.index(id(matrix)) for matrix in matrices])
    return torch.from_numpy(products)[index][:, index]


def coordinates(products: Tensor) -> Tensor:
    """Returns X with X Xᵀ = Gram.

    Rows are normalised before the decomposition, so that small matrices are as accurate as large ones.

    Args:
        products: A Gram matrix of shape (T, T).

    Returns:
        The coordinates, of shape (T, T).
    """
    lengths = products.diagonal().clamp(min=0).sqrt()
    scale = torch.where(lengths > 0, lengths, 1.0)
    eigenvalues, eigenvectors = torch.linalg.eigh(products / scale[:, None] / scale)
    points: Tensor = lengths[:, None] * eigenvectors * eigenvalues.clamp(min=0).sqrt()
    return points


class CombinedTensors(MatrixTensors):
    """The entries of Σ coefficient · matrix, summed in float64 when they are read.

    Reading in parts, as a writer does, streams from the inputs' files and caches nothing. Reading the whole tensor
    computes it once and caches it.
    """

    def __init__(self, layout: StripLayout, matrices: Sequence[Matrix], coefficients: Sequence[float]):
        self._layout = layout
        self._matrices = matrices
        self._coefficients = np.array(coefficients)
        self._wide = any(matrix.dtype is torch.float64 for matrix in matrices)
        self.specs = {"data": ("F64" if self._wide else "F32", layout.shape)}
        self._cached: Tensor | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._cached is None:
            self._cached = torch.cat(list(self.parts(name))).reshape(self.specs[name][1])
        return self._cached

    def parts(self, name: str) -> Iterator[Tensor]:
        """Yields the flattened tensor in consecutive parts."""
        if self._cached is not None:
            yield from super().parts(name)
            return
        for _, rows in iterate_strips(self._layout, self._matrices):
            yield self._sum(rows)

    def span(self, name: str, start: int, stop: int) -> Tensor:
        """Returns elements `start` to `stop` of the flattened tensor.

        Only whole rows of one triangle are computed separately; any other span computes the whole tensor.
        """
        block, first = divmod(start, self._layout.shape[-1])
        strip = Strip(block, first, first + stop - start)
        if self._cached is not None or not self._layout.is_strip(strip):
            return super().span(name, start, stop)
        return self._sum(
            write_strip(self._layout, self._matrices, strip, np.empty(len(self._matrices) * (stop - start)))
        )

    def _sum(self, rows: FloatArray) -> Tensor:
        total = np.einsum("t,tn->n", self._coefficients, rows)
        return torch.from_numpy(total if self._wide else total.astype(np.float32))


class MatrixCombiner:
    """Builds linear combinations of matrices. Equal combinations are built once.

    Blocks that share a matrix therefore also share the combined matrix.
    """

    def __init__(self) -> None:
        # The inputs are stored along with the result because their ids are the key.
        self._combined: dict[tuple[tuple[int, float], ...], tuple[Matrix, list[Matrix]]] = {}

    def __call__(self, matrices: Sequence[Matrix], coefficients: Sequence[float], *, psd: bool | None = None) -> Matrix:
        """Returns Σ coefficient · matrix, evaluated lazily.

        Args:
            matrices: Matrices of the same side.
            coefficients: One coefficient per matrix.
            psd: Whether the result is marked as positive semi-definite. By default, it is if all coefficients
                are non-negative and all matrices with a non-zero coefficient are positive semi-definite.
        """
        coefficient_of: dict[int, float] = {}
        for matrix, coefficient in zip(matrices, coefficients, strict=True):
            coefficient_of[id(matrix)] = coefficient_of.get(id(matrix), 0.0) + coefficient
        key = tuple((matrix_id, value) for matrix_id, value in coefficient_of.items() if value) or (
            (id(matrices[0]), 0.0),
        )
        by_id = {id(matrix): matrix for matrix in matrices}
        used = [by_id[matrix_id] for matrix_id, _ in key]
        if len(used) == 1 and key[0][1] == 1:
            return used[0]
        if key not in self._combined:
            values = [value for _, value in key]
            layout = layout_of(used)
            nonnegative = all(matrix.psd and value >= 0 for matrix, value in zip(used, values, strict=True))
            combined = layout.make_matrix(
                CombinedTensors(layout, used, values),
                psd=nonnegative if psd is None else psd,
                examples=_total_count([matrix.examples for matrix in used], values),
                positions=_total_count([matrix.positions for matrix in used], values),
            )
            # The inputs are checked when they are read; checking the sum would compute and cache it.
            combined.skip_validation()
            self._combined[key] = combined, used
        return self._combined[key][0]


def _total_count(counts: Sequence[int | None], coefficients: Sequence[float]) -> int | None:
    """Returns the sum of the counts, or None if a count is missing or a coefficient is negative."""
    present = [count for count in counts if count is not None]
    return sum(present) if len(present) == len(counts) and min(coefficients) >= 0 else None
