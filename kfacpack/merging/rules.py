"""The paper's rule: (Σ B_t) ⊗ (Σ λ_t A_t). One term, whatever the number of tasks.

Every term kept, with its weight: exact, and as large as all inputs together.

The nearest Kronecker sum of r terms, in the Frobenius norm.

Σ w_t B_t ⊗ A_t, rearranged, is the matrix Σ w_t vec(B_t) vec(A_t)ᵀ of rank T; its best approximation of rank r is its
truncated singular value decomposition. In coordinates (gram.py) that matrix is N = Xᵀ diag(w) Y, of T × T numbers. With
singular vectors p and q of N, N q = Σ w_t <A_t, q> B_t and Nᵀ p = Σ w_t <B_t, p> A_t give the factors' coefficients.

Estimates of one task from different examples: what one run over all of them would have given.

A is a mean over positions (over examples where positions are reduced first), B and dense blocks over examples, and the
mean of all is the mean of the means by these counts.

The rules, one file each.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfacpack.errors import KfacpackError
from kfacpack.merging.rule import PARTIAL, Combination, MergeRule, Terms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfacpack.curvature.matrices.matrix import Matrix
    from kfacpack.format.manifest import Parent, Source
    from kfacpack.merging.inputs import MergeInput


class TakRule(MergeRule):
    name = "tak"
    keeps_sums = True

    def check(self, inputs: Sequence[MergeInput]) -> None:
        """A term must stand for tasks of which it is the sum."""
        super().check(inputs)
        remedy = "Merge the bundles behind it at once, or by 'optimal' or 'stack'"
        for each in inputs:
            merge = each.curvature.about.merge
            if merge and merge.rule == "optimal" and merge.rank != 1:
                problem = f"was merged by 'optimal' at rank {merge.rank}, whose terms stand for no tasks"
                raise KfacpackError(f"{each.name}: {problem}. {remedy}")
            if any(loss.step == PARTIAL for loss in each.curvature.about.losses):
                problem = "has blocks of some of its tasks only, and does not say of how many"
                raise KfacpackError(f"{each.name}: {problem}. {remedy}")

    def kronecker(self, terms: Terms) -> Combination:
        # A term whose B is a sum over m tasks stands for m equal ones, B / m ⊗ A. So merging what is merged already is
        # the same as merging everything at once.
        B = torch.ones_like(terms.weights)
        A = terms.tasks * terms.weights / terms.tasks.sum()
        return Combination(torch.ones(1, dtype=torch.float64), (B[None], A[None]))


class StackRule(MergeRule):
    name = "stack"
    exact = True
    keeps_sums = True

    def kronecker(self, terms: Terms) -> Combination:
        each = torch.eye(len(terms.weights), dtype=torch.float64)
        return Combination(terms.weights, (each, each))


_EQUAL = 1e-9
"""Singular values that differ by less, relatively, are one, and any rotation of their vectors is as good."""


class OptimalRule(MergeRule):
    name = "optimal"
    ranked = True

    def __init__(self, rank: int = 1):
        super().__init__(rank)
        if rank < 1:
            raise KfacpackError(f"the rank is at least 1, not {rank}")

    def kronecker(self, terms: Terms) -> Combination:
        w = terms.weights
        if self.rank >= len(w):
            each = torch.eye(len(w), dtype=torch.float64)
            return Combination(w, (each, each))
        X, Y = terms.coordinates
        N = X.T @ (w[:, None] * Y)
        # λ A summed, as in the paper's rule: a direction in which no task pulls against another.
        mean = Y.T @ (terms.tasks * w / terms.tasks.sum())
        p, s, q = _decomposed(N, mean)
        kept = [k for k in range(self.rank) if k == 0 or s[k] > s[0] * torch.finfo(s.dtype).eps]
        # A is made as large as the paper's, and B takes the rest.
        size = float(mean.norm()) or 1.0
        B = w * (Y @ q[:, kept]).T / size
        A = w * (X @ p[:, kept]).T * torch.where(s[kept] > 0, size / s[kept], 0.0)[:, None]
        if all(matrix.psd for side in terms.sides for matrix in side) and bool((w >= 0).all()):
            # By Perron and Frobenius the first pair is not negative, but for rounding.
            B[0].clamp_(min=0)
            A[0].clamp_(min=0)
        return Combination(torch.ones(len(kept), dtype=torch.float64), (B, A))


def _decomposed(N: Tensor, mean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """N = p diag(s) qᵀ; of equally good q, the first is the one nearest to `mean`, and points its way."""
    p, s, qh = torch.linalg.svd(N)
    q = qh.T.clone()
    alike = int((s >= s[0] * (1 - _EQUAL)).sum())
    toward = q[:, :alike].T @ mean
    if float(s[0]) > 0 and float(toward.norm()) > 0:
        q[:, :alike] = q[:, :alike] @ _reflection(toward / toward.norm())
        p[:, :alike] = N @ q[:, :alike] / s[:alike]
    return p, s, q


def _reflection(first: Tensor) -> Tensor:
    """An orthogonal matrix with this unit vector as its first column."""
    identity = torch.eye(len(first), dtype=first.dtype)
    normal = first - identity[0]
    length = float(normal.dot(normal))
    return identity - 2 * torch.outer(normal, normal) / length if length > 0 else identity


class ShardsRule(MergeRule):
    name = "shards"
    exact = True
    keeps_sums = True

    def check(self, inputs: Sequence[MergeInput]) -> None:
        _require_one_task(inputs)

    def kronecker(self, terms: Terms) -> Combination:
        B, A = terms.sides
        over_positions = terms.sharing == "expand"
        sides = (_shares(B, over_positions=False), _shares(A, over_positions=over_positions))
        return Combination(torch.ones(1, dtype=torch.float64), sides)

    def whole(self, terms: Terms) -> Combination:
        (G,) = terms.sides
        return Combination(torch.ones(1, dtype=torch.float64), (_shares(G, over_positions=False),))

    def weights(self, inputs: Sequence[MergeInput], given: Sequence[float] | None) -> list[float]:
        if given is not None:
            raise KfacpackError("shards are weighted by their examples; 'tak', 'stack' and 'optimal' take weights")
        counts = [_examples(each) for each in inputs]
        return [count / sum(counts) for count in counts]

    def parents(self, inputs: Sequence[MergeInput], factors: Sequence[float]) -> tuple[Parent, ...]:
        """Each with its share of the one data set, so that the parents' sizes add up to that."""
        parents = super().parents(inputs, factors)
        size = inputs[0].source.dataset_size if inputs[0].source else None
        if size is None:
            return parents
        edges = [round(size * share) for share in accumulate((parent.weight for parent in parents), initial=0.0)]
        sizes = (stop - start for start, stop in pairwise(edges))
        return tuple(
            parent.model_copy(update={"dataset_size": each}) for parent, each in zip(parents, sizes, strict=True)
        )

    def source(self, inputs: Sequence[MergeInput]) -> Source | None:
        source = inputs[0].source
        return source and source.model_copy(update={"examples": sum(map(_examples, inputs))})


def _shares(matrices: Sequence[Matrix], *, over_positions: bool) -> Tensor:
    """(1, K): what part of the whole mean each matrix is."""
    counts = [matrix.positions if over_positions else matrix.examples for matrix in matrices]
    known = torch.tensor([[count or 0 for count in counts]], dtype=torch.float64)
    if None in counts or not known.any():
        of = "positions" if over_positions else "examples"
        raise KfacpackError(f"shards are added up by their {of}, and a matrix does not say how many it is a mean of")
    return known / known.sum()


def _examples(each: MergeInput) -> int:
    """How many examples a shard was estimated from, as all of its matrices say."""
    counts = {matrix.examples for block in each.curvature.blocks for _, matrix in block.structure.matrices()}
    (only, *others) = counts
    if others or not only:
        raise KfacpackError(f"{each.name}: does not say from how many examples it was estimated, so it is no shard")
    return only


def _require_one_task(inputs: Sequence[MergeInput]) -> None:
    """Refuse what cannot be parts of one estimate. That their examples differ is for the user to know."""
    first, *others = inputs
    for each in inputs:
        merge = each.curvature.about.merge
        if merge is not None and merge.rule != ShardsRule.name:
            raise KfacpackError(f"{each.name}: was merged by {merge.rule!r}, expected a shard of one task")
        if any(len(weights) != 1 or weights[0] != 1 for weights in (b.structure.weights for b in each.blocks.values())):
            raise KfacpackError(f"{each.name}: has blocks of several terms, expected a shard of one task")
    for other in others:
        ours, theirs = (each.source and each.source.model_copy(update={"examples": None}) for each in (first, other))
        if ours != theirs:
            names = [each.source.task if each.source else "no task" for each in (first, other)]
            what = f"of different tasks, {names[0]!r} and {names[1]!r}" if len(set(names)) > 1 else "of different data"
            raise KfacpackError(f"{first.name} and {other.name} are {what}, expected shards of one task")
        if first.estimate_without_seed != other.estimate_without_seed:
            problem = "were estimated in different ways, expected shards of one task"
            raise KfacpackError(f"{first.name} and {other.name} {problem}")
    size = first.source.dataset_size if first.source else None
    total = sum(map(_examples, inputs))
    if size is not None and total > size:
        raise KfacpackError(f"the shards have {total} examples and their data set {size}: some count twice")


RULES: dict[str, type[MergeRule]] = {
    each.name: each
    for each in (
        TakRule,
        StackRule,
        OptimalRule,
        ShardsRule,
    )
}
