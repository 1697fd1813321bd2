"""What a rule is given, and what it says.

Shapes: a block has K terms, those of all inputs in a row; `sides` of the product are B and A, or the one matrix of a
dense block. A combination of r terms has, for each side, coefficients (r, K).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
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
"""The step in a block's losses when some inputs did not have the block."""


@dataclass(frozen=True)
class Terms:
    """One block of all inputs: the target is Σ weight · (the Kronecker product of the sides)."""

    weights: Tensor
    """(K,)"""
    tasks: Tensor
    """(K,), how many tasks each term stands for: a sum of three tasks' B stands for three."""
    sides: tuple[tuple[Matrix, ...], ...]
    sharing: Sharing
    coordinates: tuple[Tensor, ...] = ()
    """(K, K) of each side, see gram.py; none for rules that are exact."""


@dataclass(frozen=True)
class Combination:
    """Σ weight · (Σ coefficient · B) ⊗ (Σ coefficient · A)."""

    weights: Tensor
    """(r,)"""
    sides: tuple[Tensor, ...]
    """(r, K) of each side."""


class MergeRule(ABC):
    name: ClassVar[str]
    exact: ClassVar[bool] = False
    """Whether nothing is lost, so that nothing has to be measured."""
    keeps_sums: ClassVar[bool] = False
    """Whether what is merged can be taken apart again: its factors are sums of its parents', with known weights."""
    ranked: ClassVar[bool] = False

    def __init__(self, rank: int = 1):
        self.rank = rank
        if type(rank) is not int:
            raise KfacpackError(f"rank {rank!r}: expected a whole number")
        if rank != 1 and not self.ranked:
            raise KfacpackError(f"the rule {self.name!r} has no rank; 'optimal' has")

    @property
    def step(self) -> str:
        """What a block's losses call it."""
        return f"{self.name}:{self.rank}" if self.ranked else self.name

    def error_in(self, losses: Sequence[Loss]) -> float | None:
        """The relative error of what it made of bundles of single tasks, by the losses that were written down with it.

        Nothing is written where nothing is lost; None where something was, and it is not known how much.
        """
        own = [loss.frobenius for loss in losses if loss.step == self.step]
        return own[-1] if own else 0.0

    def check(self, inputs: Sequence[MergeInput]) -> None:
        """Refuse inputs that this rule cannot do right by, though they belong together."""
        check_tasks(inputs)

    @abstractmethod
    def kronecker(self, terms: Terms) -> Combination:
        """How a block's Kronecker terms become fewer."""

    def whole(self, terms: Terms) -> Combination:
        """How a block's G is added up, where it is one matrix."""
        return Combination(torch.ones(1, dtype=torch.float64), (terms.weights[None],))

    def weights(self, inputs: Sequence[MergeInput], given: Sequence[float] | None) -> list[float]:
        """By what each input is multiplied in the target."""
        return relative_weights(inputs, given)

    def parents(self, inputs: Sequence[MergeInput], factors: Sequence[float]) -> tuple[Parent, ...]:
        """The bundles behind the inputs, their weights multiplied through."""
        return tuple(
            parent.model_copy(update={"weight": factor * parent.weight})
            for each, factor in zip(inputs, factors, strict=True)
            for parent in each.parents
        )

    def source(self, inputs: Sequence[MergeInput]) -> Source | None:
        """Where the merged curvature comes from, if that is one place."""
        return None

    def estimate(self, inputs: Sequence[MergeInput]) -> Estimate | None:
        """How all inputs were estimated, if in the same way."""
        found = {each.estimate_without_seed for each in inputs}
        seeds = {each.estimate.seed for each in inputs if each.estimate}
        (only, *others) = found
        if others or only is None:
            return None
        return only.model_copy(update={"seed": seeds.pop()}) if len(seeds) == 1 else only
