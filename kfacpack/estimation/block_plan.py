"""Assigns every parameter to a block, before anything is computed.

A parameter that is used once, as the matrix of a product, a convolution or an embedding lookup, gets Kronecker factors,
together with its bias. Any other parameter that is used once gets its whole G: dense up to 4096 elements, only the
diagonal above that. Parameters that are used more than once, or whose effect is shared by the examples, are rejected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kfacpack.errors import KfacpackError
from kfacpack.estimation.autograd_graph import GraphSteps, UsagePath
from kfacpack.estimation.operations import GenericOperation, MatrixOperation, VectorOperation
from kfacpack.estimation.param_usage import (
    ParamUsage,
    bias_piece_of,
    is_bias_of,
    piece_of,
    unsupported_usage,
    usage_path_of,
    usages_of,
)
from kfacpack.estimation.tracing import ExampleLayout, ModelTrace
from kfacpack.format.manifest import Join, Piece

if TYPE_CHECKING:
    from collections.abc import Hashable

    from kfacpack.estimation.options import EstimateOptions


DENSE_LIMIT = 4096
"""Largest number of elements of a parameter with a dense G, if it is not the matrix of a product."""

StructureName = Literal["kronecker", "dense", "diagonal"]


@dataclass(frozen=True)
class PlannedBlock:
    """One block: its parameters, their operation, and how to find it in the graph of every batch."""

    name: str
    operation: MatrixOperation | VectorOperation
    kind: str
    """Name of the operation in the bundle."""
    structure: StructureName
    join: Join
    parameter: str
    """The parameter whose path leads to the operation; a bias is located relative to it."""
    path: UsagePath
    layout: ExampleLayout
    is_operand: bool
    """Whether the operand is the parameter itself, so that both have the same gradient."""
    inputs: int = 0
    """Input group: blocks of one group have the same inputs and share A."""
    few_rows: bool = False
    """Whether most rows of the gradient are zero, for example because f depends on a single position."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters, each once."""
        return tuple(dict.fromkeys(piece.parameter for piece in self.join.pieces))

    @property
    def one_hot(self) -> bool:
        """Whether inputs are indices of one-hot rows."""
        return isinstance(self.operation, MatrixOperation) and self.operation.one_hot

    @property
    def bias(self) -> bool:
        """Whether the matrix includes a bias column."""
        return len(self.join.pieces) > 1


@dataclass(frozen=True)
class BlockPlan:
    """All blocks of an estimate."""

    blocks: tuple[PlannedBlock, ...]
    unused: tuple[str, ...]
    """Selected parameters that f does not depend on."""
    width: int
    """C, the width of f."""


def require_used(plan: BlockPlan, params: Iterable[str] | str | None) -> None:
    """Checks that every pattern in `params` names a parameter that f depends on.

    Raises:
        KfacpackError: If a pattern matches only parameters that f does not depend on.
    """
    covered = [name for block in plan.blocks for name in block.parameters]
    for pattern in [params] if isinstance(params, str) else params or ():
        unused = [name for name in plan.unused if fnmatchcase(name, pattern)]
        if unused and not any(fnmatchcase(name, pattern) for name in covered):
            problem = f"f does not depend on {unused[0]!r}, which {pattern!r} in 'params' selects"
            raise KfacpackError(f"{problem}. Exclude it, or choose another f")


def plan_blocks(trace: ModelTrace, parameters: Mapping[str, Tensor], options: EstimateOptions) -> BlockPlan:
    """Assigns every parameter to a block.

    Args:
        trace: Trace of the first batch.
        parameters: Selected parameters, by name, in state-dict order.
        options: Options of the estimate.

    Returns:
        The plan.

    Raises:
        KfacpackError: If a parameter cannot be estimated.
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
        # The mean of one-hot rows is not one-hot, and A of a whole vocabulary would not be diagonal.
        blocks = [replace(block, structure="diagonal") if block.one_hot else block for block in blocks]
    for block in blocks:
        _check_diagonal_blocks(block, options)
    if not blocks:
        raise KfacpackError("f does not depend on any of the chosen parameters")
    unused = tuple(name for name in parameters if name not in used)
    return BlockPlan(tuple(blocks), unused, trace.f.shape[1])


def _check_diagonal_blocks(block: PlannedBlock, options: EstimateOptions) -> None:
    """Checks that every factor of a block has as many rows as diagonal blocks are requested."""
    side = block.join.rows if block.one_hot else min(block.join.rows, block.join.columns)
    if block.structure == "kronecker" and options.diagonal_blocks > side:
        problem = f"block {block.name!r} has a factor of side {side}, too small for {options.diagonal_blocks} blocks"
        raise KfacpackError(f"compress {options.compress!r}: {problem}. Use a smaller K, or exclude it from 'params'")


def _kronecker_blocks(
    trace: ModelTrace, usages: Mapping[str, list[ParamUsage]]
) -> tuple[list[PlannedBlock], set[tuple[str, GraphSteps]]]:
    """Returns the blocks with Kronecker factors, and the usages that they cover."""
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
        raise KfacpackError(f"parameter {name!r} cannot be estimated: its rows cannot be assigned to examples")
    return layout


def _is_mostly_zero(gradients: Tensor, examples: int) -> bool:
    """Returns whether f is independent of most positions, from the gradients of one of `examples` examples."""
    return bool((gradients != 0).any(1).sum() * 2 * examples < len(gradients))


def _vector_block(trace: ModelTrace, usage: ParamUsage) -> PlannedBlock:
    """Returns the block with a dense or diagonal G for one usage."""
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
