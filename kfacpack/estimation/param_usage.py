"""The operations that combine a parameter with the examples, and its position in their matrices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfacpack._torch import VIEW_OPERATIONS, operation_name, product_scales
from kfacpack.errors import KfacpackError
from kfacpack.estimation.autograd_graph import (
    GraphSteps,
    UsagePath,
    backward_to_parameter,
    last_operation,
    selected_outputs,
)
from kfacpack.estimation.operations import MatrixOperation, VectorOperation, equivalent_products, operation_of
from kfacpack.estimation.tracing import ExampleLayout, ModelTrace
from kfacpack.format.manifest import Piece

if TYPE_CHECKING:
    from torch.autograd.graph import Node


_EXCLUDE_HINT = "Leave it out: list the other parameters in 'params'"


@dataclass(frozen=True)
class ParamUsage:
    """An operation that combines a parameter with the examples."""

    name: str
    parameter: Tensor
    steps: GraphSteps
    """Path from the parameter to the operation."""
    operation: MatrixOperation | VectorOperation
    layout: ExampleLayout
    """Layout of the examples in the operation's output."""

    @property
    def node(self) -> Node:
        """The operation's node in the graph."""
        return self.steps[-1].node

    def marked(self) -> tuple[Tensor, Tensor]:
        """Returns nonzero marks for the elements of the operand, and the same marks at the parameter.

        The marks are small integers, which every float dtype represents exactly. The two tensors show which element of
        the operand comes from which element of the parameter.
        """
        shape = self.steps[-1].operand_shape
        operand = _marks(1 << (prod(shape) - 1).bit_length())[: prod(shape)].reshape(shape).to(self.parameter)
        return operand, backward_to_parameter(self.steps, operand).to(self.parameter.dtype)


@lru_cache
def _marks(count: int) -> Tensor:
    return torch.randint(1, 128, (count,), generator=torch.Generator().manual_seed(0)).float()


def usages_of(trace: ModelTrace, name: str, parameter: Tensor) -> list[ParamUsage]:
    """Returns all operations that combine a parameter with the examples.

    Raises:
        KfacpackError: If the parameter is used in a computation that all examples share.
    """
    usages = []
    for steps in trace.graph.paths(parameter, lambda steps: trace.layout(steps[-1].node) is not None):
        node = steps[-1].node
        layout = trace.layout(node)
        if layout is None and node in trace.gradients:
            layout = trace.layout_of_zero(trace.gradients[node])
        if layout is None:
            problem = f"the result of {operation_name(node)!r}, which uses it, is shared by all examples"
            raise KfacpackError(f"parameter {name!r} cannot be estimated: {problem}. {_EXCLUDE_HINT}")
        usages.append(ParamUsage(name, parameter, steps, operation_of(steps[-1]), layout))
    return usages


def unsupported_usage(name: str, usages: list[ParamUsage]) -> str:
    """Returns the error message for a parameter whose several uses cannot be factored."""
    operations = ", ".join(operation_name(usage.node) for usage in usages[:8])
    return f"parameter {name!r} is used {len(usages)} times (by {operations}) and cannot be factored. {_EXCLUDE_HINT}"


def usage_path_of(usage: ParamUsage, count: int, *, as_matrix: bool) -> UsagePath:
    """Returns a description that locates a usage in the graph of another batch.

    Args:
        usage: The usage.
        count: Number of usages of the parameter.
        as_matrix: Whether the parameter is the matrix of a product, which may be executed by another operation.
    """
    key = last_operation(usage.steps)
    ends = equivalent_products(key) if as_matrix else None
    length = None if ends else len(usage.steps)
    return UsagePath(ends or frozenset([key]), length, selected_outputs(usage.steps), count)


def piece_of(usage: ParamUsage, operation: MatrixOperation) -> Piece | None:
    """Returns the position of a parameter in the matrix (out, in) of its operation.

    Returns:
        The position; None if the matrix does not consist of elements of the parameter.
    """
    between = [operation_name(step.node) for step in usage.steps[:-1]]
    if between in ([], ["T"]):
        as_matrix = operation.operand_is_transposed == bool(between)
        return Piece(parameter=usage.name, view="matrix" if as_matrix else "transposed")
    operand, marks = usage.marked()
    matrix = operand.reshape(operand.shape[-2:]) if operation.operand_is_transposed else operand.flatten(1)
    matrix = matrix.T if operation.operand_is_transposed else matrix
    marks = marks.reshape(len(marks), -1) if marks.dim() else marks.reshape(1, 1)
    if torch.equal(marks, matrix):
        return Piece(parameter=usage.name)
    if torch.equal(marks.T, matrix):
        return Piece(parameter=usage.name, view="transposed")
    rows = _nonzero_rows(marks)
    if rows is not None and torch.equal(marks[rows[0] : rows[1]], matrix):
        return Piece(parameter=usage.name, rows=rows)
    return None


def bias_piece_of(bias: ParamUsage, column: int) -> Piece | None:
    """Returns the position of a bias in `column` of the joined matrix; None if the column has other elements."""
    operand, marks = bias.marked()
    if torch.equal(marks, operand):
        return Piece(parameter=bias.name, at=(0, column))
    rows = _nonzero_rows(marks[:, None])
    if rows is not None and torch.equal(marks[rows[0] : rows[1]], operand):
        return Piece(parameter=bias.name, rows=rows, at=(0, column))
    return None


def _nonzero_rows(marks: Tensor) -> tuple[int, int] | None:
    """Returns the range of nonzero rows; None if it has gaps."""
    nonzero = (marks != 0).any(1).nonzero().flatten().tolist()
    return (nonzero[0], nonzero[-1] + 1) if nonzero and nonzero[-1] - nonzero[0] + 1 == len(nonzero) else None


def is_bias_of(trace: ModelTrace, bias: ParamUsage, weight: ParamUsage, rows: int) -> bool:
    """Returns whether a usage adds a bias to the output rows of another usage.

    Args:
        trace: The trace with both usages.
        bias: Usage of the bias.
        weight: Usage of the weight.
        rows: Number of rows of the weight.
    """
    step, operation = bias.steps[-1], weight.operation
    if step.operand_shape != (rows,) or not isinstance(operation, MatrixOperation):
        return False
    if bias.node is weight.node:
        return step.slot == operation.bias_slot
    # The bias of a product with non-contiguous rows is added by a separate operation.
    if operation_name(step.node) != "Add" or product_scales(step.node)[0] != 1:
        return False
    return (
        operation.operand_is_transposed and trace.graph.source(step.node, 1 - step.slot, VIEW_OPERATIONS) is weight.node
    )
