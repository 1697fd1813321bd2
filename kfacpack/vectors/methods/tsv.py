"""TSV-M (Gargiulo et al., 2025): merges task singular vectors after making them orthogonal to each other.

A matrix has shape (m, n), and r = min(m, n). Of each task's matrix, the largest ⌊r / T⌋ singular values (at least
one) and their vectors are kept. The left vectors of all tasks, side by side, are replaced by the nearest matrix with
orthonormal columns, and so are the right vectors; the result is U diag(s) Vᵀ. Nothing is averaged: tasks whose
singular vectors are orthogonal to each other are added unchanged, and a single vector is not changed.

The paper multiplies the result by α and finds that 1 works without validation data. As in the authors' code,
parameters with two dimensions are matrices. All others (biases, norms, tokens, convolution kernels) are averaged
there, as they are with `mean`; otherwise they are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kfacpack.vectors.methods.method import MergeMethod, MethodInput, setting, weighted_sum

if TYPE_CHECKING:
    from torch import Tensor


MEAN_HELP = "Average the parameters that are not matrices instead of summing them, as in the authors' code."
ROUNDING = 2.0**-23
"""Singular values below this share of the largest are rounding errors of zero in float32.

Their vectors are arbitrary; a method that gave them weight would add noise.
"""


class SingularVectors(NamedTuple):
    """The k largest singular values and their vectors, U diag(s) Vh: (m, k), (k,), (k, n)."""

    U: Tensor
    s: Tensor
    Vh: Tensor

    def first(self, k: int) -> SingularVectors:
        """Returns a copy of the k largest, so that the memory of the others can be freed."""
        return SingularVectors(self.U[:, :k].clone(), self.s[:k].clone(), self.Vh[:k].clone())


def decompose(matrix: Tensor, largest: Tensor | None = None) -> SingularVectors:
    """Computes the singular value decomposition, truncated to the numerical rank.

    Args:
        matrix: A matrix of shape (m, n).
        largest: The value that singular values are compared with to decide whether they are zero; by default the
            largest of them.

    Returns:
        The singular values and vectors.
    """
    import torch

    U, s, Vh = torch.linalg.svd(matrix, full_matrices=False)
    rank = int((s > ROUNDING * (s[:1] if largest is None else largest)).sum())
    return SingularVectors(U, s, Vh).first(rank)


def orthogonalize(columns: Tensor) -> Tensor:
    """Returns the nearest matrix with orthonormal columns (Procrustes): P Qᵀ of the decomposition P D Qᵀ.

    For linearly dependent columns the nearest matrix is not unique; the part that all of them have in common is
    returned, in which such columns share a direction.

    Args:
        columns: A matrix of shape (m, k).
    """
    P, _, Qh = decompose(columns)
    return P @ Qh


def join_orthogonal(parts: list[SingularVectors]) -> SingularVectors:
    """Concatenates singular vectors and makes them orthogonal to each other."""
    import torch

    U = orthogonalize(torch.cat([part.U for part in parts], 1))
    V = orthogonalize(torch.cat([part.Vh for part in parts]).T)
    return SingularVectors(U, torch.cat([part.s for part in parts]), V.T)


@dataclass(frozen=True)
class TsvMethod(MergeMethod):
    """TSV-M: task singular vectors, made orthogonal to each other."""

    name = "tsv"
    help = "Keeps the largest singular vectors of each task's matrices and makes them orthogonal (TSV-M)."
    scale = (
        "α is that of the paper, which recommends 1; parameters that are not matrices are summed or, with 'mean', "
        "averaged as in the authors' code"
    )

    mean: bool = setting(False, MEAN_HELP)

    def parameter(self, inputs: Sequence[MethodInput], name: str) -> Tensor:
        """Merges one parameter."""
        shape = inputs[0].tensors[name].shape
        if len(shape) != 2:
            return weighted_sum(inputs, name, mean=self.mean)
        share = max(1, min(shape) // len(inputs))
        U, s, Vh = join_orthogonal([decompose(vector.read(name)).first(share) for vector in inputs])
        return (U * s) @ Vh
