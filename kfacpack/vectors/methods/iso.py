"""Isotropic merging (Marczak et al., 2025): Iso-C and Iso-CTS.

Iso-C sums the matrices and replaces all singular values of the sum by their mean, which preserves the nuclear norm.

Iso-CTS combines common and task-specific directions. The share `common` of the sum's singular vectors is kept. From
each task's matrix the part in the span U of the common left vectors is removed, Δ_t − U Uᵀ Δ_t, and the largest
singular vectors of the rest are added, equally many for each task, so that there are r in total. All are made
orthogonal to each other, as in TSV-M, and get the mean of their singular values. For a single vector this is Iso-C.

The paper multiplies the result by α, chosen on validation data. Its code averages the parameters that are not
matrices, as does `mean`; otherwise they are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfacpack.vectors.methods.method import MergeMethod, MethodInput, setting, weighted_sum
from kfacpack.vectors.methods.tsv import MEAN_HELP, SingularVectors, decompose, join_orthogonal

if TYPE_CHECKING:
    from torch import Tensor


SCALE = (
    "α is the paper's, which is chosen on validation data; parameters that are not matrices are summed or, with "
    "'mean', averaged as in the authors' code"
)


@dataclass(frozen=True)
class IsoMethod(MergeMethod):
    """Iso-C: the sum with a flat spectrum."""

    name = "iso"
    help = "The sum with all singular values of each matrix replaced by their mean (Iso-C)."
    scale = SCALE

    mean: bool = setting(False, MEAN_HELP)

    def parameter(self, inputs: Sequence[MethodInput], name: str) -> Tensor:
        """Merges one parameter."""
        if inputs[0].tensors[name].ndim != 2:
            return weighted_sum(inputs, name, mean=self.mean)
        total = weighted_sum(inputs, name)
        return _flatten_spectrum(decompose(total), total)


@dataclass(frozen=True)
class IsoCtsMethod(MergeMethod):
    """Iso-CTS: a flat spectrum over common and task-specific directions."""

    name = "iso-cts"
    help = "Like iso, with some of the directions from single tasks (Iso-CTS)."
    scale = SCALE

    common: float = setting(
        0.8, "Share of the directions that come from the sum; the paper's k / r.", interval="[0, 1]"
    )
    mean: bool = setting(False, MEAN_HELP)

    def parameter(self, inputs: Sequence[MethodInput], name: str) -> Tensor:
        """Merges one parameter."""
        shape = inputs[0].tensors[name].shape
        if len(shape) != 2:
            return weighted_sum(inputs, name, mean=self.mean)
        k, s = split_rank(min(shape), len(inputs), self.common)
        total = weighted_sum(inputs, name)
        common = decompose(total).first(k)
        parts = [common, *(_task_specific(vector.read(name), common).first(s) for vector in inputs)]
        return _flatten_spectrum(join_orthogonal(parts), total)


def _flatten_spectrum(vectors: SingularVectors, total: Tensor) -> Tensor:
    """Returns U mean(s) Vh, or `total` if it is zero and so has no singular vectors."""
    U, s, Vh = vectors
    return s.mean() * (U @ Vh) if len(s) else total


def split_rank(r: int, tasks: int, common: float) -> tuple[int, int]:
    """Divides r directions between the sum and the tasks.

    Args:
        r: Number of directions.
        tasks: Number of tasks T.
        common: Desired share of directions from the sum.

    Returns:
        k and s with k + T · s = r: k directions from the sum, with k / r as close to `common` as possible, and s from
        each task.
    """
    s = min(round((r - int(r * common)) / tasks), r // tasks)
    return r - s * tasks, s


def _task_specific(matrix: Tensor, common: SingularVectors) -> SingularVectors:
    """Decomposes the part of a task's matrix outside of the common directions, ignoring rounding errors."""
    import torch

    U = common.U.to(matrix.device)
    return decompose(matrix - U @ (U.T @ matrix), torch.linalg.matrix_norm(matrix, 2))
