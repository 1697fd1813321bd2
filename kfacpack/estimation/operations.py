"""Operations that use parameters, identified by their name in autograd's graph and the slot of the parameter.

The slot is the index of the input at which the parameter enters the operation. The operand is the parameter as it
enters the operation, after a transpose or a cast. g is the gradient with respect to the operation's output. The P rows
are the positions of all N examples in a batch, in the order that the operation uses.

- Parameters that are used as matrices have a `MatrixOperation`: `linear`, `x @ W`, `W @ x`, `addmm`, and any `einsum`
  that reduces to one of them; convolutions with any number of dimensions, which are products with every patch that the
  kernel covers; and embedding lookups, which are products with one-hot rows and have a diagonal A.
- Parameters that shift or scale every position (biases, scales, norms, position tables) have a `VectorOperation`.
- All other uses have a `GenericOperation`. The gradient with respect to the operand is linear in g, so the gradient
  for one example is obtained by setting the output gradients of all other examples to zero. The result is exact, but
  the backward function of the operation is called N times.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from kfacpack._torch import (
    convolution_arguments,
    embedding_arguments,
    layer_norm_rows,
    operation_name,
    output_shape,
    product_scales,
    saved,
)
from kfacpack.errors import KfacpackError
from kfacpack.estimation.autograd_graph import backward_to_operand, last_operation

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from kfacpack.estimation.autograd_graph import GraphStep
    from kfacpack.estimation.tracing import ExampleLayout


class MatrixOperation(ABC):
    """An operation that multiplies its input rows by a parameter, which gets Kronecker factors."""

    kind: str
    """Name of the operation in bundles."""
    bias_slot: int | None = None
    """Index of the input that is added to every row of the output as a bias; None if the operation adds no bias."""
    operand_is_transposed: bool = False
    """Whether the operand is (in, out) rather than (out, in)."""
    one_hot: bool = False
    """Whether `inputs` returns indices of one-hot rows, (P,). Negative indices are ignored."""

    @abstractmethod
    def supports(self, node: Node) -> bool:
        """Returns whether the operation at `node` is supported. Operations with groups or scaling are not supported."""

    @abstractmethod
    def inputs(self, node: Node) -> Tensor:
        """Returns the input rows a, (P, in)."""

    @abstractmethod
    def gradients(self, node: Node, g: Tensor) -> Tensor:
        """Returns the output gradient g as rows, (P, out)."""

    @abstractmethod
    def identity(self, node: Node) -> Hashable:
        """Returns a key that is equal for two operations in one graph if and only if they have the same inputs."""


class VectorOperation(ABC):
    """An operation whose parameter gets a dense or diagonal G, which is computed from per-example gradients."""

    kind: str
    """Name of the operation in bundles."""
    immediate: bool = True
    """Whether `vectors` may be called during the backward pass."""

    @abstractmethod
    def vectors(self, step: GraphStep, g: Tensor, layout: ExampleLayout, examples: int) -> Tensor:
        """Returns the gradient with respect to the operand for every example, (N, size of the operand).

        Args:
            step: The operation, as the last step of the path from the parameter.
            g: Gradient with respect to the output of the operation.
            layout: Layout of the examples in the output.
            examples: Number of examples, N.
        """


def memory_identity(tensor: Tensor) -> Hashable:
    """Returns a key for a tensor saved by autograd. Tensors of one graph with equal keys have the same elements."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


class MatmulRight(MatrixOperation):
    """The product rows @ operand, with an operand (in, out). Both `linear` and `x @ W` are executed as this product.

    Args:
        rows: Name under which autograd saves the rows.
        bias_slot: Index of the input that is a bias; None if the operation adds no bias.
    """

    kind = "linear"
    operand_is_transposed = True

    def __init__(self, rows: str, bias_slot: int | None = None):
        self._rows = rows
        self.bias_slot = bias_slot

    def supports(self, node: Node) -> bool:
        """Returns whether the operation is a single product without scaling."""
        return product_scales(node) == (1, 1) and _is_single_product(node)

    def inputs(self, node: Node) -> Tensor:
        """Returns the rows that are multiplied by the operand."""
        return _as_matrix(saved(node, self._rows))

    def gradients(self, node: Node, g: Tensor) -> Tensor:
        """Returns the output gradient g as a matrix, (P, out)."""
        return _as_matrix(g)

    def identity(self, node: Node) -> Hashable:
        """Returns a key that identifies the rows by their location in memory."""
        return memory_identity(self.inputs(node))


class MatmulLeft(MatmulRight):
    """The product operand @ columns, with an operand (out, in)."""

    operand_is_transposed = False

    def inputs(self, node: Node) -> Tensor:
        """Returns the columns that are multiplied by the operand, transposed to rows, (P, in)."""
        return super().inputs(node).T

    def gradients(self, node: Node, g: Tensor) -> Tensor:
        """Returns the transpose of the output gradient g, (P, out)."""
        return super().gradients(node, g).T


class LinearOperation(MatrixOperation):
    """`linear`, with an operand (out, in), on devices where torch executes `linear` as a single operation."""

    kind = "linear"
    bias_slot = 2

    def supports(self, node: Node) -> bool:
        """Returns True, because `linear` is always supported."""
        return True

    def inputs(self, node: Node) -> Tensor:
        """Returns the input as rows, (P, in), with all leading dimensions flattened."""
        rows: Tensor = saved(node, "input")
        return rows.reshape(-1, rows.shape[-1])

    def gradients(self, node: Node, g: Tensor) -> Tensor:
        """Returns the output gradient g as rows, (P, out), with all leading dimensions flattened."""
        return g.reshape(-1, g.shape[-1])

    def identity(self, node: Node) -> Hashable:
        """Returns a key that identifies the input by its location in memory."""
        return memory_identity(saved(node, "input"))


def _is_single_product(node: Node) -> bool:
    """Returns whether the node is a single product, not a batch of products."""
    shape = output_shape(node)
    return len(shape) == 2 or shape[0] == 1


def _as_matrix(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor[0]


class ConvolutionOperation(MatrixOperation):
    """A convolution with an operand (out, in, *kernel). Each input row is a flattened patch of the image."""

    kind = "convolution"
    bias_slot = 2

    def supports(self, node: Node) -> bool:
        """Returns whether the operation is an ordinary convolution without groups."""
        arguments = convolution_arguments(node)
        return not arguments.transposed and arguments.groups == 1

    def inputs(self, node: Node) -> Tensor:
        """Returns all patches that the kernel covers, (P, in * kernel size)."""
        arguments = convolution_arguments(node)
        return patches(arguments.input, arguments.kernel, arguments.stride, arguments.padding, arguments.dilation)

    def gradients(self, node: Node, g: Tensor) -> Tensor:
        """Returns the output gradient g as rows, (P, out): one row per position and one column per channel."""
        return g.movedim(1, -1).reshape(-1, g.shape[1])

    def identity(self, node: Node) -> Hashable:
        """Returns a key with the location of the images in memory and the arguments of the convolution."""
        images, *geometry = convolution_arguments(node)
        return memory_identity(images), *geometry


def patches(
    x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...]
) -> Tensor:
    """Returns all patches that a kernel covers: (N, in, *sizes) -> (N * positions, in * kernel size).

    Args:
        x: Images, with any number of spatial dimensions.
        kernel: Size of the kernel in each spatial dimension.
        stride: Stride in each spatial dimension.
        padding: Zero padding on both sides of each spatial dimension.
        dilation: Dilation in each spatial dimension.

    Returns:
        The patches, with positions in row-major order.
    """
    x = pad(x, [width for side in reversed(padding) for width in (side, side)])
    for dim, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(dim, gap * (size - 1) + 1, step)[..., ::gap]
    spatial = len(kernel)
    return x.movedim(1, 1 + spatial).reshape(-1, x.shape[1] * prod(kernel))


class EmbeddingOperation(MatrixOperation):
    """An embedding lookup, whose operand is the table (vocabulary, width)."""

    kind = "embedding"
    operand_is_transposed = True
    one_hot = True

    def supports(self, node: Node) -> bool:
        """Returns whether gradients are independent of the frequency of indices (`scale_grad_by_freq` is False)."""
        return not embedding_arguments(node).scale_grad_by_freq

    def inputs(self, node: Node) -> Tensor:
        """Returns the index of every row, (P,), or -1 for the padding index, whose embedding gets no gradient."""
        arguments = embedding_arguments(node)
        indices = arguments.indices.reshape(-1)
        return torch.where(indices == arguments.padding_index, -1, indices)

    def gradients(self, node: Node, g: Tensor) -> Tensor:
        """Returns the output gradient g as rows, (P, width). Rows for the padding index are set to zero."""
        g = g.reshape(-1, g.shape[-1])
        return g * (self.inputs(node) >= 0)[:, None]

    def identity(self, node: Node) -> Hashable:
        """Returns a key with the location of the indices in memory and the padding index."""
        arguments = embedding_arguments(node)
        return memory_identity(arguments.indices), arguments.padding_index


class AddOperation(VectorOperation):
    """The sum x + operand, or x ± factor * operand.

    Args:
        factor: Name under which autograd saves the factor; None if there is no factor.
        sign: 1 for a sum, -1 for a difference.
    """

    kind = "add"

    def __init__(self, factor: str | None = None, sign: float = 1.0):
        self._factor = factor
        self._sign = sign

    def vectors(self, step: GraphStep, g: Tensor, layout: ExampleLayout, examples: int) -> Tensor:
        """Returns the output gradient g, summed over the positions of each example, times the sign and the factor."""
        factor = self._sign * (saved(step.node, self._factor) if self._factor else 1)
        return factor * layout.per_example(g, step.operand_shape, examples)


class ConvolutionBias(VectorOperation):
    """The bias of a convolution, with one element per channel. The output has shape (N, channels, ...)."""

    kind = "add"

    def vectors(self, step: GraphStep, g: Tensor, layout: ExampleLayout, examples: int) -> Tensor:
        """Returns the output gradient g, summed over the positions of each example."""
        return layout.per_example(g, (*step.operand_shape, *[1] * (g.dim() - 2)), examples)


class MultiplyOperation(VectorOperation):
    """The elementwise product x * operand.

    Args:
        other: Name under which autograd saves x.
    """

    kind = "multiply"

    def __init__(self, other: str):
        self._other = other

    def vectors(self, step: GraphStep, g: Tensor, layout: ExampleLayout, examples: int) -> Tensor:
        """Returns g * x for the output gradient g, summed over the positions of each example."""
        return layout.per_example(g * saved(step.node, self._other), step.operand_shape, examples)


class LayerNormScale(VectorOperation):
    """The multiplication by the scale (weight) in a layer norm."""

    kind = "layer_norm"

    def vectors(self, step: GraphStep, g: Tensor, layout: ExampleLayout, examples: int) -> Tensor:
        """Returns the output gradient g times the normalised input, summed over the positions of each example."""
        return layout.per_example(layer_norm_rows(step.node) * g, step.operand_shape, examples)


class LayerNormShift(AddOperation):
    """The addition of the shift (bias) in a layer norm."""

    kind = "layer_norm"


class GenericOperation(VectorOperation):
    """Any other operation; its backward function is called separately for each example.

    Args:
        kind: Name of the operation in bundles.
    """

    # During the backward pass, an operation returns no gradient with respect to inputs for which none was requested.
    immediate = False

    def __init__(self, kind: str):
        self.kind = kind

    def vectors(self, step: GraphStep, g: Tensor, layout: ExampleLayout, examples: int) -> Tensor:
        """Returns the gradient with respect to the operand for every example, with one backward call per example."""
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
"""Matrix operations by their name in autograd's graph and the index of the input that is the parameter."""
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
"""Vector operations by their name in autograd's graph and the index of the input that is the parameter."""
OPERATION_KINDS = {"Expand": "token", "Repeat": "token"}
"""Names of generic operations in bundles, if they differ from the lower-case name of the operation."""


_PRODUCTS = frozenset(key for key, operation in MATRIX_OPERATIONS.items() if operation.kind == "linear")


def equivalent_products(key: tuple[str, int]) -> frozenset[tuple[str, int]] | None:
    """Returns the operations that torch may use for a matrix product, depending on the memory layout of the rows.

    Args:
        key: Name of an operation, and index of the input that is the parameter.

    Returns:
        Names and indices of all such operations; None if `key` does not identify a matrix product.
    """
    return _PRODUCTS if key in _PRODUCTS else None


def matrix_operation_of(step: GraphStep) -> MatrixOperation:
    """Returns the matrix operation of a step, and checks that it is still supported, as in the first batch.

    Raises:
        KfacpackError: If the operation is now scaled, grouped or batched.
    """
    key = last_operation((step,))
    operation = MATRIX_OPERATIONS[key]
    if not operation.supports(step.node):
        problem = f"the operation {key[0]!r} is scaled, grouped or batched in this batch, but not in the first one"
        raise KfacpackError(f"{problem}; models with data-dependent control flow are not supported")
    return operation


def operation_of(step: GraphStep) -> MatrixOperation | VectorOperation:
    """Returns the operation of a step, which is a `GenericOperation` if no class is registered for the operation."""
    key = last_operation((step,))
    if (matrix_operation := MATRIX_OPERATIONS.get(key)) and matrix_operation.supports(step.node):
        return matrix_operation
    if key in VECTOR_OPERATIONS:
        return VECTOR_OPERATIONS[key]
    name = operation_name(step.node)
    return GenericOperation(OPERATION_KINDS.get(name, name.lower()))
