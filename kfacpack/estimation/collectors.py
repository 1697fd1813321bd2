"""Collects the contribution of a batch to one block during the backward pass, and adds it to the sums of the block.

Rows have shape (P, features), where P is the total number of positions of the N examples. g is the gradient with
respect to the output of the operation that uses the parameter.
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
from kfacpack.estimation.operations import MatrixOperation, VectorOperation, matrix_operation_of
from kfacpack.estimation.tracing import by_example, drops_rows, kept_rows, means, sums

if TYPE_CHECKING:
    from kfacpack.curvature.blocks import BlockStructure
    from kfacpack.curvature.matrices.matrix import Matrix
    from kfacpack.estimation.block_plan import PlannedBlock


WIDE_SIDE, WIDE_BLOCKS = 8192, 8
"""By default, only `WIDE_BLOCKS` diagonal blocks of a Kronecker factor with more than `WIDE_SIDE` rows are computed."""


@dataclass(frozen=True)
class CollectorSettings:
    """Dtype, device and other settings of the sums of an estimate."""

    dtype: torch.dtype
    device: torch.device
    reduce: bool = False
    """Whether to use KFAC-reduce, which averages inputs and sums gradients over the positions of an example before it
    computes their products. KFAC-expand computes the products for every position."""
    blocks: int | None = None
    """Number of diagonal blocks that are computed per Kronecker factor. None means `WIDE_BLOCKS` for factors with more
    than `WIDE_SIDE` rows, and 1 for smaller factors."""

    def blocks_of(self, side: int) -> int:
        """Returns the number of diagonal blocks that are computed for a Kronecker factor with `side` rows."""
        return self.blocks or (WIDE_BLOCKS if side > WIDE_SIDE else 1)


@dataclass
class BackwardPass:
    """Description of one backward pass over a batch."""

    examples: int
    mask: Tensor | None
    """Mask with shape (examples, positions), False at padded positions; None if the batch has no mask."""
    first: bool
    """Whether this is the first pass over the batch. Inputs are collected only in the first pass."""
    collected: dict[int, Hashable] = field(default_factory=dict)
    """For each input group whose inputs have been collected from this batch, the key that identifies these inputs."""


class FactorTally:
    """A running sum, and the number of positions that were added to it.

    Args:
        total: Sum to which rows are added.
        device: Device of the tensor that counts the positions.
    """

    def __init__(self, total: RunningSum, device: torch.device):
        self.total = total
        self.positions = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, rows: Tensor, positions: int | Tensor = 0, count: Tensor | None = None) -> None:
        """Adds rows to the sum, and counts the positions that they represent.

        Args:
            rows: See `RunningSum.add`.
            positions: Number of positions that the rows represent. With KFAC-reduce, one row represents all positions
                of an example. By default, no positions are counted.
            count: See `RunningSum.add`.
        """
        self.total.add(rows, count)
        self.positions += positions if isinstance(positions, int) else positions.to(self.positions.device)

    def tensors(self) -> Iterator[Tensor]:
        """Yields the tensors of the sum, and the tensor that counts the positions. They may be modified in place."""
        yield from self.total.tensors()
        yield self.positions


class Collector(ABC):
    """Base class of objects that accumulate the sums of one block.

    Args:
        planned: The planned block.
    """

    immediate = True
    """Whether `collect` may be called during the backward pass."""

    def __init__(self, planned: PlannedBlock):
        self.planned = planned

    @abstractmethod
    def collect(self, steps: GraphSteps, g: Tensor, backward_pass: BackwardPass) -> None:
        """Adds the contribution of one backward pass to the sums.

        Args:
            steps: Path from the parameter to its operation.
            g: Gradient with respect to the output of the operation.
            backward_pass: The current backward pass.
        """

    @abstractmethod
    def tallies(self) -> Mapping[str, FactorTally]:
        """Returns the sum for each matrix of the block: `A` and `B`, or `G`.

        Several blocks may share the sum for `A`.
        """

    @abstractmethod
    def structure(self, matrices: Mapping[str, Matrix]) -> BlockStructure:
        """Returns the structure of the block, given its finished matrices: `A` and `B`, or `G`."""

    def block(self, matrices: Mapping[str, Matrix]) -> CurvatureBlock:
        """Returns the finished block, given its finished matrices: `A` and `B`, or `G`."""
        return CurvatureBlock(self.planned.name, self.planned.kind, self.planned.join, self.structure(matrices))


class KroneckerCollector(Collector):
    """Collects the Kronecker factors A and B for a parameter that is used as a matrix in a product.

    Args:
        planned: The planned block.
        settings: Dtype, device and other settings of the sums.
        shared: Sums for A by input group, shared by all collectors. If the sum for the block's group is missing, it is
            added to the dict.
    """

    def __init__(self, planned: PlannedBlock, settings: CollectorSettings, shared: dict[int, FactorTally]):
        super().__init__(planned)
        self._reduce = settings.reduce
        self._dtype = settings.dtype
        columns, options = planned.join.columns - planned.bias, (settings.dtype, settings.device)
        if planned.inputs not in shared:
            inputs: RunningSum = (
                CountSum(columns, *options)
                if planned.one_hot
                else GramSum(columns, *options, ones=planned.bias, blocks=settings.blocks_of(planned.join.columns))
            )
            shared[planned.inputs] = FactorTally(inputs, settings.device)
        self._A = shared[planned.inputs]
        rows = planned.join.rows
        self._B = FactorTally(GramSum(rows, *options, blocks=settings.blocks_of(rows)), settings.device)

    def collect(self, steps: GraphSteps, g: Tensor, backward_pass: BackwardPass) -> None:
        """Adds Σ g gᵀ to the sum for B and, in the first pass over a batch, Σ a aᵀ to the sum for A.

        Both sums are over positions. At each position, a is the input and g is the output gradient of the operation.
        With KFAC-reduce, both sums are over examples, where a is the mean input and g is the sum of the gradients.
        """
        node, layout, examples = steps[-1].node, self.planned.layout, backward_pass.examples
        operation = matrix_operation_of(steps[-1])
        gradients = operation.gradients(node, g)
        kept = kept_rows(backward_pass.mask, layout, gradients, examples)
        if backward_pass.first:
            identity, collected = operation.identity(node), backward_pass.collected
            if collected.setdefault(self.planned.inputs, identity) is identity:
                self._collect_inputs(operation.inputs(node), kept, examples)
            elif collected[self.planned.inputs] != identity:
                problem = "shared its inputs with another block in the first batch, but not in this batch"
                remedy = "models with data-dependent control flow are not supported"
                raise KfacpackError(f"block {self.planned.name!r} {problem}; {remedy}")
        if self._reduce:
            gradients = sums(gradients.to(self._dtype), layout, examples, kept)
        elif kept is not None:
            # The gradients of padded rows are zero; dropping them only saves computation.
            gradients = gradients[kept] if drops_rows(gradients.device) else gradients
        elif self.planned.few_rows and drops_rows(gradients.device):
            gradients = gradients[(gradients != 0).any(1)]
        self._B.add(gradients)

    def _collect_inputs(self, rows: Tensor, kept: Tensor | None, examples: int) -> None:
        if self._reduce:
            positions = len(rows) if kept is None else kept.sum()
            self._A.add(means(rows.to(self._dtype), self.planned.layout, examples, kept), positions)
        elif self.planned.one_hot:
            rows = rows if kept is None else torch.where(kept, rows, -1)
            self._A.add(rows, (rows >= 0).sum())
        elif kept is None or drops_rows(rows.device):
            rows = rows if kept is None else rows[kept]
            self._A.add(rows, len(rows))
        else:
            count = kept.sum()
            self._A.add(rows.masked_fill(~kept[:, None], 0), count, count)

    def tallies(self) -> Mapping[str, FactorTally]:
        """Returns the sums for the Kronecker factors `B` and `A`."""
        return {"B": self._B, "A": self._A}

    def structure(self, matrices: Mapping[str, Matrix]) -> BlockStructure:
        """Returns the structure of a block whose G is the Kronecker product B ⊗ A."""
        return Kronecker.of(matrices["B"], matrices["A"])


class WholeCollector(Collector):
    """Collects G, or only the diagonal of G, for a block without Kronecker factors, from per-example gradients.

    Args:
        planned: The planned block.
        settings: Dtype, device and other settings of the sums.
    """

    def __init__(self, planned: PlannedBlock, settings: CollectorSettings):
        super().__init__(planned)
        side, options = planned.join.rows * planned.join.columns, (settings.dtype, settings.device)
        total = SquareSum(side, *options) if planned.structure == "diagonal" else GramSum(side, *options)
        self._dtype = settings.dtype
        self._G = FactorTally(total, settings.device)

    def tallies(self) -> Mapping[str, FactorTally]:
        """Returns the sum for the matrix `G`, the only matrix of the block."""
        return {"G": self._G}

    def structure(self, matrices: Mapping[str, Matrix]) -> BlockStructure:
        """Returns the structure of a block that is stored as the matrix `G`."""
        return Whole(matrices["G"])


class VectorCollector(WholeCollector):
    """Collects G for a parameter that is not used as a matrix in a product, for example a bias or a scale.

    Args:
        planned: The planned block.
        settings: Dtype, device and other settings of the sums.
    """

    def __init__(self, planned: PlannedBlock, settings: CollectorSettings):
        super().__init__(planned, settings)
        assert isinstance(planned.operation, VectorOperation)
        self._operation = planned.operation
        # Operations between the parameter and the operand can be differentiated only after the backward pass. During
        # the pass, they return no gradients, because these were not requested.
        self.immediate = planned.operation.immediate and planned.is_operand

    def collect(self, steps: GraphSteps, g: Tensor, backward_pass: BackwardPass) -> None:
        """Adds v vᵀ for the gradient v of each example, or only the diagonal of v vᵀ if the block is diagonal."""
        if self._operation.immediate:
            g = g.to(self._dtype)  # positions are summed in this dtype
        vectors = self._operation.vectors(steps[-1], g, self.planned.layout, backward_pass.examples)
        if not self.planned.is_operand:
            shape = steps[-1].operand_shape
            vectors = torch.stack(
                [backward_to_parameter(steps, vector.reshape(shape)).reshape(-1) for vector in vectors]
            )
        if vectors.shape[1] != self._G.total.side:
            problem = (
                f"block {self.planned.name!r}: expected a gradient of size {self._G.total.side}, as in the first "
                f"batch, got size {vectors.shape[1]}"
            )
            raise KfacpackError(f"{problem}; models with data-dependent control flow are not supported")
        self._G.add(vectors)


class DiagonalRowCollector(WholeCollector):
    """Collects the diagonal of G for a parameter that is used as a matrix in a product.

    Each example contributes the elementwise square of its gradient Σ g aᵀ. The sum is over the positions of the
    example; a is the input and g is the output gradient of the operation.
    """

    def collect(self, steps: GraphSteps, g: Tensor, backward_pass: BackwardPass) -> None:
        """Adds the elementwise square of the gradient of each example."""
        node, layout, examples = steps[-1].node, self.planned.layout, backward_pass.examples
        operation = matrix_operation_of(steps[-1])
        gradients = by_example(operation.gradients(node, g).to(self._dtype), layout, examples)
        inputs = by_example(operation.inputs(node), layout, examples)
        for example_gradients, rows in zip(gradients, inputs, strict=True):
            self._G.add(self._example_gradient(example_gradients, rows).reshape(1, -1))

    def _example_gradient(self, gradients: Tensor, rows: Tensor) -> Tensor:
        """Returns the gradient Σ g aᵀ of one example, (out, in), summed over its R positions.

        If the block has a bias, the gradient Σ g of the bias is appended as the last column.

        Args:
            gradients: The output gradients g at all positions, (R, out).
            rows: The inputs a, (R, in), or their indices, (R,), if they are one-hot.
        """
        columns = self.planned.join.columns
        if self.planned.one_hot:
            return gradients.new_zeros(gradients.shape[1], columns).index_add_(1, rows.clamp(min=0), gradients.T)
        matrix = gradients.T @ rows.to(self._dtype)
        return torch.cat([matrix, gradients.sum(0)[:, None]], dim=1) if self.planned.bias else matrix


def collector_for(planned: PlannedBlock, settings: CollectorSettings, shared: dict[int, FactorTally]) -> Collector:
    """Returns the collector for a planned block.

    Args:
        planned: The planned block.
        settings: Dtype, device and other settings of the sums.
        shared: Sums for A by input group, shared by all collectors.
    """
    if planned.structure == "kronecker":
        return KroneckerCollector(planned, settings, shared)
    if isinstance(planned.operation, MatrixOperation):
        return DiagonalRowCollector(planned, settings)
    return VectorCollector(planned, settings)
