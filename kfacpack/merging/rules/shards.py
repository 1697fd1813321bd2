"""Estimates of one task from different examples: what one run over all of them would have given.

A is a mean over positions (over examples where positions are reduced first), B and dense blocks over examples, and the
mean of all is the mean of the means by these counts.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch

from kfacpack.errors import KfacpackError
from kfacpack.merging.rules.base import Combination, Rule, Terms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kfacpack.bundle.manifest import Parent, Source
    from kfacpack.curvature.matrices import Matrix
    from kfacpack.merging.inputs import Input


class Shards(Rule):
    name = "shards"
    exact = True
    keeps_sums = True

    def check(self, inputs: Sequence[Input]) -> None:
        _require_one_task(inputs)

    def kronecker(self, terms: Terms) -> Combination:
        B, A = terms.sides
        over_positions = terms.sharing == "expand"
        sides = (_shares(B, over_positions=False), _shares(A, over_positions=over_positions))
        return Combination(torch.ones(1, dtype=torch.float64), sides)

    def whole(self, terms: Terms) -> Combination:
        (G,) = terms.sides
        return Combination(torch.ones(1, dtype=torch.float64), (_shares(G, over_positions=False),))

    def weights(self, inputs: Sequence[Input], given: Sequence[float] | None) -> list[float]:
        if given is not None:
            raise KfacpackError("shards are weighted by their examples; 'tak', 'stack' and 'optimal' take weights")
        counts = [_examples(each) for each in inputs]
        return [count / sum(counts) for count in counts]

    def parents(self, inputs: Sequence[Input], factors: Sequence[float]) -> tuple[Parent, ...]:
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

    def source(self, inputs: Sequence[Input]) -> Source | None:
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


def _examples(each: Input) -> int:
    """How many examples a shard was estimated from, as all of its matrices say."""
    counts = {matrix.examples for block in each.curvature.blocks for _, matrix in block.structure.matrices()}
    (only, *others) = counts
    if others or not only:
        raise KfacpackError(f"{each.name}: does not say from how many examples it was estimated, so it is no shard")
    return only


def _require_one_task(inputs: Sequence[Input]) -> None:
    """Refuse what cannot be parts of one estimate. That their examples differ is for the user to know."""
    first, *others = inputs
    for each in inputs:
        merge = each.curvature.about.merge
        if merge is not None and merge.rule != Shards.name:
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
