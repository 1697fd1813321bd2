"""Every operation that has no file of its own: tokens, grouped convolutions, whatever else.

What an operation passes back is linear in the gradient at its output. So the gradient of one example at the operand is
what it passes back when the gradient of all other examples is set to zero. That is exact, and takes N small steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfacpack.estimation.graph import pull
from kfacpack.estimation.operations.base import VectorOperation

if TYPE_CHECKING:
    from kfacpack.estimation.graph import Step
    from kfacpack.estimation.layout import Layout


class Other(VectorOperation):
    # While autograd is at work, an operation passes nothing back to inputs that were not asked for.
    immediate = False

    def __init__(self, kind: str):
        self.kind = kind

    def vectors(self, step: Step, g: Tensor, layout: Layout, examples: int) -> Tensor:
        found = []
        for number in range(examples):
            alone = torch.zeros_like(g)
            layout.by_example(alone, examples)[number] = layout.by_example(g, examples)[number]
            found.append(pull(step, alone).reshape(-1))
        return torch.stack(found)
