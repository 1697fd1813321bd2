"""The base class of merge rules, and the data that a rule receives and returns.

Shapes: a block has K terms, those of all inputs in sequence. The `sides` of a Kronecker term are B and A; a block that
is one whole matrix has a single side. A combination into r terms has coefficients of shape (r, K) for each side.
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
"""The step in a block's losses that records that some inputs did not have the block."""


@dataclass(frozen=True)
class Terms:
    """The terms of one block from all inputs; the target is Σ weight · (Kronecker product of the sides)."""

    weights: Tensor
    """Weights, of shape (K,)."""
    tasks: Tensor
    """Number of tasks in each term, of shape (K,): 3 if B is the sum over three tasks."""
    sides: tuple[tuple[Matrix, ...], ...]
    """K matrices for each side."""
    sharing: Sharing
    """How positions that share a weight are treated."""
    coordinates: tuple[Tensor, ...] = ()
    """Coordinates of each side's matrices, of shape (K, K), see `combination.py`; empty for exact rules."""


@dataclass(frozen=True)
class Combination:
    """The terms of a merged block: Σ weight · (Σ coefficient · B) ⊗ (Σ coefficient · A)."""

    weights: Tensor
    """Weights, of shape (r,)."""
    sides: tuple[Tensor, ...]
    """Coefficients of each side, of shape (r, K)."""


class MergeRule(ABC):
    """A way to combine the terms of all inputs into fewer terms.

    Args:
        rank: Number of terms to keep, for rules that have a rank.

    Raises:
        KfacpackError: If the rank is not an integer, or not 1 for a rule that has no rank.
    """

    name: ClassVar[str]
    """Name of the rule."""
    exact: ClassVar[bool] = False
    """Whether the result equals the target, so that no error has to be measured."""
    keeps_sums: ClassVar[bool] = False
    """Whether the merged factors are weighted sums of the parents' factors, so that a parent can be subtracted."""
    ranked: ClassVar[bool] = False
    """Whether the rule has a rank."""

    def __init__(self, rank: int = 1):
        self.rank = rank
        if type(rank) is not int:
            raise KfacpackError(f"rank {rank!r}: expected an integer")
        if rank != 1 and not self.ranked:
            raise KfacpackError(f"the rule {self.name!r} has no rank; use 'optimal'")

    @property
    def step(self) -> str:
        """Name of the rule in a block's losses."""
        return f"{self.name}:{self.rank}" if self.ranked else self.name

    def error_in(self, losses: Sequence[Loss]) -> float | None:
        """Returns the relative error of a merge of single-task bundles, as recorded in its losses.

        Args:
            losses: The losses of the merged curvature or of one of its blocks.

        Returns:
            The relative error; 0 if no loss of this rule is recorded, None if its size was not measured.
        """
        own = [loss.frobenius for loss in losses if loss.step == self.step]
        return own[-1] if own else 0.0

    def check(self, inputs: Sequence[MergeInput]) -> None:
        """Checks that the rule can merge the inputs, which `check_compatible` has accepted.

        Raises:
            KfacpackError: If the rule cannot merge them.
        """
        check_tasks(inputs)

    @abstractmethod
    def kronecker(self, terms: Terms) -> Combination:
        """Combines the Kronecker terms of a block."""

    def whole(self, terms: Terms) -> Combination:
        """Sums the matrices of a block that is one whole matrix."""
        return Combination(torch.ones(1, dtype=torch.float64), (terms.weights[None],))

    def weights(self, inputs: Sequence[MergeInput], weights: Sequence[float] | None) -> list[float]:
        """Returns the factor of each input in the target.

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
        """Returns the data of the merged curvature if it is one dataset, else None."""
        return None

    def estimate(self, inputs: Sequence[MergeInput]) -> Estimate | None:
        """Returns the settings of the estimates if they are the same for all inputs, else None."""
        settings = {item.estimate_without_seed for item in inputs}
        seeds = {item.estimate.seed for item in inputs if item.estimate}
        (only, *others) = settings
        if others or only is None:
            return None
        return only.model_copy(update={"seed": seeds.pop()}) if len(seeds) == 1 else only
