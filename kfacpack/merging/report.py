"""What a merge lost, per block and in all.

What is lost of a block is Σ_st C_st B_s ⊗ A_t, with C = diag(w) minus what the rule made of that. In coordinates
(gram.py) its norm is that of Xᵀ C Y, so no Kronecker product is ever built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kfacpack.merging.rules import Combination, Terms


@dataclass(frozen=True)
class BlockReport:
    name: str
    terms: int
    """Of all inputs together."""
    missing: tuple[str, ...] = ()
    """The inputs that have no such block."""
    norm: float = 0.0
    """‖Σ w B ⊗ A‖, if it was measured."""
    error: float = 0.0
    """‖Σ w B ⊗ A − merged‖."""
    bound: float = 0.0
    """The paper's bound on that, T σ_A σ_B."""

    @property
    def frobenius(self) -> float:
        """The error, relative to the norm."""
        return self.error / self.norm if self.error else 0.0

    @property
    def relative_bound(self) -> float:
        return self.bound / self.norm if self.bound else 0.0


@dataclass(frozen=True)
class Report:
    blocks: tuple[BlockReport, ...]
    measured: bool
    """False where nothing was to be lost, so that nothing was measured."""
    subtracted: tuple[str, ...] = ()
    """Tasks that were subtracted from an input: then what it had lost on the remaining ones is not known."""

    @property
    def total(self) -> BlockReport:
        """All blocks as one."""
        norm, error, bound = (
            hypot(*(getattr(block, key) for block in self.blocks)) for key in ("norm", "error", "bound")
        )
        terms, missing = sum(block.terms for block in self.blocks), {name for b in self.blocks for name in b.missing}
        return BlockReport("", terms, tuple(sorted(missing)), norm, error, bound)

    @property
    def partial(self) -> tuple[BlockReport, ...]:
        return tuple(block for block in self.blocks if block.missing)


def measured(name: str, terms: Terms, made: Combination, missing: Sequence[str]) -> BlockReport:
    count = len(terms.weights)
    if len(terms.sides) == 1:
        (X,) = terms.coordinates
        return BlockReport(name, count, tuple(missing), float((X.T @ terms.weights).norm()))
    X, Y = terms.coordinates
    B, A = made.sides
    target = torch.diag(terms.weights)
    lost = target - B.T @ (made.weights[:, None] * A)
    # The paper's proof, word for word, for C_t = w_t A_t: with equal weights that is the paper's bound itself.
    bound = _deviation(X / terms.tasks[:, None], terms.tasks) * _deviation(terms.weights[:, None] * Y, terms.tasks)
    return BlockReport(
        name, count, tuple(missing), float((X.T @ target @ Y).norm()), float((X.T @ lost @ Y).norm()), bound
    )


def _deviation(points: Tensor, tasks: Tensor) -> float:
    """√T σ of T points. A row of (K, K) that stands for several tasks counts as often."""
    apart = points - tasks @ points / tasks.sum()
    return float((tasks[:, None].sqrt() * apart).norm())
