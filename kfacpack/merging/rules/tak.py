"""The paper's rule: (Σ B_t) ⊗ (Σ λ_t A_t). One term, whatever the number of tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kfacpack.errors import KfacpackError
from kfacpack.merging.rules.base import PARTIAL, Combination, Rule, Terms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfacpack.merging.inputs import Input


class Tak(Rule):
    name = "tak"
    keeps_sums = True

    def check(self, inputs: Sequence[Input]) -> None:
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
