"""Every term kept, with its weight: exact, and as large as all inputs together."""

from __future__ import annotations

import torch

from kfacpack.merging.rules.base import Combination, Rule, Terms


class Stack(Rule):
    name = "stack"
    exact = True
    keeps_sums = True

    def kronecker(self, terms: Terms) -> Combination:
        each = torch.eye(len(terms.weights), dtype=torch.float64)
        return Combination(terms.weights, (each, each))
