"""Finds the operations that combine each parameter with the examples, and assigns every parameter to a block.

The matrix of a product, a convolution or an embedding lookup gets Kronecker factors, and its bias belongs to the same
block. Several operations may use different rows of one parameter, as in a fused projection; each of them gets its own
block. Any other parameter gets a single matrix G, which is dense for up to 2048 elements and diagonal for more. A
parameter is rejected if it is used several times in any other way, or in a computation whose result all examples share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kfacpack._torch import VIEW_OPERATIONS, operation_name, product_scales
from kfacpack.errors import KfacpackError, abbreviate
from kfacpack.estimation.autograd_graph import (
    GraphSteps,
    UsagePath,
    backward_to_parameter,
    last_operation,
    selected_outputs,
)
from kfacpack.estimation.operations import (
    GenericOperation,
    MatrixOperation,
    VectorOperation,
    equivalent_products,
    operation_of,
)
from kfacpack.estimation.tracing import ExampleLayout, ModelTrace
from kfacpack.format.manifest import Join, Piece

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch.autograd.graph import Node

    from kfacpack.estimation.options import EstimateOptions


_EXCLUDE_HINT = "Exclude the parameter by listing only the other parameters in 'params'"


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
        """Returns two tensors of marks: one with the shape of the operand, and one with the shape of the parameter.

        In the second tensor, each element of the parameter has the same mark as the element of the operand that was
        computed from it, or zero if there is no such element. The marks are small positive integers, which every float
        dtype represents exactly.
        """
        shape = self.steps[-1].operand_shape
        operand = _marks(1 << (prod(shape) - 1).bit_length())[: prod(shape)].reshape(shape).to(self.parameter)
        return operand, backward_to_parameter(self.steps, operand).to(self.parameter.dtype)


@lru_cache
def _marks(count: int) -> Tensor:
    return torch.randint(1, 128, (count,), generator=torch.Generator().manual_seed(0)).float()


def usages_of(trace: ModelTrace, name: str, parameter: Tensor) -> list[ParamUsage]:
    """Returns all operations that combine a parameter with the examples.

    Args:
        trace: The trace of the model.
        name: Name of the parameter.
        parameter: The parameter.

    Raises:
        KfacpackError: If the parameter is used in a computation whose result all examples share, or in an operation
            whose result consists of several tensors.
    """
    usages = []
    for steps in trace.graph.paths(parameter, lambda steps: trace.layout(steps[-1].node) is not None):
        node = steps[-1].node
        layout = trace.layout(node)
        if layout is None and node in trace.gradients:
            layout = trace.layout_of_zero(trace.gradients[node])
        if layout is None:
            reason = "is shared by all examples or consists of several tensors"
            problem = f"the result of {operation_name(node)!r}, which uses the parameter, {reason}"
            raise KfacpackError(f"the curvature of parameter {name!r} cannot be estimated: {problem}. {_EXCLUDE_HINT}")
        usages.append(ParamUsage(name, parameter, steps, operation_of(steps[-1]), layout))
    return usages


def unsupported_usage(name: str, usages: list[ParamUsage]) -> str:
    """Returns the error message for a parameter that is used several times in an unsupported way."""
    operations = abbreviate((operation_name(usage.node) for usage in usages), 8)
    return f"parameter {name!r} is used {len(usages)} times (by {operations}), which is not supported. {_EXCLUDE_HINT}"


def usage_path_of(usage: ParamUsage, count: int, *, as_matrix: bool) -> UsagePath:
    """Returns a description that locates a usage in the graph of another batch.

    Args:
        usage: The usage.
        count: Number of usages of the parameter.
        as_matrix: Whether the parameter is used as a matrix. In this case, the description covers all operations that
            torch may use for a matrix product, because torch may use a different operation for another batch.
    """
    key = last_operation(usage.steps)
    ends = equivalent_products(key) if as_matrix else None
    length = None if ends else len(usage.steps)
    return UsagePath(ends or frozenset([key]), length, selected_outputs(usage.steps), count)


def piece_of(usage: ParamUsage, operation: MatrixOperation) -> Piece | None:
    """Returns which rows of a parameter form the matrix (out, in) of an operation, and whether they are transposed.

    Args:
        usage: The usage of the parameter.
        operation: The operation that uses the parameter.

    Returns:
        A description of the rows; None if the matrix is not the parameter, its transpose or a range of its rows.
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
    """Returns which elements of a parameter are added as a bias, and their position in the matrix of the block.

    Args:
        bias: Usage of the parameter as a bias.
        column: Column of the block's matrix that contains the bias.

    Returns:
        The elements and their position; None if the bias is not the parameter or a range of its elements.
    """
    operand, marks = bias.marked()
    if torch.equal(marks, operand):
        return Piece(parameter=bias.name, at=(0, column))
    rows = _nonzero_rows(marks[:, None])
    if rows is not None and torch.equal(marks[rows[0] : rows[1]], operand):
        return Piece(parameter=bias.name, rows=rows, at=(0, column))
    return None


def _nonzero_rows(marks: Tensor) -> tuple[int, int] | None:
    """Returns the start and stop of the range of nonzero rows, or None if they do not form a range."""
    nonzero = (marks != 0).any(1).nonzero().flatten().tolist()
    return (nonzero[0], nonzero[-1] + 1) if nonzero and nonzero[-1] - nonzero[0] + 1 == len(nonzero) else None


def is_bias_of(trace: ModelTrace, bias: ParamUsage, weight: ParamUsage, rows: int) -> bool:
    """Returns whether a bias is added to the output rows of the operation that uses a weight.

    Args:
        trace: The trace that contains both usages.
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


DENSE_LIMIT = 2048
"""A parameter without Kronecker factors gets a dense G if it has at most this number of elements."""

StructureName = Literal["kronecker", "dense", "diagonal"]


@dataclass(frozen=True)
class PlannedBlock:
    """A planned block: its parameters, the operation that uses them, and the location of the operation in a graph."""

    name: str
    operation: MatrixOperation | VectorOperation
    kind: str
    """Name of the operation in the bundle."""
    structure: StructureName
    join: Join
    parameter: str
    """Name of the parameter whose path leads to the operation. The bias of a block has no path of its own."""
    path: UsagePath
    layout: ExampleLayout
    is_operand: bool
    """Whether the operation receives the parameter's elements in their original order. If so, the gradient with respect
    to the operand is the gradient of the parameter."""
    inputs: int = 0
    """Index of the input group. Blocks in the same group have the same inputs and share the factor A."""
    few_rows: bool = False
    """Whether most rows of the output gradient are zero, for example because f depends on only one position."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters, without duplicates."""
        return tuple(dict.fromkeys(piece.parameter for piece in self.join.pieces))

    @property
    def one_hot(self) -> bool:
        """Whether the inputs of the operation are one-hot rows, stored as indices, as in an embedding lookup."""
        return isinstance(self.operation, MatrixOperation) and self.operation.one_hot

    @property
    def bias(self) -> bool:
        """Whether the last column of the block's matrix is a bias."""
        return len(self.join.pieces) > 1


@dataclass(frozen=True)
class BlockPlan:
    """All blocks of an estimate."""

    blocks: tuple[PlannedBlock, ...]
    unused: tuple[str, ...]
    """Selected parameters that f does not depend on."""
    width: int
    """C, the number of components of f."""


def require_used(plan: BlockPlan, params: Iterable[str] | str | None) -> None:
    """Checks that every pattern in `params` matches a parameter that f depends on.

    Raises:
        KfacpackError: If a pattern matches only parameters that f does not depend on.
    """
    covered = [name for block in plan.blocks for name in block.parameters]
    for pattern in [params] if isinstance(params, str) else params or ():
        unused = [name for name in plan.unused if fnmatchcase(name, pattern)]
        if unused and not any(fnmatchcase(name, pattern) for name in covered):
            problem = f"f does not depend on {unused[0]!r}, which is selected by {pattern!r} in 'params'"
            raise KfacpackError(f"{problem}. Remove {pattern!r} from 'params', or choose another output f")


def plan_blocks(trace: ModelTrace, parameters: Mapping[str, Tensor], options: EstimateOptions) -> BlockPlan:
    """Assigns every parameter that f depends on to a block.

    Args:
        trace: Trace of the first batch.
        parameters: Selected parameters, by name, in state-dict order.
        options: Options of the estimate.

    Returns:
        The plan, with the blocks in the order of `parameters`.

    Raises:
        KfacpackError: If a parameter is used in a way that is not supported, f depends on none of the parameters, or a
            factor has fewer rows than the requested number of diagonal blocks.
    """
    used = {name: parameter for name, parameter in parameters.items() if trace.graph.uses(parameter)}
    usages = {name: usages_of(trace, name, parameter) for name, parameter in used.items()}
    blocks, joined = _kronecker_blocks(trace, usages)
    for name, of_parameter in usages.items():
        all_rows = (0, len(used[name]) if used[name].dim() else 1)
        ranges = sorted(p.rows or all_rows for block in blocks for p in block.join.pieces if p.parameter == name)
        if any(stop > start for (_, stop), (start, _) in pairwise(ranges)):
            raise KfacpackError(unsupported_usage(name, of_parameter))
    for name, of_parameter in usages.items():
        remaining = [usage for usage in of_parameter if (name, usage.steps) not in joined]
        if len(remaining) > 1 or (remaining and len(of_parameter) > 1):
            raise KfacpackError(unsupported_usage(name, of_parameter))
        if remaining:
            blocks.append(_vector_block(trace, remaining[0]))
    order = {name: position for position, name in enumerate(parameters)}
    blocks.sort(key=lambda block: (order[block.parameter], block.join.pieces[0].rows or (0, 0)))
    if options.structure == "diagonal":
        blocks = [replace(block, structure="diagonal") for block in blocks]
    if options.sharing == "reduce":
        # The mean of one-hot rows is not one-hot, so the factor A of a vocabulary would not be diagonal.
        blocks = [replace(block, structure="diagonal") if block.one_hot else block for block in blocks]
    for block in blocks:
        _check_diagonal_blocks(block, options)
    if not blocks:
        problem = "f does not depend on any of the selected parameters"
        raise KfacpackError(f"{problem}; select other parameters with 'params'")
    unused = tuple(name for name in parameters if name not in used)
    return BlockPlan(tuple(blocks), unused, trace.f.shape[1])


def _check_diagonal_blocks(block: PlannedBlock, options: EstimateOptions) -> None:
    """Checks that no factor of a block has fewer rows than the requested number of diagonal blocks."""
    side = block.join.rows if block.one_hot else min(block.join.rows, block.join.columns)
    if block.structure == "kronecker" and options.diagonal_blocks > side:
        problem = (
            f"block {block.name!r} has a factor of side length {side}, which cannot be divided into "
            f"{options.diagonal_blocks} diagonal blocks"
        )
        remedy = "Use a smaller K in 'block:K', or exclude the block's parameters with 'params'"
        raise KfacpackError(f"compress {options.compress!r}: {problem}. {remedy}")


def _kronecker_blocks(
    trace: ModelTrace, usages: Mapping[str, list[ParamUsage]]
) -> tuple[list[PlannedBlock], set[tuple[str, GraphSteps]]]:
    """Returns the blocks with Kronecker factors, and the parameter name and path of every usage in these blocks."""
    biases = [usage for of_parameter in usages.values() for usage in of_parameter if usage.parameter.dim() == 1]
    blocks: list[PlannedBlock] = []
    joined: set[tuple[str, GraphSteps]] = set()
    groups: dict[Hashable, int] = {}
    for name, of_parameter in usages.items():
        for usage in of_parameter:
            operation = usage.operation
            if not isinstance(operation, MatrixOperation) or (piece := piece_of(usage, operation)) is None:
                continue
            rows, columns = piece.matrix_shape(tuple(usage.parameter.shape))
            bias = next((bias for bias in biases if is_bias_of(trace, bias, usage, rows)), None)
            pieces = [piece]
            if bias is not None and (bias_piece := bias_piece_of(bias, columns)) is not None:
                pieces.append(bias_piece)
                joined.add((bias.name, bias.steps))
            joined.add((name, usage.steps))
            gradients = tuple(operation.gradients(usage.node, g) for g in trace.gradients[usage.node])
            unchanged = gradients[0] is trace.gradients[usage.node][0]
            key = (operation.identity(usage.node), columns, len(pieces) > 1)
            start, stop = piece.rows or (0, 0)
            blocks.append(
                PlannedBlock(
                    name=f"{name}[{start}:{stop}]" if piece.rows else name,
                    operation=operation,
                    kind="matmul" if operation.kind == "linear" and piece.view == "transposed" else operation.kind,
                    structure="kronecker",
                    join=Join(rows=rows, columns=columns + len(pieces) - 1, pieces=tuple(pieces)),
                    parameter=name,
                    path=usage_path_of(usage, len(of_parameter), as_matrix=True),
                    layout=usage.layout if unchanged else _layout_of_rows(trace, name, gradients),
                    is_operand=True,
                    inputs=groups.setdefault(key, len(groups)),
                    few_rows=_is_mostly_zero(gradients[0], trace.examples if len(gradients) > 1 else 1),
                )
            )
    return blocks, joined


def _layout_of_rows(trace: ModelTrace, name: str, gradients: tuple[Tensor, ...]) -> ExampleLayout:
    layout = trace.layout_of(gradients) or trace.layout_of_zero(gradients)
    if layout is None:
        problem = "the examples cannot be told apart in the output gradient of the operation that uses the parameter"
        raise KfacpackError(f"the curvature of parameter {name!r} cannot be estimated: {problem}. {_EXCLUDE_HINT}")
    return layout


def _is_mostly_zero(gradients: Tensor, factor: int) -> bool:
    """Returns whether most gradient rows of an example are zero.

    Args:
        gradients: Gradient rows of all examples, (P, out).
        factor: Number by which the count of nonzero rows is multiplied. This is the number of examples if the backward
            pass started from a single example, which leaves the rows of all other examples zero. Otherwise, it is 1.
    """
    return bool((gradients != 0).any(1).sum() * 2 * factor < len(gradients))


def _vector_block(trace: ModelTrace, usage: ParamUsage) -> PlannedBlock:
    """Returns the block of a parameter without Kronecker factors, whose G is dense or diagonal."""
    operation, size = usage.operation, usage.parameter.numel()
    g = trace.gradients[usage.node][0]
    shared = usage.layout.fits(g, usage.steps[-1].operand_shape)
    if isinstance(operation, MatrixOperation) or not shared:
        operation = GenericOperation(operation.kind)
    operand, marks = usage.marked()
    return PlannedBlock(
        name=usage.name,
        operation=operation,
        kind=operation.kind,
        structure="dense" if size <= DENSE_LIMIT else "diagonal",
        join=Join(rows=size, columns=1, pieces=(Piece(parameter=usage.name, view="column"),)),
        parameter=usage.name,
        path=usage_path_of(usage, 1, as_matrix=False),
        layout=usage.layout,
        is_operand=torch.equal(marks.reshape(-1), operand.reshape(-1)),
    )
