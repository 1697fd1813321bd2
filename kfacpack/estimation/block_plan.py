"""What an estimate will consist of: every parameter's block, decided before any of the work is done.

The rule. A parameter that enters the computation once, as the matrix of a product, a convolution or a look-up, gets
Kronecker factors, together with its bias. Any other that enters once gets its whole G: dense up to 4096 numbers, only
the diagonal above that. One that enters more than once, or whose effect is shared by the examples, is refused.
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
from kfacpack.estimation.matrix_operations import MatrixOperation, VectorOperation
from kfacpack.estimation.operations import GenericOperation
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
"""How many numbers a parameter may have to get its whole G, if it is not the matrix of a product."""

BlockStructure = Literal["kronecker", "dense", "diagonal"]


@dataclass(frozen=True)
class PlannedBlock:
    name: str
    operation: MatrixOperation | VectorOperation
    kind: str
    structure: BlockStructure
    join: Join
    parameter: str
    """The one that leads to the operation; a bias is found beside it."""
    way: UsagePath
    layout: ExampleLayout
    as_it_is: bool
    """Whether the gradient at the operand is the gradient at the parameter, or has to be pulled back to it."""
    inputs: int = 0
    """Blocks of the same number have the same inputs, and share their A."""
    few_rows: bool = False
    """Whether most rows of the gradient are zero, as where f looks at one position only."""

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(piece.parameter for piece in self.join.pieces))

    @property
    def one_hot(self) -> bool:
        return isinstance(self.operation, MatrixOperation) and self.operation.one_hot

    @property
    def bias(self) -> bool:
        return len(self.join.pieces) > 1


@dataclass(frozen=True)
class BlockPlan:
    blocks: tuple[PlannedBlock, ...]
    unused: tuple[str, ...]
    """Wanted, but f does not depend on them."""
    width: int
    """C, the width of f."""


def require_used(planned: BlockPlan, params: Iterable[str] | str | None) -> None:
    """Who names a parameter expects it to be covered."""
    covered = [name for block in planned.blocks for name in block.parameters]
    for pattern in [params] if isinstance(params, str) else params or ():
        missed = [name for name in planned.unused if fnmatchcase(name, pattern)]
        if missed and not any(fnmatchcase(name, pattern) for name in covered):
            problem = f"f does not depend on {missed[0]!r}, which 'params' asks for as {pattern!r}"
            raise KfacpackError(f"{problem}. Leave it out, or choose another f")


def plan_blocks(trace: ModelTrace, wanted: Mapping[str, Tensor], options: EstimateOptions) -> BlockPlan:
    used = {name: parameter for name, parameter in wanted.items() if trace.graph.uses(parameter)}
    entrances = {name: usages_of(trace, name, parameter) for name, parameter in used.items()}
    blocks, joined = _row_blocks(trace, entrances)
    for name, found in entrances.items():
        whole = (0, len(used[name]) if used[name].dim() else 1)
        covered = sorted(p.rows or whole for block in blocks for p in block.join.pieces if p.parameter == name)
        if any(stop > start for (_, stop), (start, _) in pairwise(covered)):
            raise KfacpackError(unsupported_usage(name, found))
    for name, found in entrances.items():
        left = [entrance for entrance in found if (name, entrance.steps) not in joined]
        if len(left) > 1 or (left and len(found) > 1):
            raise KfacpackError(unsupported_usage(name, found))
        if left:
            blocks.append(_vector_block(trace, left[0]))
    order = {name: number for number, name in enumerate(wanted)}
    blocks.sort(key=lambda block: (order[block.parameter], block.join.pieces[0].rows or (0, 0)))
    if options.structure == "diagonal":
        blocks = [replace(block, structure="diagonal") for block in blocks]
    if options.sharing == "reduce":
        # The mean of one-hot rows is not one-hot, and A of a whole vocabulary would not be diagonal any more.
        blocks = [replace(block, structure="diagonal") if block.one_hot else block for block in blocks]
    for block in blocks:
        side = block.join.rows if block.one_hot else min(block.join.rows, block.join.columns)
        if block.structure == "kronecker" and options.diagonal_blocks > side:
            problem = f"block {block.name!r} has a factor of side {side}, which has no {options.diagonal_blocks} blocks"
            raise KfacpackError(
                f"compress {options.compress!r}: {problem}. Use a smaller K, or leave it out of 'params'"
            )
    if not blocks:
        raise KfacpackError("f does not depend on any of the chosen parameters")
    unused = tuple(name for name in wanted if name not in used)
    return BlockPlan(tuple(blocks), unused, trace.f.shape[1])


def _row_blocks(
    trace: ModelTrace, entrances: Mapping[str, list[ParamUsage]]
) -> tuple[list[PlannedBlock], set[tuple[str, GraphSteps]]]:
    """The blocks with Kronecker factors, and the entrances that they account for."""
    biases = [entrance for found in entrances.values() for entrance in found if len(entrance.parameter.shape) == 1]
    blocks: list[PlannedBlock] = []
    joined: set[tuple[str, GraphSteps]] = set()
    groups: dict[Hashable, int] = {}
    for name, found in entrances.items():
        for entrance in found:
            operation = entrance.operation
            if not isinstance(operation, MatrixOperation) or (piece := piece_of(entrance, operation)) is None:
                continue
            rows, columns = piece.matrix_shape(tuple(entrance.parameter.shape))
            bias = next((each for each in biases if is_bias_of(trace, each, entrance, rows)), None)
            pieces = [piece]
            if bias is not None and (beside := bias_piece_of(bias, columns)) is not None:
                pieces.append(beside)
                joined.add((bias.name, bias.steps))
            joined.add((name, entrance.steps))
            gradients = tuple(operation.gradients(entrance.node, g) for g in trace.gradients[entrance.node])
            as_made = gradients[0] is trace.gradients[entrance.node][0]
            key = (operation.identity(entrance.node), columns, len(pieces) > 1)
            start, stop = piece.rows or (0, 0)
            blocks.append(
                PlannedBlock(
                    name=f"{name}[{start}:{stop}]" if piece.rows else name,
                    operation=operation,
                    kind="matmul" if operation.kind == "linear" and piece.view == "transposed" else operation.kind,
                    structure="kronecker",
                    join=Join(rows=rows, columns=columns + len(pieces) - 1, pieces=tuple(pieces)),
                    parameter=name,
                    way=usage_path_of(entrance, len(found), as_matrix=True),
                    layout=entrance.layout if as_made else _layout_of_rows(trace, name, gradients),
                    as_it_is=True,
                    inputs=groups.setdefault(key, len(groups)),
                    few_rows=_mostly_zero(gradients[0], trace.examples if len(gradients) > 1 else 1),
                )
            )
    return blocks, joined


def _layout_of_rows(trace: ModelTrace, name: str, gradients: tuple[Tensor, ...]) -> ExampleLayout:
    layout = trace.layout_of(gradients) or trace.layout_of_zero(gradients)
    if layout is None:
        raise KfacpackError(f"parameter {name!r} cannot be estimated: its rows cannot be told apart by example")
    return layout


def _mostly_zero(gradients: Tensor, examples: int) -> bool:
    """Whether f does not depend on most of the positions; `gradients` are those of one in so many `examples`."""
    return bool((gradients != 0).any(1).sum() * 2 * examples < len(gradients))


def _vector_block(trace: ModelTrace, entrance: ParamUsage) -> PlannedBlock:
    operation, number = entrance.operation, entrance.parameter.numel()
    g = trace.gradients[entrance.node][0]
    shared = entrance.layout.fits(g, entrance.steps[-1].operand_shape)
    if isinstance(operation, MatrixOperation) or not shared:
        operation = GenericOperation(operation.kind)
    operand, pulled = entrance.marked()
    return PlannedBlock(
        name=entrance.name,
        operation=operation,
        kind=operation.kind,
        structure="dense" if number <= DENSE_LIMIT else "diagonal",
        join=Join(rows=number, columns=1, pieces=(Piece(parameter=entrance.name, view="column"),)),
        parameter=entrance.name,
        way=usage_path_of(entrance, 1, as_matrix=False),
        layout=entrance.layout,
        as_it_is=torch.equal(pulled.reshape(-1), operand.reshape(-1)),
    )
