"""Parameters that are added to, or multiplied with, every position: biases, scales, norms, position tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from kfacpack.estimation.operations.base import VectorOperation

if TYPE_CHECKING:
    from kfacpack.estimation.graph import Step
    from kfacpack.estimation.layout import Layout


class Shift(VectorOperation):
    """x + operand."""

    kind = "add"

    def __init__(self, factor: str | None = None, sign: float = 1.0):
        """`factor` is what the operand was multiplied with first, under its name in autograd."""
        self._factor = factor
        self._sign = sign

    def vectors(self, step: Step, g: Tensor, layout: Layout, examples: int) -> Tensor:
        factor = self._sign * (getattr(step.node, self._factor) if self._factor else 1)
        return factor * layout.per_example(g, step.operand_shape, examples)


class ConvolutionBias(VectorOperation):
    """A bias along the channels, dimension 1 of (N, channels, …)."""

    kind = "add"

    def vectors(self, step: Step, g: Tensor, layout: Layout, examples: int) -> Tensor:
        return layout.per_example(g, (*step.operand_shape, *[1] * (g.dim() - 2)), examples)


class Scale(VectorOperation):
    """x * operand."""

    kind = "multiply"

    def __init__(self, other: str):
        self._other = other

    def vectors(self, step: Step, g: Tensor, layout: Layout, examples: int) -> Tensor:
        return layout.per_example(g * getattr(step.node, self._other), step.operand_shape, examples)


class LayerNormScale(VectorOperation):
    kind = "layer_norm"

    def vectors(self, step: Step, g: Tensor, layout: Layout, examples: int) -> Tensor:
        node: Any = step.node
        # Mean and 1 / sqrt(variance + eps), as the forward pass had them.
        normalized = (node._saved_input - node._saved_result1) * node._saved_result2
        return layout.per_example(normalized * g, step.operand_shape, examples)


class LayerNormShift(Shift):
    kind = "layer_norm"
