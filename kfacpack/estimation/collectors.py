"""One block's share of a batch: taken while autograd passes by its operation, and added to the block's sums.

Shapes: rows are (P, features), P the positions of the N examples; g is the gradient at the operation's output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfacpack.curvature.blocks import CurvatureBlock, Kronecker, Whole
from kfacpack.errors import KfacpackError
from kfacpack.estimation.autograd_graph import GraphSteps, backward_to_parameter
from kfacpack.estimation.factor_sums import CountSum, GramSum, RunningSum, SquareSum
from kfacpack.estimation.matrix_operations import MatrixOperation, VectorOperation
from kfacpack.estimation.operations import matrix_operation_of
from kfacpack.estimation.tracing import by_example, kept_rows, means, sums

if TYPE_CHECKING:
    from kfacpack.curvature.blocks import BlockForm
    from kfacpack.curvature.matrices.matrix import Matrix
    from kfacpack.estimation.block_plan import PlannedBlock


@dataclass(frozen=True)
class CollectorSettings:
    """How sums are kept."""

    dtype: torch.dtype
    device: torch.device
    reduce: bool = False
    """KFAC-reduce: positions are put together before products are taken, not after."""
    blocks: int = 1
    """How many diagonal blocks of each Kronecker factor are kept."""


@dataclass
class BackwardPass:
    """One backward pass over one batch."""

    examples: int
    mask: Tensor | None
    """(N, R), false where an example has only padding."""
    first: bool
    """Whether it is the batch's first pass, in which inputs are taken as well."""
    taken: dict[int, Hashable] = field(default_factory=dict)
    """Which inputs have been taken already, by the number of their group."""


class FactorTally:
    """A sum, and how many positions went into it."""

    def __init__(self, total: RunningSum):
        self.total = total
        self.positions = torch.zeros((), dtype=torch.int64)

    def add(self, rows: Tensor, positions: int) -> None:
        self.total.add(rows)
        self.positions += positions

    def tensors(self) -> Iterator[Tensor]:
        yield from self.total.tensors()
        yield self.positions


class Collector(ABC):
    """Collects for one block."""

    immediate = True
    """Whether `collect` may be called while autograd is at work."""

    def __init__(self, planned: PlannedBlock):
        self.planned = planned

    @abstractmethod
    def collect(self, steps: GraphSteps, g: Tensor, passing: BackwardPass) -> None:
        """Take what is needed from the operation where `steps` end."""

    @abstractmethod
    def tallies(self) -> Mapping[str, FactorTally]:
        """By role; a tally may be shared with other blocks."""

    @abstractmethod
    def structure(self, matrices: Mapping[str, Matrix]) -> BlockForm:
        """From the finished matrix of each role."""

    def block(self, matrices: Mapping[str, Matrix]) -> CurvatureBlock:
        return CurvatureBlock(self.planned.name, self.planned.kind, self.planned.join, self.structure(matrices))


class KroneckerCollector(Collector):
    def __init__(self, planned: PlannedBlock, settings: CollectorSettings, shared: dict[int, FactorTally]):
        super().__init__(planned)
        self._reduce = settings.reduce
        self._dtype = settings.dtype
        columns, common = planned.join.columns - planned.bias, (settings.dtype, settings.device)
        if planned.inputs not in shared:
            inputs: RunningSum = (
                CountSum(columns, *common)
                if planned.one_hot
                else GramSum(columns, *common, ones=planned.bias, blocks=settings.blocks)
            )
            shared[planned.inputs] = FactorTally(inputs)
        self._A = shared[planned.inputs]
        self._B = FactorTally(GramSum(planned.join.rows, *common, blocks=settings.blocks))

    def collect(self, steps: GraphSteps, g: Tensor, passing: BackwardPass) -> None:
        node, layout, examples = steps[-1].node, self.planned.layout, passing.examples
        operation = matrix_operation_of(steps[-1])
        gradients = operation.gradients(node, g)
        kept = kept_rows(passing.mask, layout, gradients, examples)
        if passing.first:
            identity = operation.identity(node)
            if passing.taken.setdefault(self.planned.inputs, identity) is identity:
                self._take_inputs(operation.inputs(node), kept, examples)
            elif passing.taken[self.planned.inputs] != identity:
                raise KfacpackError(
                    f"block {self.planned.name!r}: its inputs were another block's too, but are no more"
                )
        if self._reduce:
            gradients = sums(gradients.to(self._dtype), layout, examples, kept)
        elif kept is not None:
            gradients = gradients[kept]
        elif self.planned.few_rows:
            gradients = gradients[(gradients != 0).any(1)]
        self._B.add(gradients, 0)

    def _take_inputs(self, rows: Tensor, kept: Tensor | None, examples: int) -> None:
        if self._reduce:
            count = len(rows) if kept is None else int(kept.sum())
            self._A.add(means(rows.to(self._dtype), self.planned.layout, examples, kept), count)
            return
        rows = rows if kept is None else rows[kept]
        self._A.add(rows, int((rows >= 0).sum()) if self.planned.one_hot else len(rows))

    def tallies(self) -> Mapping[str, FactorTally]:
        return {"B": self._B, "A": self._A}

    def structure(self, matrices: Mapping[str, Matrix]) -> BlockForm:
        return Kronecker.of(matrices["B"], matrices["A"])


class WholeCollector(Collector):
    """All of a block's G, or its diagonal: from the gradient of each example at the parameter."""

    def __init__(self, planned: PlannedBlock, settings: CollectorSettings):
        super().__init__(planned)
        side, common = planned.join.rows * planned.join.columns, (settings.dtype, settings.device)
        self._G = FactorTally(SquareSum(side, *common) if planned.structure == "diagonal" else GramSum(side, *common))

    def tallies(self) -> Mapping[str, FactorTally]:
        return {"G": self._G}

    def structure(self, matrices: Mapping[str, Matrix]) -> BlockForm:
        return Whole(matrices["G"])


class VectorCollector(WholeCollector):
    def __init__(self, planned: PlannedBlock, settings: CollectorSettings):
        super().__init__(planned, settings)
        assert isinstance(planned.operation, VectorOperation)
        self._operation = planned.operation
        self._dtype = settings.dtype
        # What lies between parameter and operation passes nothing back either, while autograd is at work.
        self.immediate = planned.operation.immediate and planned.as_it_is

    def collect(self, steps: GraphSteps, g: Tensor, passing: BackwardPass) -> None:
        if self._operation.immediate:
            g = g.to(self._dtype)  # positions are summed up in this
        vectors = self._operation.vectors(steps[-1], g, self.planned.layout, passing.examples)
        if not self.planned.as_it_is:
            shape = steps[-1].operand_shape
            vectors = torch.stack(
                [backward_to_parameter(steps, vector.reshape(shape)).reshape(-1) for vector in vectors]
            )
        if vectors.shape[1] != self._G.total.side:
            problem = (
                f"block {self.planned.name!r} has {self._G.total.side} numbers, and {vectors.shape[1]} in this batch"
            )
            raise KfacpackError(f"{problem}; a model whose steps depend on its input cannot be estimated")
        self._G.add(vectors, 0)


class DiagonalRowCollector(WholeCollector):
    """The diagonal for the matrix of a product: the squares of each example's gradient, Σ over positions of g aᵀ."""

    def __init__(self, planned: PlannedBlock, settings: CollectorSettings):
        super().__init__(planned, settings)
        self._dtype = settings.dtype

    def collect(self, steps: GraphSteps, g: Tensor, passing: BackwardPass) -> None:
        node, layout, examples = steps[-1].node, self.planned.layout, passing.examples
        operation = matrix_operation_of(steps[-1])
        gradients = by_example(operation.gradients(node, g).to(self._dtype), layout, examples)
        inputs = by_example(operation.inputs(node), layout, examples)
        for each, rows in zip(gradients, inputs, strict=True):
            self._G.add(self._of_example(each, rows).reshape(1, -1), 0)

    def _of_example(self, gradients: Tensor, rows: Tensor) -> Tensor:
        """(R, out) and (R, in) or (R,) -> (out, in), a bias as last column."""
        columns = self.planned.join.columns
        if self.planned.one_hot:
            return gradients.new_zeros(gradients.shape[1], columns).index_add_(1, rows.clamp(min=0), gradients.T)
        matrix = gradients.T @ rows.to(self._dtype)
        return torch.cat([matrix, gradients.sum(0)[:, None]], dim=1) if self.planned.bias else matrix


def collector(planned: PlannedBlock, settings: CollectorSettings, shared: dict[int, FactorTally]) -> Collector:
    if planned.structure == "kronecker":
        return KroneckerCollector(planned, settings, shared)
    if isinstance(planned.operation, MatrixOperation):
        return DiagonalRowCollector(planned, settings)
    return VectorCollector(planned, settings)
