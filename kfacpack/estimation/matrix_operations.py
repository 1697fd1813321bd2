"""What an operation knows about a parameter it uses.

Shapes: P rows are the positions of all N examples of a batch, in the order the operation has them. An operation's
operand is what arrives of the parameter, after a transpose or a cast; g is the gradient at the operation's output.

`linear`, `x @ W`, `W @ x`, `addmm`, and `einsum` where it comes down to one of them.

Convolutions of any number of dimensions: a product with every patch the kernel covers.

Look-ups in a table: a product with one-hot rows, whose A is diagonal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from kfacpack.estimation.autograd_graph import GraphStep
    from kfacpack.estimation.tracing import ExampleLayout


class MatrixOperation(ABC):
    """Each row of the output is a row of the input times one matrix: a block of Kronecker structure."""

    kind: str
    bias_slot: int | None = None
    """The input that is a bias, added to each row of the output."""
    operand_is_transposed: bool = False
    """Whether the operand is (in, out) rather than (out, in)."""
    one_hot: bool = False
    """Whether `inputs` are (P,) indices, each standing for a row with a single one; negative ones are no row."""

    @abstractmethod
    def takes(self, node: Node) -> bool:
        """Whether this very call is of the simple kind: no groups, no scaling."""

    @abstractmethod
    def inputs(self, node: Node) -> Tensor:
        """a, (P, in)."""

    @abstractmethod
    def gradients(self, node: Node, g: Tensor) -> Tensor:
        """g, (P, out)."""

    @abstractmethod
    def identity(self, node: Node) -> Hashable:
        """Two operations of one graph have the same inputs exactly when these are equal."""


class VectorOperation(ABC):
    """The gradient of each example at the operand is at hand, or cheap to get: a dense or diagonal block."""

    kind: str
    immediate: bool = True
    """Whether `vectors` may be asked for while autograd is at work."""

    @abstractmethod
    def vectors(self, step: GraphStep, g: Tensor, layout: ExampleLayout, examples: int) -> Tensor:
        """(N, numbers of the operand)."""


def memory_identity(tensor: Tensor) -> Hashable:
    """Where a tensor lies. While autograd keeps both, two tensors at the same place are the same."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


class MatmulRight(MatrixOperation):
    """rows @ operand, the operand (in, out): what `linear` and `x @ W` become."""

    kind = "linear"
    operand_is_transposed = True

    def __init__(self, saved: str, bias_slot: int | None = None):
        self._saved = saved
        self.bias_slot = bias_slot

    def takes(self, node: Node) -> bool:
        return _unscaled(node) and _is_single(node)

    def inputs(self, node: Node) -> Tensor:
        return _matrix(getattr(node, self._saved))

    def gradients(self, node: Node, g: Tensor) -> Tensor:
        return _matrix(g)

    def identity(self, node: Node) -> Hashable:
        return memory_identity(self.inputs(node))


class MatmulLeft(MatmulRight):
    """operand @ columns, the operand (out, in): the same, lying on its side."""

    operand_is_transposed = False

    def inputs(self, node: Node) -> Tensor:
        return super().inputs(node).T

    def gradients(self, node: Node, g: Tensor) -> Tensor:
        return super().gradients(node, g).T


class LinearOperation(MatrixOperation):
    """`linear` where it is an operation of its own, with the operand (out, in); some devices have it."""

    kind = "linear"
    bias_slot = 2

    def takes(self, node: Node) -> bool:
        return True

    def inputs(self, node: Node) -> Tensor:
        saved: Any = node
        found: Tensor = saved._saved_input
        return found.reshape(-1, found.shape[-1])

    def gradients(self, node: Node, g: Tensor) -> Tensor:
        return g.reshape(-1, g.shape[-1])

    def identity(self, node: Node) -> Hashable:
        saved: Any = node
        return memory_identity(saved._saved_input)


def _unscaled(node: Node) -> bool:
    return bool(getattr(node, "_saved_alpha", 1) == 1 and getattr(node, "_saved_beta", 1) == 1)


def _is_single(node: Node) -> bool:
    """One product, not one for each member of a batch."""
    shape = node._input_metadata[0].shape
    return len(shape) == 2 or shape[0] == 1


def _matrix(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor[0]


class ConvolutionOperation(MatrixOperation):
    """The operand is (out, in / groups, *kernel); a row is a patch in the order of the kernel's numbers."""

    kind = "convolution"
    bias_slot = 2

    def takes(self, node: Node) -> bool:
        saved: Any = node
        return not saved._saved_transposed and saved._saved_groups == 1

    def inputs(self, node: Node) -> Tensor:
        saved: Any = node
        kernel = saved._saved_weight.shape[2:]
        return patches(
            saved._saved_input, tuple(kernel), saved._saved_stride, saved._saved_padding, saved._saved_dilation
        )

    def gradients(self, node: Node, g: Tensor) -> Tensor:
        return g.movedim(1, -1).reshape(-1, g.shape[1])

    def identity(self, node: Node) -> Hashable:
        saved: Any = node
        kernel = tuple(saved._saved_weight.shape[2:])
        return (
            memory_identity(saved._saved_input),
            kernel,
            saved._saved_stride,
            saved._saved_padding,
            saved._saved_dilation,
        )


def patches(
    x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...]
) -> Tensor:
    """(N, in, *sizes) -> (N · positions, in · kernel numbers), positions in row-major order."""
    x = pad(x, [width for side in reversed(padding) for width in (side, side)])
    for dim, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(dim, gap * (size - 1) + 1, step)[..., ::gap]
    spatial = len(kernel)
    return x.movedim(1, 1 + spatial).reshape(-1, x.shape[1] * prod(kernel))


class EmbeddingOperation(MatrixOperation):
    """The operand is (vocabulary, width)."""

    kind = "embedding"
    operand_is_transposed = True
    one_hot = True

    def takes(self, node: Node) -> bool:
        saved: Any = node
        return not saved._saved_scale_grad_by_freq

    def inputs(self, node: Node) -> Tensor:
        """(P,), the index of each row; -1 where the table gets no gradient because the index means padding."""
        saved: Any = node
        indices: Tensor = saved._saved_indices.reshape(-1)
        return torch.where(indices == _signed(saved._saved_padding_idx), -1, indices)

    def gradients(self, node: Node, g: Tensor) -> Tensor:
        g = g.reshape(-1, g.shape[-1])
        return g * (self.inputs(node) >= 0)[:, None]

    def identity(self, node: Node) -> Hashable:
        saved: Any = node
        return memory_identity(saved._saved_indices), saved._saved_padding_idx


def _signed(index: int) -> int:
    """'No padding index' is -1, which some versions of torch show as an unsigned number."""
    return index - 2**64 if index >= 2**63 else index
