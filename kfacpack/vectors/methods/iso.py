"""Merge methods based on singular values: TSV-M, Iso-C and Iso-CTS. Matrices have shape (m, n), and r = min(m, n).

TSV-M (Gargiulo et al., 2025) merges task singular vectors after making them orthogonal to each other. For each of the
T tasks, the largest ⌊r / T⌋ singular values of the matrix (at least one) and their singular vectors are kept. The left
singular vectors of all tasks are concatenated and replaced by the nearest matrix U with orthonormal columns. The right
singular vectors are likewise replaced by V. The result is U diag(s) Vᵀ, where s contains all singular values that are
kept. Nothing is averaged: matrices of rank at most ⌊r / T⌋ whose singular vectors are orthogonal to each other are
added unchanged, and a single vector is not changed.

The paper multiplies the result by α and finds that α = 1 works well without validation data. As in the authors' code,
only parameters with two dimensions are treated as matrices. All other parameters (biases, norms, class tokens,
convolution kernels) are summed here. The authors' code averages them, as does the setting `mean`.

Isotropic merging (Marczak et al., 2025) makes singular values equal. Iso-C sums the matrices and replaces all singular
values of the sum by their mean, which preserves the nuclear norm.

Iso-CTS combines common and task-specific directions. The share `common` of the sum's singular vectors is kept. The
component of each task's matrix Δ_t in the span of the common left singular vectors U is removed, which leaves
Δ_t − U Uᵀ Δ_t. The leading singular vectors of these remainders are added, the same number for each task, so that there
are r directions in total. All directions are made orthogonal to each other, as in TSV-M, and each of their singular
values is replaced by the mean of these values. For a single vector, Iso-CTS equals Iso-C.

The paper multiplies the result by α, which is chosen on validation data. Parameters that are not matrices are summed
here. The authors' code averages them, as does the setting `mean`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kfacpack.vectors.methods.method import MergeMethod, MethodInput, setting, weighted_sum

if TYPE_CHECKING:
    from torch import Tensor


MEAN_HELP = "Average parameters that are not matrices, as in the authors' code, instead of summing them."
ROUNDING = 2.0**-23
"""Singular values below this fraction of the largest singular value are zero up to rounding errors in float32.

The corresponding singular vectors are arbitrary, so using them would add noise.
"""


class SingularVectors(NamedTuple):
    """The k largest singular values s (k,) of a matrix and their singular vectors, U (m, k) and Vh (k, n)."""

    U: Tensor
    s: Tensor
    Vh: Tensor

    def first(self, k: int) -> SingularVectors:
        """Returns a copy of the k largest singular values and their vectors, so that all others can be freed."""
        return SingularVectors(self.U[:, :k].clone(), self.s[:k].clone(), self.Vh[:k].clone())


def decompose(matrix: Tensor, largest: Tensor | None = None) -> SingularVectors:
    """Computes the singular value decomposition, truncated to the numerical rank.

    Args:
        matrix: A matrix of shape (m, n).
        largest: Reference value; singular values that are negligible relative to it count as zero. Defaults to the
            largest singular value.

    Returns:
        The singular values that do not count as zero, and their vectors.
    """
    import torch

    U, s, Vh = torch.linalg.svd(matrix, full_matrices=False)
    rank = int((s > ROUNDING * (s[:1] if largest is None else largest)).sum())
    return SingularVectors(U, s, Vh).first(rank)


def orthogonalize(columns: Tensor) -> Tensor:
    """Returns the nearest matrix with orthonormal columns: P Qᵀ for the singular value decomposition P D Qᵀ.

    If the columns are linearly dependent, the nearest matrix is not unique. In this case, only singular vectors with
    nonzero singular values are used, so columns of the result that correspond to equal columns are also equal.

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
    """TSV-M: merges the leading singular vectors of each task's matrices after making them orthogonal to each other."""

    name = "tsv"
    help = "Keeps the leading singular vectors of each task's matrices and makes them orthogonal to each other (TSV-M)."
    scale = (
        "α is the scaling coefficient of the merged vector, for which the paper recommends 1; parameters that are not "
        "matrices are summed. With 'mean', they are averaged, as in the authors' code"
    )

    mean: bool = setting(False, MEAN_HELP)

    def parameter(self, inputs: Sequence[MethodInput], name: str) -> Tensor:
        """Returns the merged change to one parameter."""
        shape = inputs[0].tensors[name].shape
        if len(shape) != 2:
            return weighted_sum(inputs, name, mean=self.mean)
        share = max(1, min(shape) // len(inputs))
        U, s, Vh = join_orthogonal([decompose(vector.read(name)).first(share) for vector in inputs])
        return (U * s) @ Vh


SCALE = (
    "α is the scaling coefficient of the merged vector, which the paper chooses on validation data; parameters that "
    "are not matrices are summed. With 'mean', they are averaged, as in the authors' code"
)


@dataclass(frozen=True)
class IsoMethod(MergeMethod):
    """Iso-C: the sum of the vectors, with equal singular values in each matrix."""

    name = "iso"
    help = "Sums the vectors and replaces all singular values of each matrix by their mean (Iso-C)."
    scale = SCALE

    mean: bool = setting(False, MEAN_HELP)

    def parameter(self, inputs: Sequence[MethodInput], name: str) -> Tensor:
        """Returns the merged change to one parameter."""
        if inputs[0].tensors[name].ndim != 2:
            return weighted_sum(inputs, name, mean=self.mean)
        total = weighted_sum(inputs, name)
        return _flatten_spectrum(decompose(total), total)


@dataclass(frozen=True)
class IsoCtsMethod(MergeMethod):
    """Iso-CTS: equal singular values for directions of the sum and directions of individual tasks."""

    name = "iso-cts"
    help = "Like iso, but takes some of the directions from individual tasks (Iso-CTS)."
    scale = SCALE

    common: float = setting(
        0.8, "Share of the directions that come from the sum of the vectors; k / r in the paper.", interval="[0, 1]"
    )
    mean: bool = setting(False, MEAN_HELP)

    def parameter(self, inputs: Sequence[MethodInput], name: str) -> Tensor:
        """Returns the merged change to one parameter."""
        shape = inputs[0].tensors[name].shape
        if len(shape) != 2:
            return weighted_sum(inputs, name, mean=self.mean)
        k, s = split_rank(min(shape), len(inputs), self.common)
        total = weighted_sum(inputs, name)
        common = decompose(total).first(k)
        parts = [common, *(_task_specific(vector.read(name), common).first(s) for vector in inputs)]
        return _flatten_spectrum(join_orthogonal(parts), total)


def _flatten_spectrum(vectors: SingularVectors, total: Tensor) -> Tensor:
    """Returns mean(s) U Vh. If all singular values are zero, returns `total`, which is then zero."""
    U, s, Vh = vectors
    return s.mean() * (U @ Vh) if len(s) else total


def split_rank(r: int, tasks: int, common: float) -> tuple[int, int]:
    """Divides r directions between the sum and the tasks.

    Args:
        r: Number of directions.
        tasks: Number of tasks T.
        common: Desired share of directions from the sum.

    Returns:
        k and s with k + T · s = r: k directions from the sum, with k / r as close to `common` as possible, and s
        directions from each task.
    """
    s = min(round((r - int(r * common)) / tasks), r // tasks)
    return r - s * tasks, s


def _task_specific(matrix: Tensor, common: SingularVectors) -> SingularVectors:
    """Decomposes the part of a task's matrix outside the span of the common directions.

    Singular values that are negligible relative to the largest singular value of the whole matrix are dropped.
    """
    import torch

    U = common.U.to(matrix.device)
    return decompose(matrix - U @ (U.T @ matrix), torch.linalg.matrix_norm(matrix, 2))
