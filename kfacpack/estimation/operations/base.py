"""What an operation knows about a parameter it uses.

Shapes: P rows are the positions of all N examples of a batch, in the order the operation has them. An operation's
operand is what arrives of the parameter, after a transpose or a cast; g is the gradient at the operation's output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from kfacpack.estimation.graph import Step
    from kfacpack.estimation.layout import Layout


class RowOperation(ABC):
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
    def vectors(self, step: Step, g: Tensor, layout: Layout, examples: int) -> Tensor:
        """(N, numbers of the operand)."""


def memory(tensor: Tensor) -> Hashable:
    """Where a tensor lies. While autograd keeps both, two tensors at the same place are the same."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
