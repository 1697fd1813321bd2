"""`linear`, `x @ W`, `W @ x`, `addmm`, and `einsum` where it comes down to one of them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kfacpack.estimation.operations.base import RowOperation, memory

if TYPE_CHECKING:
    from torch.autograd.graph import Node


class Product(RowOperation):
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
        return memory(self.inputs(node))


class ProductFromLeft(Product):
    """operand @ columns, the operand (out, in): the same, lying on its side."""

    operand_is_transposed = False

    def inputs(self, node: Node) -> Tensor:
        return super().inputs(node).T

    def gradients(self, node: Node, g: Tensor) -> Tensor:
        return super().gradients(node, g).T


class Linear(RowOperation):
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
        return memory(saved._saved_input)


def _unscaled(node: Node) -> bool:
    return bool(getattr(node, "_saved_alpha", 1) == 1 and getattr(node, "_saved_beta", 1) == 1)


def _is_single(node: Node) -> bool:
    """One product, not one for each member of a batch."""
    shape = node._input_metadata[0].shape
    return len(shape) == 2 or shape[0] == 1


def _matrix(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor[0]
