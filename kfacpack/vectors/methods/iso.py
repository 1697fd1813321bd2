"""Iso-C (Marczak et al., 2025): the sum with a flat spectrum.

The matrices are added up, and all singular values of the sum replaced by their mean, so that its nuclear norm stays.
The paper multiplies the result by α, chosen on validation data. Its code averages the parameters that are no matrices;
`mean` does so, too, and else they are added up.

Iso-CTS (Marczak et al., 2025): a flat spectrum over common and task-specific directions.

Of the sum's singular vectors, the share `common` stays. Each task's matrix loses what the common left vectors see of
it, Δ_t − U Uᵀ Δ_t, and of what is left gives its largest singular vectors, equally many of each task, so that there are
r in all. All are made orthogonal to each other, as in TSV-M, and get the mean of their singular values. Of one vector
alone it is Iso-C. α and `mean` are as for Iso-C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kfacpack.vectors.methods.method import MergeMethod, MethodInput, weighted_sum
from kfacpack.vectors.methods.tsv import SingularVectors, decomposed, joined

if TYPE_CHECKING:
    from torch import Tensor


SCALE = (
    "α is the paper's, which chooses it on validation data; parameters that are no matrices are added up, in its code "
    "averaged: with 'mean', here too"
)


@dataclass(frozen=True)
class IsoMethod(MergeMethod):
    name = "iso"
    scale = SCALE

    mean: bool = False

    def __post_init__(self) -> None:
        self.require_switch("mean")

    def parameter(self, inputs: Sequence[MethodInput], name: str) -> Tensor:
        if inputs[0].tensors[name].ndim != 2:
            return weighted_sum(inputs, name, mean=self.mean)
        total = weighted_sum(inputs, name)
        U, s, Vh = decomposed(total)
        return s.mean() * (U @ Vh) if len(s) else total


@dataclass(frozen=True)
class IsoCtsMethod(MergeMethod):
    name = "iso-cts"
    scale = SCALE

    common: float = 0.8
    """The share of directions that the sum gives; the paper's k / r."""
    mean: bool = False

    def __post_init__(self) -> None:
        self.require_share("common", zero=True, one=True)
        self.require_switch("mean")

    def parameter(self, inputs: Sequence[MethodInput], name: str) -> Tensor:
        shape = inputs[0].tensors[name].shape
        if len(shape) != 2:
            return weighted_sum(inputs, name, mean=self.mean)
        k, each_gives = split_rank(min(shape), len(inputs), self.common)
        total = weighted_sum(inputs, name)
        common = decomposed(total).first(k)
        parts = [common, *(_task_specific(each.read(name), common).first(each_gives) for each in inputs)]
        U, s, Vh = joined(parts)
        return s.mean() * (U @ Vh) if len(s) else total


def split_rank(r: int, tasks: int, common: float) -> tuple[int, int]:
    """How many directions the sum gives and how many each task: k + T · s = r, with k as near to `common` · r."""
    s = min(round((r - int(r * common)) / tasks), r // tasks)
    return r - s * tasks, s


def _task_specific(matrix: Tensor, common: SingularVectors) -> SingularVectors:
    """What a task has beside the common directions. What is left by rounding alone counts as nothing."""
    U = common.U.to(matrix.device)
    return decomposed(matrix - U @ (U.T @ matrix), torch.linalg.matrix_norm(matrix, 2))
