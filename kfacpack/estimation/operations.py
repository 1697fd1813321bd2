"""Parameters that are added to, or multiplied with, every position: biases, scales, norms, position tables.

Every operation that has no file of its own: tokens, grouped convolutions, whatever else.

What an operation passes back is linear in the gradient at its output. So the gradient of one example at the operand is
what it passes back when the gradient of all other examples is set to zero. That is exact, and takes N small steps.

How operations use parameters: by the name of the operation in autograd's graph, and the input that it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kfacpack.errors import KfacpackError
from kfacpack.estimation.autograd_graph import backward_to_operand
from kfacpack.estimation.matrix_operations import (
    ConvolutionOperation,
    EmbeddingOperation,
    LinearOperation,
    MatmulLeft,
    MatmulRight,
    MatrixOperation,
    VectorOperation,
)

if TYPE_CHECKING:
    from kfacpack.estimation.autograd_graph import GraphStep
    from kfacpack.estimation.tracing import ExampleLayout


class AddOperation(VectorOperation):
    """x + operand."""

    kind = "add"

    def __init__(self, factor: str | None = None, sign: float = 1.0):
        """`factor` is what the operand was multiplied with first, under its name in autograd."""
        self._factor = factor
        self._sign = sign

    def vectors(self, step: GraphStep, g: Tensor, layout: ExampleLayout, examples: int) -> Tensor:
        factor = self._sign * (getattr(step.node, self._factor) if self._factor else 1)
        return factor * layout.per_example(g, step.operand_shape, examples)


class ConvolutionBias(VectorOperation):
    """A bias along the channels, dimension 1 of (N, channels, …)."""

    kind = "add"

    def vectors(self, step: GraphStep, g: Tensor, layout: ExampleLayout, examples: int) -> Tensor:
        return layout.per_example(g, (*step.operand_shape, *[1] * (g.dim() - 2)), examples)


class MultiplyOperation(VectorOperation):
    """x * operand."""

    kind = "multiply"

    def __init__(self, other: str):
        self._other = other

    def vectors(self, step: GraphStep, g: Tensor, layout: ExampleLayout, examples: int) -> Tensor:
        return layout.per_example(g * getattr(step.node, self._other), step.operand_shape, examples)


class LayerNormScale(VectorOperation):
    kind = "layer_norm"

    def vectors(self, step: GraphStep, g: Tensor, layout: ExampleLayout, examples: int) -> Tensor:
        node: Any = step.node
        # Mean and 1 / sqrt(variance + eps), as the forward pass had them.
        normalized = (node._saved_input - node._saved_result1) * node._saved_result2
        return layout.per_example(normalized * g, step.operand_shape, examples)


class LayerNormShift(AddOperation):
    kind = "layer_norm"


class GenericOperation(VectorOperation):
    # While autograd is at work, an operation passes nothing back to inputs that were not asked for.
    immediate = False

    def __init__(self, kind: str):
        self.kind = kind

    def vectors(self, step: GraphStep, g: Tensor, layout: ExampleLayout, examples: int) -> Tensor:
        found = []
        for number in range(examples):
            alone = torch.zeros_like(g)
            layout.by_example(alone, examples)[number] = layout.by_example(g, examples)[number]
            found.append(backward_to_operand(step, alone).reshape(-1))
        return torch.stack(found)


MATRIX_OPERATIONS: dict[tuple[str, int], MatrixOperation] = {
    ("AddmmBackward0", 1): MatmulLeft("_saved_mat2"),
    ("AddmmBackward0", 2): MatmulRight("_saved_mat1", bias_slot=0),
    ("MmBackward0", 0): MatmulLeft("_saved_mat2"),
    ("MmBackward0", 1): MatmulRight("_saved_self"),
    ("BmmBackward0", 0): MatmulLeft("_saved_mat2"),
    ("BmmBackward0", 1): MatmulRight("_saved_self"),
    ("LinearBackward0", 1): LinearOperation(),
    ("ConvolutionBackward0", 1): ConvolutionOperation(),
    ("EmbeddingBackward0", 0): EmbeddingOperation(),
}
VECTOR_OPERATIONS: dict[tuple[str, int], VectorOperation] = {
    ("AddBackward0", 0): AddOperation(),
    ("AddBackward0", 1): AddOperation("_saved_alpha"),
    ("SubBackward0", 0): AddOperation(),
    ("SubBackward0", 1): AddOperation("_saved_alpha", sign=-1.0),
    ("AddmmBackward0", 0): AddOperation("_saved_beta"),
    ("LinearBackward0", 2): AddOperation(),
    ("ConvolutionBackward0", 2): ConvolutionBias(),
    ("MulBackward0", 0): MultiplyOperation("_saved_other"),
    ("MulBackward0", 1): MultiplyOperation("_saved_self"),
    ("NativeLayerNormBackward0", 1): LayerNormScale(),
    ("NativeLayerNormBackward0", 2): LayerNormShift(),
}
OPERATION_NAMES = {"ExpandBackward0": "token", "RepeatBackward0": "token"}


_PRODUCTS = frozenset(key for key, operation in MATRIX_OPERATIONS.items() if operation.kind == "linear")


def equivalent_products(key: tuple[str, int]) -> frozenset[tuple[str, int]] | None:
    """The operations that a product may turn into when its rows lie otherwise in memory; None if it is no product."""
    return _PRODUCTS if key in _PRODUCTS else None


def matrix_operation_of(step: GraphStep) -> MatrixOperation:
    """The operation of a step that is known to be one of these."""
    operation = MATRIX_OPERATIONS[step.node.name(), step.slot]
    if not operation.takes(step.node):
        raise KfacpackError(f"{step.node.name()!r} is not the simple product any more that it was in the first batch")
    return operation


def operation_of(step: GraphStep) -> MatrixOperation | VectorOperation:
    """What the operation of this step is; there is none that is not anything."""
    key = (step.node.name(), step.slot)
    if (rows := MATRIX_OPERATIONS.get(key)) and rows.takes(step.node):
        return rows
    if key in VECTOR_OPERATIONS:
        return VECTOR_OPERATIONS[key]
    return GenericOperation(OPERATION_NAMES.get(key[0], key[0].removesuffix("Backward0").lower()))
