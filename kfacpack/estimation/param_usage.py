"""Where a parameter meets the examples, and how it stands in the matrix of the operation that it meets them in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfacpack.errors import KfacpackError
from kfacpack.estimation.autograd_graph import (
    GraphSteps,
    UsagePath,
    backward_to_parameter,
    last_operation,
    selected_outputs,
)
from kfacpack.estimation.matrix_operations import MatrixOperation, VectorOperation
from kfacpack.estimation.operations import equivalent_products, operation_of
from kfacpack.estimation.tracing import ExampleLayout, ModelTrace
from kfacpack.format.manifest import Piece

if TYPE_CHECKING:
    from torch.autograd.graph import Node


_VIEW_NODES = {"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0"}
"""What may lie between a product and the bias that is added to it."""

_EXCLUDE_HINT = "Leave it out: name the parameters you want with 'params'"


@dataclass(frozen=True)
class ParamUsage:
    """One place where a parameter meets the examples."""

    name: str
    parameter: Tensor
    steps: GraphSteps
    operation: MatrixOperation | VectorOperation
    layout: ExampleLayout

    @property
    def node(self) -> Node:
        return self.steps[-1].node

    def marked(self) -> tuple[Tensor, Tensor]:
        """Numbers for the operand, none of them zero, and what they become on the way back to the parameter.

        Small whole numbers, which every float type holds exactly: so the two tell which number goes where.
        """
        shape = self.steps[-1].operand_shape
        operand = _marks(1 << (prod(shape) - 1).bit_length())[: prod(shape)].reshape(shape).to(self.parameter)
        return operand, backward_to_parameter(self.steps, operand).to(self.parameter.dtype)


@lru_cache
def _marks(count: int) -> Tensor:
    return torch.randint(1, 128, (count,), generator=torch.Generator().manual_seed(0)).float()


def usages_of(trace: ModelTrace, name: str, parameter: Tensor) -> list[ParamUsage]:
    found = []
    for steps in trace.graph.paths(parameter, lambda steps: trace.layout(steps[-1].node) is not None):
        node = steps[-1].node
        layout = trace.layout(node)
        if layout is None and node in trace.gradients:
            layout = trace.layout_of_zero(trace.gradients[node])
        if layout is None:
            operation = steps[-1].node.name().removesuffix("Backward0")
            problem = (
                f"parameter {name!r} cannot be estimated: what {operation!r} makes of it is shared by all examples"
            )
            raise KfacpackError(f"{problem}, before they are told apart. {_EXCLUDE_HINT}")
        found.append(ParamUsage(name, parameter, steps, operation_of(steps[-1]), layout))
    return found


def unsupported_usage(name: str, entrances: list[ParamUsage]) -> str:
    places = ", ".join(entrance.node.name().removesuffix("Backward0") for entrance in entrances[:8])
    return f"parameter {name!r} is used {len(entrances)} times (by {places}) and cannot be factored. {_EXCLUDE_HINT}"


def usage_path_of(entrance: ParamUsage, ways: int, *, as_matrix: bool) -> UsagePath:
    """`as_matrix`: whether the parameter is the matrix of a product as it is, which may take another form next time."""
    ends = equivalent_products(last_operation(entrance.steps)) if as_matrix else None
    length = None if ends else len(entrance.steps)
    return UsagePath(
        ends or frozenset([last_operation(entrance.steps)]), length, selected_outputs(entrance.steps), ways
    )


def piece_of(entrance: ParamUsage, operation: MatrixOperation) -> Piece | None:
    """The parameter's place in the matrix (out, in) of its operation; None if it does not appear there as it is."""
    between = [step.node.name() for step in entrance.steps[:-1]]
    if between in ([], ["TBackward0"]):
        as_matrix = operation.operand_is_transposed == bool(between)
        return Piece(parameter=entrance.name, view="matrix" if as_matrix else "transposed")
    operand, pulled = entrance.marked()
    matrix = operand.reshape(operand.shape[-2:]) if operation.operand_is_transposed else operand.flatten(1)
    matrix = matrix.T if operation.operand_is_transposed else matrix
    found = pulled.reshape(len(pulled), -1) if pulled.dim() else pulled.reshape(1, 1)
    if torch.equal(found, matrix):
        return Piece(parameter=entrance.name)
    if torch.equal(found.T, matrix):
        return Piece(parameter=entrance.name, view="transposed")
    rows = _rows(found)
    if rows is not None and torch.equal(found[rows[0] : rows[1]], matrix):
        return Piece(parameter=entrance.name, rows=rows)
    return None


def bias_piece_of(bias: ParamUsage, column: int) -> Piece | None:
    operand, pulled = bias.marked()
    if torch.equal(pulled, operand):
        return Piece(parameter=bias.name, at=(0, column))
    rows = _rows(pulled[:, None])
    if rows is not None and torch.equal(pulled[rows[0] : rows[1]], operand):
        return Piece(parameter=bias.name, rows=rows, at=(0, column))
    return None


def _rows(pulled: Tensor) -> tuple[int, int] | None:
    """The rows of a parameter that an operand was cut from, if they follow each other."""
    live = (pulled != 0).any(1).nonzero().flatten().tolist()
    return (live[0], live[-1] + 1) if live and live[-1] - live[0] + 1 == len(live) else None


def is_bias_of(trace: ModelTrace, bias: ParamUsage, weight: ParamUsage, rows: int) -> bool:
    """Whether one entrance is where a bias is added to the rows that the other one makes."""
    step, operation = bias.steps[-1], weight.operation
    if step.operand_shape != (rows,) or not isinstance(operation, MatrixOperation):
        return False
    if bias.node is weight.node:
        return step.slot == operation.bias_slot
    # A product of something that does not lie in order in memory has its bias added by an operation of its own.
    if step.node.name() != "AddBackward0" or getattr(step.node, "_saved_alpha", 1) != 1:
        return False
    return operation.operand_is_transposed and trace.graph.source(step.node, 1 - step.slot, _VIEW_NODES) is weight.node
