"""Look-ups in a table: a product with one-hot rows, whose A is diagonal."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kfacpack.estimation.operations.base import RowOperation, memory

if TYPE_CHECKING:
    from torch.autograd.graph import Node


class Embedding(RowOperation):
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
        return memory(saved._saved_indices), saved._saved_padding_idx


def _signed(index: int) -> int:
    """'No padding index' is -1, which some versions of torch show as an unsigned number."""
    return index - 2**64 if index >= 2**63 else index
