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

    def __init__(self, sign: float = 1.0, scaled: bool = False):
        self._sign = sign
        self._scaled = scaled

    def vectors(self, step: Step, g: Tensor, layout: Layout, examples: int) -> Tensor:
        node: Any = step.node
        factor = self._sign * (node._saved_alpha if self._scaled else 1)
        return factor * layout.per_example(g, step.operand_shape, examples)


class ConvolutionBias(VectorOperation):
    """A bias along the channels, dimension 1 of (N, channels, …)."""

    kind = "add"

    def vectors(self, step: Step, g: Tensor, layout: Layout, examples: int) -> Tensor:
        return g.flatten(2).sum(2)


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
        normalized = (node._saved_input - node._saved_result1).mul_(node._saved_result2)
        return layout.per_example(normalized.mul_(g), step.operand_shape, examples)


class LayerNormShift(Shift):
    kind = "layer_norm"
