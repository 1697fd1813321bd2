"""The operations that use parameters, by their name in autograd's graph and the slot of the parameter.

Parameters that are added to or multiplied with every position (biases, scales, norms, position tables) have a
`VectorOperation` each. All other uses are a `GenericOperation`: the gradient at the operand is linear in the gradient
at the output, so the gradient of one example is obtained by setting the output gradients of all other examples to
zero. This is exact, and takes N backward calls of the operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfacpack._torch import layer_norm_rows, operation_name, saved
from kfacpack.errors import KfacpackError
from kfacpack.estimation.autograd_graph import backward_to_operand, last_operation
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
    """The sum x + operand, or x ± factor * operand.

    Args:
        factor: Name under which autograd saves the factor, if there is one.
        sign: 1 for a sum, -1 for a difference.
    """

    kind = "add"

    def __init__(self, factor: str | None = None, sign: float = 1.0):
        self._factor = factor
        self._sign = sign

    def vectors(self, step: GraphStep, g: Tensor, layout: ExampleLayout, examples: int) -> Tensor:
        """Returns g, summed over positions and scaled."""
        factor = self._sign * (saved(step.node, self._factor) if self._factor else 1)
        return factor * layout.per_example(g, step.operand_shape, examples)


class ConvolutionBias(VectorOperation):
    """A bias along the channels, dimension 1 of (N, channels, ...)."""

    kind = "add"

    def vectors(self, step: GraphStep, g: Tensor, layout: ExampleLayout, examples: int) -> Tensor:
        """Returns g, summed over positions."""
        return layout.per_example(g, (*step.operand_shape, *[1] * (g.dim() - 2)), examples)


class MultiplyOperation(VectorOperation):
    """The product x * operand, element by element.

    Args:
        other: Name under which autograd saves x.
    """

    kind = "multiply"

    def __init__(self, other: str):
        self._other = other

    def vectors(self, step: GraphStep, g: Tensor, layout: ExampleLayout, examples: int) -> Tensor:
        """Returns g * x, summed over positions."""
        return layout.per_example(g * saved(step.node, self._other), step.operand_shape, examples)


class LayerNormScale(VectorOperation):
    """The scale of a layer norm."""

    kind = "layer_norm"

    def vectors(self, step: GraphStep, g: Tensor, layout: ExampleLayout, examples: int) -> Tensor:
        """Returns g times the normalised input, summed over positions."""
        return layout.per_example(layer_norm_rows(step.node) * g, step.operand_shape, examples)


class LayerNormShift(AddOperation):
    """The shift of a layer norm."""

    kind = "layer_norm"


class GenericOperation(VectorOperation):
    """Any other operation, differentiated for one example at a time.

    Args:
        kind: Name of the operation in bundles.
    """

    # During the backward pass, an operation returns no gradient for inputs whose gradient was not requested.
    immediate = False

    def __init__(self, kind: str):
        self.kind = kind

    def vectors(self, step: GraphStep, g: Tensor, layout: ExampleLayout, examples: int) -> Tensor:
        """Returns the gradient at the operand for each example, computed separately."""
        vectors = []
        for example in range(examples):
            masked = torch.zeros_like(g)
            layout.by_example(masked, examples)[example] = layout.by_example(g, examples)[example]
            vectors.append(backward_to_operand(step, masked).reshape(-1))
        return torch.stack(vectors)


MATRIX_OPERATIONS: dict[tuple[str, int], MatrixOperation] = {
    ("Addmm", 1): MatmulLeft("mat2"),
    ("Addmm", 2): MatmulRight("mat1", bias_slot=0),
    ("Mm", 0): MatmulLeft("mat2"),
    ("Mm", 1): MatmulRight("self"),
    ("Bmm", 0): MatmulLeft("mat2"),
    ("Bmm", 1): MatmulRight("self"),
    ("Linear", 1): LinearOperation(),
    ("Convolution", 1): ConvolutionOperation(),
    ("Embedding", 0): EmbeddingOperation(),
}
"""Operations by their name in autograd's graph and the slot of the parameter."""
VECTOR_OPERATIONS: dict[tuple[str, int], VectorOperation] = {
    ("Add", 0): AddOperation(),
    ("Add", 1): AddOperation("alpha"),
    ("Sub", 0): AddOperation(),
    ("Sub", 1): AddOperation("alpha", sign=-1.0),
    ("Addmm", 0): AddOperation("beta"),
    ("Linear", 2): AddOperation(),
    ("Convolution", 2): ConvolutionBias(),
    ("Mul", 0): MultiplyOperation("other"),
    ("Mul", 1): MultiplyOperation("self"),
    ("NativeLayerNorm", 1): LayerNormScale(),
    ("NativeLayerNorm", 2): LayerNormShift(),
}
"""Operations by their name in autograd's graph and the slot of the parameter."""
OPERATION_KINDS = {"Expand": "token", "Repeat": "token"}
"""Names of generic operations in bundles, if they differ from the lower-case name of the operation."""


_PRODUCTS = frozenset(key for key, operation in MATRIX_OPERATIONS.items() if operation.kind == "linear")


def equivalent_products(key: tuple[str, int]) -> frozenset[tuple[str, int]] | None:
    """Returns the operations that a product may be executed as, depending on the memory layout of its rows.

    Args:
        key: Name of the operation and slot of the parameter.

    Returns:
        Keys of the operations; None if `key` is not a product.
    """
    return _PRODUCTS if key in _PRODUCTS else None


def matrix_operation_of(step: GraphStep) -> MatrixOperation:
    """Returns the matrix operation of a step that was planned as one.

    Raises:
        KfacpackError: If it has groups or scaling that it did not have in the first batch.
    """
    key = last_operation((step,))
    operation = MATRIX_OPERATIONS[key]
    if not operation.supports(step.node):
        raise KfacpackError(f"{key[0]!r} was a plain product in the first batch, but is now scaled, grouped or batched")
    return operation


def operation_of(step: GraphStep) -> MatrixOperation | VectorOperation:
    """Returns the operation of a step. Falls back to `GenericOperation` for unknown operations."""
    key = last_operation((step,))
    if (matrix_operation := MATRIX_OPERATIONS.get(key)) and matrix_operation.supports(step.node):
        return matrix_operation
    if key in VECTOR_OPERATIONS:
        return VECTOR_OPERATIONS[key]
    name = operation_name(step.node)
    return GenericOperation(OPERATION_KINDS.get(name, name.lower()))
