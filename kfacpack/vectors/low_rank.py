"""Merging of low-rank task vectors in the span of their factors, without forming a dense matrix.

The matrix of a block is W_t = U_t V_t, with U_t (rows, r_t) and V_t (r_t, columns). With orthonormal bases
Q_U (rows, k) of all U_t and Q_V (k, columns) of all V_t, every W_t is Q_U S_t Q_V with a core S_t. The objective of
`solve.py` over matrices of this form, W = Q_U S Q_V, is that of a block of size (k, k) with B' = Q_Uᵀ B Q_U and
A' = Q_V A Q_Vᵀ. Its minimum is the best merge within that span; the best of all matrices would in general have full
rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfacpack.curvature.blocks import Kronecker
from kfacpack.curvature.matrices.dense import Dense
from kfacpack.merging.solve import WIDE_SIDE, SolveTerm, solve_block

if TYPE_CHECKING:
    from kfacpack.curvature.blocks import BlockStructure, ParameterShapes
    from kfacpack.curvature.matrices.matrix import Matrix
    from kfacpack.format.manifest import Join, Piece
    from kfacpack.merging.solve import Solution, SolveSettings
    from kfacpack.vectors.methods.method import MethodInput

    Factors = tuple[Tensor, Tensor]
    """U (m, r) and V (r, n) of a matrix U V."""


@dataclass(frozen=True)
class FactoredBlock:
    """The matrices of one block in the common bases of their factors."""

    join: Join
    shapes: ParameterShapes
    present: frozenset[str]
    """Parameters that the vectors have."""
    left: Tensor
    """Q_U, (rows, k)."""
    right: Tensor
    """Q_V, (k', columns)."""
    cores: tuple[Tensor, ...]
    """S_t of each vector, (k, k')."""

    @classmethod
    def of(
        cls, inputs: Sequence[MethodInput], join: Join, present: ParameterShapes, shapes: ParameterShapes
    ) -> FactoredBlock | None:
        """Joins the factors of all parameters of a block.

        Args:
            inputs: The vectors.
            join: Position of each parameter in the matrix of the block.
            present: Shapes of the parameters that the vectors have.
            shapes: Shapes of all parameters of the block.

        Returns:
            The block, or None if a parameter is dense in one of the vectors, or if the factors together are no
            smaller than the matrix.
        """
        joined: list[Factors] = []
        for vector in inputs:
            pieces = []
            for piece in join.pieces:
                if piece.parameter in present:
                    pair = vector.factors(piece.parameter)
                    if pair is None:
                        return None
                    pieces.append(_placed(pair, piece, join, shapes))
            joined.append(concatenated(pieces))
        U, V = concatenated(joined)
        if U.shape[1] * (join.rows + join.columns) >= join.rows * join.columns:
            return None
        left, right = torch.linalg.qr(U).Q, torch.linalg.qr(V.T).Q.T
        cores = tuple((left.T @ u) @ (v @ right.T) for u, v in joined)
        names = frozenset(piece.parameter for piece in join.pieces if piece.parameter in present)
        return cls(join, shapes, names, left, right, cores)

    def solve(
        self, name: str, terms: Sequence[tuple[float, BlockStructure, Tensor]], settings: SolveSettings
    ) -> Solution:
        """Finds the change of the prior's core that minimises the objective within the span.

        Args:
            name: Name of the block.
            terms: Weight, Kronecker structure and S_t − S_0 of each summand.
            settings: Settings of the solver.

        Returns:
            The change of the core, (k, k'), and the report.
        """
        mean, reduced = 0.0, []
        for weight, structure, target in terms:
            products = []
            for own, B, A in zip(structure.weights, *structure.sides, strict=True):
                small_B, trace_B = _projected(B, self.left)
                small_A, trace_A = _projected(A, self.right.T)
                products.append((small_B, small_A, own))
                mean += weight * own * trace_B * trace_A / (self.join.rows * self.join.columns)
            reduced.append(SolveTerm(weight, Kronecker(tuple(products)), target))
        return solve_block(name, reduced, settings, mean=mean)

    def split(self, core: Tensor) -> Iterator[tuple[str, Factors]]:
        """Yields the factors of each parameter of Q_U S Q_V, as matrices of shape (shape[0], -1).

        Args:
            core: S, (k, k').
        """
        left, right = (
            (self.left @ core, self.right) if core.shape[0] > core.shape[1] else (self.left, core @ self.right)
        )
        for piece in self.join.pieces:
            if piece.parameter in self.present:
                yield piece.parameter, _extracted((left, right), piece, self.shapes)


def concatenated(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Returns the factors of the sum of factored matrices.

    Args:
        pairs: U and V of each matrix.
    """
    if len(pairs) == 1:
        return pairs[0]
    return torch.cat([U for U, _ in pairs], 1), torch.cat([V for _, V in pairs])


def _placed(pair: Factors, piece: Piece, join: Join, shapes: ParameterShapes) -> Factors:
    """Returns the factors of a (rows, columns) matrix that has a parameter at its place and is zero elsewhere."""
    U, V = pair
    if piece.rows is not None:
        U = U[piece.rows[0] : piece.rows[1]]
    if piece.view == "transposed":
        U, V = V.T, U.T
    elif piece.view == "column" and V.shape[1] != 1:
        U, V = (U @ V).reshape(-1, 1), V.new_ones((1, 1))
    top, left = piece.at
    placed_U, placed_V = U.new_zeros((join.rows, U.shape[1])), V.new_zeros((len(V), join.columns))
    placed_U[top : top + len(U)] = U
    placed_V[:, left : left + V.shape[1]] = V
    return placed_U, placed_V


def _extracted(pair: Factors, piece: Piece, shapes: ParameterShapes) -> Factors:
    """Returns the factors of a parameter, the inverse of `_placed`; rows outside of the piece are zero."""
    shape = shapes[piece.parameter]
    height, width = piece.matrix_shape(shape)
    top, left = piece.at
    U, V = pair[0][top : top + height], pair[1][:, left : left + width]
    rows = shape[0] if shape else 1
    if piece.view == "transposed":
        U, V = V.T, U.T
    elif piece.view == "column":
        U = (U @ V).reshape(rows if piece.rows is None else piece.rows[1] - piece.rows[0], -1)
        V = torch.eye(U.shape[1], dtype=U.dtype)
    if piece.rows is not None:
        padded = U.new_zeros((rows, U.shape[1]))
        padded[piece.rows[0] : piece.rows[1]] = U
        U = padded
    return U, V


def _projected(matrix: Matrix, basis: Tensor) -> tuple[Matrix, float]:
    """Returns Qᵀ M Q for an orthonormal basis Q (n, k), and the trace of M."""
    dtype = torch.float32 if matrix.side > WIDE_SIDE else torch.float64
    operator = matrix.operator(dtype, torch.device("cpu"))
    small = (basis.T @ operator(basis.to(dtype)).double()).double()
    trace = float(operator.diagonal(matrix.side).double().sum())
    return Dense.of((small + small.T) / 2, psd=matrix.psd), trace
