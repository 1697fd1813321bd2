"""The paper's rule: (Σ B_t) ⊗ (Σ λ_t A_t). One term, whatever the number of tasks."""

from __future__ import annotations

import torch

from kfacpack.merging.rules.base import Combination, Rule, Terms


class Tak(Rule):
    name = "tak"
    keeps_sums = True

    def kronecker(self, terms: Terms) -> Combination:
        # A term whose B is a sum over m tasks stands for m equal ones, B / m ⊗ A. So merging what is merged already is
        # the same as merging everything at once.
        B = torch.ones_like(terms.weights)
        A = terms.tasks * terms.weights / terms.tasks.sum()
        return Combination(torch.ones(1, dtype=torch.float64), (B[None], A[None]))
