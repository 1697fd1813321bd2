"""The merge rules `tak`, `stack`, `optimal` and `shards`, and the base class of rules.

- `tak` is the paper's rule, (Σ B_t) ⊗ (Σ λ_t A_t): one term for any number of tasks. The shares λ_t and the weights
  w_t = T λ_t of the T tasks are defined in `inputs.py`. The paper is *Dataless Weight Disentanglement in Task
  Arithmetic via Kronecker-Factored Approximate Curvature* (TAK, ICLR 2026).
- `stack` keeps every term with its weight. The result is exact, and as large as all inputs together.
- `optimal` is the nearest sum of r Kronecker products in the Frobenius norm. Rearranged, Σ w_t B_t ⊗ A_t is the matrix
  Σ w_t vec(B_t) vec(A_t)ᵀ of rank at most T, whose best approximation of rank r is its truncated singular value
  decomposition. In coordinates (see `strips.py`), this matrix is N = Xᵀ diag(w) Y, of shape (T, T). If p and q are
  singular vectors of N, the new factors are proportional to Σ w_t <A_t, q> B_t and Σ w_t <B_t, p> A_t.
- `shards` combines estimates of one task from different examples into the estimate from all these examples. A is a mean
  over positions (or over examples if positions are reduced first). B, or the single matrix G of a block without
  factors, is a mean over examples. The overall mean is therefore the mean of the shards' means, weighted by their
  numbers of positions or examples.

Shapes: a block has K terms, which are the terms of all inputs in order. The `sides` of a Kronecker term are B and A. A
block whose G is a single matrix has only one side. A combination into r terms has coefficients of shape (r, K) for each
side.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kfacpack.errors import KfacpackError
from kfacpack.merging.inputs import check_tasks, relative_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfacpack.curvature.matrices.matrix import Matrix
    from kfacpack.format.manifest import Estimate, Loss, Parent, Sharing, Source
    from kfacpack.merging.inputs import MergeInput


PARTIAL = "partial"
"""Name of the step that records, in a block's losses, that some inputs did not have the block."""


@dataclass(frozen=True)
class Terms:
    """The terms of one block from all inputs. A merge approximates Σ weight · (Kronecker product of the sides)."""

    weights: Tensor
    """Weight of each term, of shape (K,)."""
    tasks: Tensor
    """Number of tasks in each term, of shape (K,); for example, 3 if B is a sum over three tasks."""
    sides: tuple[tuple[Matrix, ...], ...]
    """The matrices on each side, one per term."""
    sharing: Sharing
    """How the curvature treats positions, such as tokens, that share a weight."""
    coordinates: tuple[Tensor, ...] = ()
    """Coordinates of each side's matrices, of shape (K, K); see `strips.py`. An empty tuple if no error is measured."""


@dataclass(frozen=True)
class Combination:
    """The terms of a merged block: Σ weight · (Σ coefficient · B) ⊗ (Σ coefficient · A)."""

    weights: Tensor
    """Weight of each term, of shape (r,)."""
    sides: tuple[Tensor, ...]
    """Coefficients of the matrices on each side, of shape (r, K)."""


class MergeRule(ABC):
    """Base class of merge rules, which combine the terms of all inputs into the terms of the merged block.

    Args:
        rank: Number of terms to keep, for rules that take a rank.

    Raises:
        KfacpackError: If the rank is not an integer, or if it is not 1 for a rule that takes no rank.
    """

    name: ClassVar[str]
    """Name of the rule."""
    exact: ClassVar[bool] = False
    """Whether the result equals the target, so that no error has to be measured."""
    keeps_sums: ClassVar[bool] = False
    """Whether the sums of the parents' factors can be computed from the merged factors, as subtraction requires."""
    ranked: ClassVar[bool] = False
    """Whether the rule takes a rank."""

    def __init__(self, rank: int = 1):
        self.rank = rank
        if type(rank) is not int:
            raise KfacpackError(f"expected an integer as the rank, got {rank!r}")
        if rank != 1 and not self.ranked:
            raise KfacpackError(f"the rule {self.name!r} takes no rank, got {rank}; use 'optimal' to choose a rank")

    @property
    def step(self) -> str:
        """Name under which the losses of a block record the error of this rule."""
        return f"{self.name}:{self.rank}" if self.ranked else self.name

    def error_in(self, losses: Sequence[Loss]) -> float | None:
        """Returns the relative error of a merge of single-task bundles, as recorded in its losses.

        Args:
            losses: The losses of the merged curvature or of one of its blocks.

        Returns:
            The relative error; 0 if no loss for this rule is recorded, and None if the loss was not measured.
        """
        own = [loss.frobenius for loss in losses if loss.step == self.step]
        return own[-1] if own else 0.0

    def check(self, inputs: Sequence[MergeInput]) -> None:
        """Checks that the rule can merge the inputs, which `check_compatible` has already accepted.

        Raises:
            KfacpackError: If the rule cannot merge the inputs.
        """
        check_tasks(inputs)

    @abstractmethod
    def kronecker(self, terms: Terms) -> Combination:
        """Combines the Kronecker terms of a block."""

    def whole(self, terms: Terms) -> Combination:
        """Sums the weighted matrices of all inputs for a block whose G is a single matrix."""
        return Combination(torch.ones(1, dtype=torch.float64), (terms.weights[None],))

    def weights(self, inputs: Sequence[MergeInput], weights: Sequence[float] | None) -> list[float]:
        """Returns the factor by which each input is multiplied in the sum that the rule approximates.

        Args:
            inputs: The inputs.
            weights: The weights that the user passed, or None.
        """
        return relative_weights(inputs, weights)

    def parents(self, inputs: Sequence[MergeInput], factors: Sequence[float]) -> tuple[Parent, ...]:
        """Returns the parents of all inputs, with their weights multiplied by the inputs' factors."""
        return tuple(
            parent.model_copy(update={"weight": factor * parent.weight})
            for item, factor in zip(inputs, factors, strict=True)
            for parent in item.parents
        )

    def source(self, inputs: Sequence[MergeInput]) -> Source | None:
        """Returns the source of the merged curvature. The default is None, as the inputs have different sources."""
        return None

    def estimate(self, inputs: Sequence[MergeInput]) -> Estimate | None:
        """Returns the estimate settings if they are the same for all inputs, else None.

        If only the seeds differ, the settings are returned without a seed.
        """
        settings = {item.estimate_without_seed for item in inputs}
        seeds = {item.estimate.seed for item in inputs if item.estimate}
        (only, *others) = settings
        if others or only is None:
            return None
        return only.model_copy(update={"seed": seeds.pop()}) if len(seeds) == 1 else only


class TakRule(MergeRule):
    """The rule of the TAK paper: one term, (Σ B_t) ⊗ (Σ λ_t A_t), where λ_t is the share of task t; see `inputs.py`."""

    name = "tak"
    keeps_sums = True

    def check(self, inputs: Sequence[MergeInput]) -> None:
        """Checks that every term of every input is a sum over whole tasks.

        Raises:
            KfacpackError: If an input was merged by `optimal` at a rank above 1, or has blocks that do not cover all of
                its tasks.
        """
        super().check(inputs)
        remedy = "Merge all of its parents at once, or use 'optimal' or 'stack'"
        for item in inputs:
            merge = item.curvature.about.merge
            if merge and merge.rule == "optimal" and merge.rank != 1:
                problem = f"was merged by 'optimal' at rank {merge.rank}, so its terms do not correspond to tasks"
                raise KfacpackError(f"{item.name}: {problem}. {remedy}")
            if any(loss.step == PARTIAL for loss in item.curvature.about.losses):
                problem = "has blocks that cover only some of its tasks, but does not record how many tasks they cover"
                raise KfacpackError(f"{item.name}: {problem}. {remedy}")

    def kronecker(self, terms: Terms) -> Combination:
        """Sums the factors B and averages the factors A of all terms."""
        # A term whose B is a sum over m tasks is equivalent to m equal terms, B / m ⊗ A, so merging merged curvatures
        # gives the same result as merging everything at once.
        B = torch.ones_like(terms.weights)
        A = terms.tasks * terms.weights / terms.tasks.sum()
        return Combination(torch.ones(1, dtype=torch.float64), (B[None], A[None]))


class StackRule(MergeRule):
    """The rule that keeps every term with its weight."""

    name = "stack"
    exact = True
    keeps_sums = True

    def kronecker(self, terms: Terms) -> Combination:
        """Returns all terms unchanged."""
        identity = torch.eye(len(terms.weights), dtype=torch.float64)
        return Combination(terms.weights, (identity, identity))


_EQUAL = 1e-9
"""Singular values are treated as equal if their relative difference is below this value.

Any rotation of their singular vectors is then valid.
"""


class OptimalRule(MergeRule):
    """The rule that finds the nearest sum of `rank` Kronecker products in the Frobenius norm.

    Args:
        rank: Number of terms to keep, at least 1.
    """

    name = "optimal"
    ranked = True

    def __init__(self, rank: int = 1):
        super().__init__(rank)
        if rank < 1:
            raise KfacpackError(f"expected a rank of at least 1, got {rank}")

    def kronecker(self, terms: Terms) -> Combination:
        """Truncates the singular value decomposition of the rearranged sum; see the module docstring."""
        w = terms.weights
        if self.rank >= len(w):
            identity = torch.eye(len(w), dtype=torch.float64)
            return Combination(w, (identity, identity))
        X, Y = terms.coordinates
        N = X.T @ (w[:, None] * Y)
        # Σ λ A, as in the paper's rule: a direction with which no task has a negative inner product.
        mean = Y.T @ (terms.tasks * w / terms.tasks.sum())
        p, s, q = _decompose(N, mean)
        kept = [k for k in range(self.rank) if k == 0 or s[k] > s[0] * torch.finfo(s.dtype).eps]
        # A has the same norm as in the paper's rule; the remaining scale is in B.
        size = float(mean.norm()) or 1.0
        B = w * (Y @ q[:, kept]).T / size
        A = w * (X @ p[:, kept]).T * torch.where(s[kept] > 0, size / s[kept], 0.0)[:, None]
        if all(matrix.psd for side in terms.sides for matrix in side) and bool((w >= 0).all()):
            # By the Perron-Frobenius theorem, the first pair is non-negative up to rounding.
            B[0].clamp_(min=0)
            A[0].clamp_(min=0)
        return Combination(torch.ones(len(kept), dtype=torch.float64), (B, A))


def _decompose(N: Tensor, mean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the singular value decomposition N = p diag(s) qᵀ.

    If several singular values equal s[0], q[:, 0] is the direction nearest to `mean` in the span of their vectors.
    """
    p, s, qh = torch.linalg.svd(N)
    q = qh.T.clone()
    equal = int((s >= s[0] * (1 - _EQUAL)).sum())
    direction = q[:, :equal].T @ mean
    if float(s[0]) > 0 and float(direction.norm()) > 0:
        q[:, :equal] = q[:, :equal] @ _reflection(direction / direction.norm())
        p[:, :equal] = N @ q[:, :equal] / s[:equal]
    return p, s, q


def _reflection(first: Tensor) -> Tensor:
    """Returns an orthogonal matrix whose first column is the unit vector `first` (a Householder reflection)."""
    identity = torch.eye(len(first), dtype=first.dtype)
    normal = first - identity[0]
    length = float(normal.dot(normal))
    return identity - 2 * torch.outer(normal, normal) / length if length > 0 else identity


class ShardsRule(MergeRule):
    """The rule that combines estimates of one task from different examples into the estimate from all examples."""

    name = "shards"
    exact = True
    keeps_sums = True

    def check(self, inputs: Sequence[MergeInput]) -> None:
        """Checks that the inputs can be parts of one estimate. It cannot check whether two inputs share examples.

        Raises:
            KfacpackError: If the tasks, data or estimate settings differ, or if the inputs have more examples than the
                dataset.
        """
        first, *others = inputs
        for item in inputs:
            _check_unmerged(item)
        for other in others:
            _check_same_task(first, other)
        size = first.source.dataset_size if first.source else None
        total = sum(map(_examples, inputs))
        if size is not None and total > size:
            problem = f"the shards have {total} examples in total, but the dataset has only {size}"
            raise KfacpackError(f"{problem}; some examples are counted twice")

    def kronecker(self, terms: Terms) -> Combination:
        """Averages B, weighted by numbers of examples, and A, weighted by numbers of positions or examples."""
        B, A = terms.sides
        over_positions = terms.sharing == "expand"
        sides = (_shares(B, over_positions=False), _shares(A, over_positions=over_positions))
        return Combination(torch.ones(1, dtype=torch.float64), sides)

    def whole(self, terms: Terms) -> Combination:
        """Averages the matrices G of the shards, weighted by their numbers of examples."""
        (G,) = terms.sides
        return Combination(torch.ones(1, dtype=torch.float64), (_shares(G, over_positions=False),))

    def weights(self, inputs: Sequence[MergeInput], weights: Sequence[float] | None) -> list[float]:
        """Returns each shard's share of the examples.

        Raises:
            KfacpackError: If weights are passed, or if a shard does not record its number of examples.
        """
        if weights is not None:
            problem = "the rule 'shards' takes no weights, because shards are weighted by their numbers of examples"
            raise KfacpackError(f"{problem}; omit the weights, or use 'tak', 'stack' or 'optimal'")
        counts = [_examples(item) for item in inputs]
        return [count / sum(counts) for count in counts]

    def parents(self, inputs: Sequence[MergeInput], factors: Sequence[float]) -> tuple[Parent, ...]:
        """Returns the parents. The dataset size is divided among them in proportion to their weights."""
        parents = super().parents(inputs, factors)
        size = inputs[0].source.dataset_size if inputs[0].source else None
        if size is None:
            return parents
        edges = [round(size * share) for share in accumulate((parent.weight for parent in parents), initial=0.0)]
        sizes = (stop - start for start, stop in pairwise(edges))
        return tuple(
            parent.model_copy(update={"dataset_size": part}) for parent, part in zip(parents, sizes, strict=True)
        )

    def source(self, inputs: Sequence[MergeInput]) -> Source | None:
        """Returns the source that all shards share, with the total number of examples of all shards."""
        source = inputs[0].source
        return source and source.model_copy(update={"examples": sum(map(_examples, inputs))})


def _shares(matrices: Sequence[Matrix], *, over_positions: bool) -> Tensor:
    """Returns the share of all positions, or of all examples, that each matrix covers, of shape (1, K)."""
    counts = [matrix.positions if over_positions else matrix.examples for matrix in matrices]
    numbers = torch.tensor([[count or 0 for count in counts]], dtype=torch.float64)
    if None in counts or not numbers.any():
        unit = "positions" if over_positions else "examples"
        problem = f"a matrix does not record its number of {unit}"
        raise KfacpackError(f"{problem}, which the rule 'shards' requires. Estimate the shards again")
    return numbers / numbers.sum()


def _examples(item: MergeInput) -> int:
    """Returns the number of examples in a shard, which must be the same for all of its matrices."""
    counts = {matrix.examples for block in item.curvature.blocks for _, matrix in block.structure.matrices()}
    (only, *others) = counts
    if others or not only:
        number = "the same number of examples for all of its matrices" if others else "its number of examples"
        raise KfacpackError(f"{item.name}: does not record {number}, which the rule 'shards' requires")
    return only


def _check_unmerged(item: MergeInput) -> None:
    merge = item.curvature.about.merge
    if merge is not None and merge.rule != ShardsRule.name:
        raise KfacpackError(f"{item.name}: was merged by {merge.rule!r}; expected a shard of one task")
    if any(list(block.structure.weights) != [1] for block in item.blocks.values()):
        raise KfacpackError(f"{item.name}: has blocks with several terms; expected a shard of one task")


def _check_same_task(first: MergeInput, other: MergeInput) -> None:
    sources = [item.source and item.source.model_copy(update={"examples": None}) for item in (first, other)]
    if sources[0] != sources[1]:
        names = [item.source and item.source.task for item in (first, other)]
        tasks = f"for different tasks, {names[0]!r} and {names[1]!r}"
        problem = tasks if names[0] != names[1] else "from different data"
        if None in names:
            problem = "from data that only one of them records"
        raise KfacpackError(f"{first.name} and {other.name} were estimated {problem}; expected shards of one task")
    if first.estimate_without_seed != other.estimate_without_seed:
        problem = "were estimated with different settings; expected shards of one task"
        raise KfacpackError(f"{first.name} and {other.name} {problem}")


RULES: dict[str, type[MergeRule]] = {rule.name: rule for rule in (TakRule, StackRule, OptimalRule, ShardsRule)}
"""Merge rule classes by name."""
