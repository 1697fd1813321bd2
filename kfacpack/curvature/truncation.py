"""Low-rank approximations of matrices, in the Frobenius norm and in the metric of a curvature.

Shapes: a weight W is (m, n). Its approximation is U V with U (m, r) and V (r, n). In the norm ‖X‖² = <X, R X C>, with
R = L Lᵀ (m, m) and C = M Mᵀ (n, n), the best approximation of rank r is

    U V = L⁻ᵀ [Lᵀ W M]_r M⁻¹

where [·]_r is the truncated singular value decomposition. The result does not depend on which square roots L and M are
used; Cholesky factors are the cheapest. R and C are damped, because the part of W in directions without curvature would
otherwise be lost even at full rank. If the curvature G is not a single Kronecker product, R ⊗ C is the Kronecker
product nearest to G in the Frobenius norm. The result is then not always the best approximation in the metric of G.
Callers therefore compare its error with the error of the truncated singular value decomposition of W.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kfacpack.curvature.blocks import CurvatureBlock, ParameterShapes
    from kfacpack.curvature.curvature import Curvature
    from kfacpack.format.manifest import Piece

LowRankPair: TypeAlias = tuple[Tensor, Tensor]
"""The factors U (m, r) and V (r, n) of a low-rank matrix."""
KroneckerTerm: TypeAlias = tuple[Tensor, Tensor, float]
"""The matrices R (m, m) and C (n, n), and the weight of R ⊗ C."""

_DAMPINGS = (1e-8, 1e-6)
"""Damping values, relative to the mean eigenvalue, in the order in which they are tried."""
_NEGLIGIBLE = 1e-7
"""Singular values below this fraction of the largest singular value are considered rounding errors of float32."""
_MAX_DENSE = 4096
"""Dense blocks that cover more elements of a weight than this are ignored by `BlockMetric.kronecker`."""
_POWER_STEPS = 50


def truncate(W: Tensor, rank: int) -> LowRankPair:
    """Returns the best low-rank approximation of a matrix W in the Frobenius norm, as the factors of a product U V.

    Args:
        W: Float64 matrix, (m, n).
        rank: Maximum rank.

    Returns:
        U (m, r) and V (r, n) with r = min(rank, m, n).
    """
    if W.shape[0] < W.shape[1]:
        U, V = truncate(W.T, rank)
        return V.T, U.T
    # Decomposing the smaller Gram matrix takes a fraction of the time of a singular value decomposition.
    V = torch.linalg.eigh(W.T @ W).eigenvectors[:, -min(rank, W.shape[1]) :]
    return W @ V, V.T


def truncate_in_metric(W: Tensor, R: Tensor, C: Tensor, rank: int) -> LowRankPair:
    """Returns the best low-rank approximation of a matrix W in the norm ‖X‖² = <X, R X C>, as factors of a product U V.

    Negative eigenvalues of R and C are treated as zero. A small multiple of the identity is added to both.

    Args:
        W: Float64 matrix, (m, n).
        R: Symmetric float64 matrix, (m, m).
        C: Symmetric float64 matrix, (n, n).
        rank: Maximum rank.

    Returns:
        U (m, r) and V (r, n) with r = min(rank, m, n).
    """
    L, M = _damped_root(R), _damped_root(C)
    U, V = truncate(L.T @ W @ M, rank)
    solve = torch.linalg.solve_triangular
    return solve(L.T, U, upper=True), solve(M, V, upper=False, left=False)


def _damped_root(matrix: Tensor) -> Tensor:
    """Adds a small multiple of the identity to a matrix, and returns the Cholesky factor of the result."""
    identity = torch.eye(len(matrix), dtype=matrix.dtype)
    mean = float(matrix.diagonal().mean())
    for damping in _DAMPINGS if mean > 0 else ():
        L: Tensor
        L, failed = torch.linalg.cholesky_ex(matrix + damping * mean * identity)
        if not failed:
            return L
    # Pruned and quantised matrices may have negative eigenvalues.
    values, vectors = torch.linalg.eigh(matrix)
    values = values.clamp(min=0)
    values = values + (_DAMPINGS[-1] * float(values.mean()) or 1.0)
    root: Tensor = torch.linalg.cholesky((vectors * values) @ vectors.T)
    return root


def balanced(U: Tensor, V: Tensor) -> LowRankPair:
    """Returns float32 factors of the product U V. Both factors have the same singular values.

    Negligible singular values of U V are dropped.

    Args:
        U: Left factor, (m, r).
        V: Right factor, (r, n).
    """
    (left, P), (right, Q) = torch.linalg.qr(U), torch.linalg.qr(V.T)
    u, s, v = torch.linalg.svd(P @ Q.T)
    kept = s > _NEGLIGIBLE * s[0] if len(s) else s > 0
    root = s[kept].sqrt()
    return (left @ u[:, kept] * root).float().contiguous(), (root[:, None] * (v[kept] @ right.T)).float().contiguous()


class BlockMetric:
    """The curvature G of one weight matrix: its quadratic form and the nearest Kronecker product.

    Other parameters of the same blocks, such as the bias, are assumed to be unchanged.

    Args:
        curvature: The curvature.
        name: Name of the weight.
        shapes: Shapes of the parameters, by name.
    """

    def __init__(self, curvature: Curvature, name: str, shapes: ParameterShapes):
        self._name, self._shapes = name, shapes
        self._blocks = [block for block in curvature.blocks if name in block.parameters]
        self._shape = shapes[name][0], prod(shapes[name][1:])

    def quadratic(self, delta: Tensor) -> float:
        """Returns <Δ, G Δ> for a change Δ, (m, n), to the weight."""
        tau = {self._name: delta.reshape(self._shapes[self._name])}
        return sum(float(block.quadratic(tau, {**self._shapes})) for block in self._blocks)

    def kronecker(self) -> tuple[Tensor, Tensor] | None:
        """Returns R (m, m) and C (n, n) such that R ⊗ C is the Kronecker product nearest to G.

        Large dense blocks are left out. Returns None if G is zero or no block remains.
        """
        terms = [term for block in self._blocks for term in self._terms(block)]
        combined = _nearest_term(terms) if terms else None
        return combined if combined and float(combined[0].trace()) > 0 < float(combined[1].trace()) else None

    def _terms(self, block: CurvatureBlock) -> Iterator[KroneckerTerm]:
        for piece in block.join.pieces:
            if piece.parameter != self._name or piece.view == "column":
                continue
            height, width = piece.matrix_shape(self._shapes[self._name])
            top, left = piece.at
            if len(block.structure.sides) == 2:
                for weight, B, A in zip(block.structure.weights, *block.structure.sides, strict=True):
                    # Leave out the row and column of A that belong to the bias.
                    B_part = B.dense(torch.float64)[top : top + height, top : top + height]
                    A_part = A.dense(torch.float64)[left : left + width, left : left + width]
                    yield self._orient(B_part, A_part, weight, piece)
                continue
            (matrix,) = block.structure.sides[0]
            rows, columns = torch.arange(top, top + height), torch.arange(left, left + width)
            index = (rows[:, None] * block.join.columns + columns).flatten()
            plain = matrix.plain(torch.float64) if matrix.structure == "diagonal" or len(index) <= _MAX_DENSE else None
            if plain is None:
                continue
            if plain.dim() == 1:
                row, column = _leading_pair(plain[index].reshape(height, width))
                yield self._orient(row.diag(), column.diag(), 1.0, piece)
            else:
                G = plain[index][:, index].reshape(height, width, height, width)
                R, C = _leading_pair(G.permute(0, 2, 1, 3).reshape(height * height, width * width))
                yield self._orient(R.reshape(height, height), C.reshape(width, width), 1.0, piece)

    def _orient(self, B: Tensor, A: Tensor, weight: float, piece: Piece) -> KroneckerTerm:
        """Converts a term B ⊗ A for one piece of ΔW to a term R ⊗ C for the whole parameter.

        R and C are exchanged if ΔW contains the transpose of the parameter. Rows of R outside the piece are zero.
        """
        R, C = (A, B) if piece.view == "transposed" else (B, A)
        if piece.rows is not None:
            whole = R.new_zeros(self._shape[0], self._shape[0])
            whole[slice(*piece.rows), slice(*piece.rows)] = R
            R = whole
        return R, C, weight


def _nearest_term(terms: list[KroneckerTerm]) -> tuple[Tensor, Tensor]:
    """Returns R and C such that R ⊗ C is the Kronecker product nearest to a sum of Kronecker products.

    R and C are linear combinations of the factors in the sum. Their coefficients are computed by power iteration.
    """
    if len(terms) == 1:
        R, C, weight = terms[0]
        return weight * R, C
    weights = torch.tensor([weight for _, _, weight in terms], dtype=torch.float64)
    rows, columns = _gram([R for R, _, _ in terms]), _gram([C for _, C, _ in terms])
    column = weights.clone()
    for _ in range(_POWER_STEPS):
        row = weights * (columns @ column)
        column = weights * (rows @ row)
        column = column / (column.norm() or 1.0)
    return (
        sum((float(c) * term[0] for c, term in zip(row, terms, strict=True)), torch.zeros_like(terms[0][0])),
        sum((float(c) * term[1] for c, term in zip(column, terms, strict=True)), torch.zeros_like(terms[0][1])),
    )


def _gram(matrices: list[Tensor]) -> Tensor:
    return torch.tensor([[float((one * other).sum()) for other in matrices] for one in matrices], dtype=torch.float64)


def _leading_pair(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Returns vectors u and v such that u vᵀ is the best approximation of a matrix by a matrix of rank one.

    If no entry of the matrix is negative, no entry of u or v is negative.
    """
    v = matrix.sum(0) if matrix.shape[0] else matrix.new_zeros(matrix.shape[1])
    for _ in range(_POWER_STEPS):
        u = matrix @ v
        v = matrix.T @ (u / (u.norm() or 1.0))
    return u / (u.norm() or 1.0), v
