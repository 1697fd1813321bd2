"""Accumulates, batch by batch, the sums from which the blocks of an estimate are computed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfacpack.errors import KfacpackError
from kfacpack.estimation.autograd_graph import AutogradGraph, GraphSteps, backward_to_nodes
from kfacpack.estimation.collectors import BackwardPass, Collector, CollectorSettings, FactorTally, collector_for
from kfacpack.estimation.tracing import rounding_unit, same_output
from kfacpack.format.manifest import OutputScale
from kfacpack.format.schema import LAYOUTS
from kfacpack.models.functional import (
    Forward,
    ModelInput,
    batch_size_of,
    call_model,
    padding_mask,
    rows_per_example,
)

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from kfacpack.compression.codecs import CodecChain
    from kfacpack.curvature.blocks import CurvatureBlock
    from kfacpack.estimation.block_plan import BlockPlan
    from kfacpack.estimation.options import Probes


@dataclass(frozen=True)
class BlockForecast:
    """Forecast of the structure and size of one block."""

    name: str
    parameters: tuple[str, ...]
    operation: str
    structure: str
    rows: int
    columns: int
    bytes: int
    """Size in bytes of the block's matrices in the bundle, excluding matrices shared with an earlier block."""


@dataclass(frozen=True)
class BatchShape:
    """Numbers of examples, rows of f and backward passes for a batch, and its padding mask."""

    examples: int
    rows: int
    passes: int
    mask: Tensor | None
    """Mask with shape (examples, positions), False at padded positions; None if the batch has no mask."""


@dataclass(frozen=True)
class InputGradients:
    """The input of a computation, and a function that stores the gradients with respect to this input."""

    tensor: Tensor
    """The input, a leaf tensor that requires a gradient."""
    store: Callable[[int, Tensor], None]
    """Function that is called after each backward pass, with the index of the pass and the gradient."""


NodeCollectors = dict["Node", list[tuple[Collector, GraphSteps]]]
"""For each operation, the collectors that read the inputs and the output gradient of the operation. Each collector is
paired with the path from its parameter to the operation."""


class CurvatureAccumulator:
    """Adds batches to the sums for all blocks in a plan.

    Args:
        forward: Function that computes f from a batch.
        plan: The blocks to estimate.
        parameters: Selected parameters, by name.
        probes: Directions in which f is differentiated.
        settings: Dtype, device and other settings of the sums.
        reference: Index of an example, and the expected first row of f for this example, (C,). If a batch begins with
            this example, the first row of f for the batch is compared with the expected row. This checks that the
            examples in a batch do not influence each other.
        split_inputs: Whether all inputs have one entry per example along their first dimension. If so, the number of
            examples in the inputs is compared with the number of rows of f.

    Raises:
        KfacpackError: If more orthogonal probes are requested than f has components.
    """

    def __init__(
        self,
        forward: Forward,
        plan: BlockPlan,
        parameters: Mapping[str, Tensor],
        probes: Probes,
        settings: CollectorSettings,
        reference: tuple[int, Tensor] | None = None,
        *,
        split_inputs: bool = False,
    ) -> None:
        probes.check(plan.width)
        self._forward = forward
        self.plan = plan
        self._parameters = parameters
        self._probes = probes
        self._settings = settings
        self._reference = reference
        self._split_inputs = split_inputs
        shared: dict[int, FactorTally] = {}
        self._collectors = [collector_for(planned, settings, shared) for planned in plan.blocks]
        self._examples, self._rows = torch.zeros(2, dtype=torch.int64).unbind()
        device = next((parameter.device for parameter in parameters.values()), settings.device)
        self._output_sum = torch.zeros(plan.width, dtype=settings.dtype, device=device)
        self._output_squares = torch.zeros((), dtype=settings.dtype, device=device)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first parameter in the plan."""
        return self._parameters[self.plan.blocks[0].parameter].dtype

    @property
    def examples(self) -> int:
        """Number of examples added so far."""
        return int(self._examples)

    def add_batch(self, batch: ModelInput, numbers: int | Sequence[int]) -> None:
        """Adds a batch to the sums, with one forward pass for the batch and one backward pass per probe.

        Args:
            batch: The batch, on the device of the model.
            numbers: Indices of the examples, or the index of the first example if the indices are consecutive. The
                indices determine the probes.

        Raises:
            KfacpackError: If f has an unexpected shape, the output for an example depends on the other examples in
                the batch, or a parameter is used differently than in the first batch.
        """
        self.add_evaluated(call_model(self._forward, batch), batch, numbers)

    def add_evaluated(
        self, f: Tensor, batch: ModelInput, numbers: int | Sequence[int], inputs: InputGradients | None = None
    ) -> BatchShape:
        """Adds a batch to the sums, given the output f for the batch, with one backward pass per probe.

        Args:
            f: The output of the model with its autograd graph, (P, C).
            batch: Batch from which f was computed.
            numbers: See `add_batch`.
            inputs: A tensor from which f was computed, and a function that stores the gradients with respect to this
                tensor. By default, no gradients are stored.

        Returns:
            The numbers of examples, rows of f and backward passes for the batch, and its padding mask.

        Raises:
            KfacpackError: In the same cases as `add_batch`.
        """
        rows, width = f.shape
        counts = rows_per_example(batch) or [1] * rows
        examples = len(counts)
        if width != self.plan.width:
            problem = f"f has width {width}, but had width {self.plan.width} in the first batch"
            raise KfacpackError(f"{problem}; all batches must have outputs of the same width")
        if isinstance(numbers, int):
            size = batch_size_of(batch) if self._split_inputs else None
            numbers = range(numbers, numbers + (examples if size is None else size))
        if len(numbers) != examples or sum(counts) != rows:
            problem = f"f has shape {list(f.shape)} for a batch of size {len(numbers)}"
            expected = "one row per example" if max(counts) == 1 else f"{sum(counts)} rows, one per answer position"
            raise KfacpackError(f"{problem}; expected {expected}")
        if self._reference is not None and numbers[0] == self._reference[0]:
            self._require_independence(f[0].detach(), self._reference[1])
        outputs = f.detach().to(self._output_sum.dtype)
        self._output_sum += outputs.sum(0)
        self._output_squares += outputs.square().sum()
        row_numbers = [(number, row) for number, count in zip(numbers, counts, strict=True) for row in range(count)]
        passes = self._probes.passes(width, max(counts))
        seeds = self._probes.draw(row_numbers, f.detach())
        shape = BatchShape(examples, rows, passes, padding_mask(batch))
        self.add_output(f, seeds, shape, inputs)
        return shape

    def add_output(
        self, output: Tensor, seeds: Iterable[Tensor], shape: BatchShape, inputs: InputGradients | None = None
    ) -> None:
        """Adds a batch to the sums, with one backward pass from `output` for each of the seeds.

        Args:
            output: f or the output of a model segment, with its autograd graph.
            seeds: Gradients with respect to the output, one for each of the `shape.passes` backward passes.
            shape: Numbers of examples, rows and passes for the batch.
            inputs: The inputs of a segment, and a function that stores the gradients with respect to them. By default,
                no gradients are stored.

        Raises:
            KfacpackError: If a parameter is used differently than in the first batch.
        """
        graph = AutogradGraph(output)
        collectors = self._collectors_by_node(graph)
        leaf = None if inputs is None else graph.leaf(inputs.tensor)
        nodes = {*collectors} if leaf is None else {*collectors, leaf}
        sinks = graph.sinks(nodes)
        # Collectors that run after the backward pass call backward functions of the graph, which must be retained.
        retain = any(
            not collector.immediate
            for node, at_node in collectors.items()
            if node not in sinks
            for collector, _ in at_node
        )
        for index, seed in enumerate(seeds):
            backward_pass = BackwardPass(shape.examples, shape.mask, first=index == 0)
            at_inputs = self._backward(
                output, seed, collectors, sinks, backward_pass, leaf, retain=retain or index + 1 < shape.passes
            )
            if inputs is not None:
                inputs.store(index, torch.zeros_like(inputs.tensor) if at_inputs is None else at_inputs)
        self._examples += shape.examples
        self._rows += shape.rows

    def _require_independence(self, output: Tensor, expected: Tensor) -> None:
        if not same_output(output, expected, rounding_unit(self._parameters)):
            problem = (
                "the output for an example depends on the other examples of its batch; examples must be independent"
            )
            raise KfacpackError(f"{problem} (a softmax or a normalisation over the batch makes them dependent)")

    def _collectors_by_node(self, graph: AutogradGraph) -> NodeCollectors:
        collectors: NodeCollectors = defaultdict(list)
        for collector in self._collectors:
            steps = graph.find_path(self._parameters[collector.planned.parameter], collector.planned.path)
            if steps is None:
                problem = "is used differently than in the first batch; models with data-dependent control flow"
                raise KfacpackError(f"parameter {collector.planned.parameter!r} {problem} are not supported")
            collectors[steps[-1].node].append((collector, steps))
        return collectors

    def _backward(
        self,
        f: Tensor,
        probe: Tensor,
        collectors: NodeCollectors,
        sinks: set[Node],
        backward_pass: BackwardPass,
        leaf: Node | None,
        *,
        retain: bool,
    ) -> Tensor | None:
        """Runs one backward pass and calls the collectors.

        Returns:
            The gradient with respect to `leaf`; None if there is no leaf, or if f does not depend on it.
        """
        at_leaf: Tensor | None = None
        deferred: list[tuple[Collector, GraphSteps, Tensor]] = []

        def visit(node: Node, g: Tensor, running: bool) -> None:
            nonlocal at_leaf
            if node is leaf:
                at_leaf = g
                return
            for collector, steps in collectors[node]:
                if collector.immediate or not running:
                    collector.collect(steps, g, backward_pass)
                else:
                    deferred.append((collector, steps, g))

        if sinks:  # empty if there are no blocks and no gradient with respect to inputs is needed
            backward_to_nodes(f, probe.to(f), collectors, sinks, visit, retain=retain)
        with torch.no_grad():
            for collector, steps, g in deferred:
                collector.collect(steps, g, backward_pass)
        return at_leaf

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the name and the tensor of every sum. The tensors may be modified in place."""
        yield "examples", self._examples
        yield "rows", self._rows
        yield "output_sum", self._output_sum
        yield "output_squares", self._output_squares
        for name, tally in self._tallies().items():
            for index, tensor in enumerate(tally.tensors()):
                yield f"{name}/{index}", tensor

    def _tallies(self) -> dict[str, FactorTally]:
        """Returns all sums by name. A sum that several blocks share is named after the first of these blocks."""
        tallies: dict[int, tuple[str, FactorTally]] = {}
        for collector in self._collectors:
            for role, tally in collector.tallies().items():
                tallies.setdefault(id(tally), (f"{collector.planned.name}/{role}", tally))
        return dict(tallies.values())

    @property
    def covered(self) -> set[str]:
        """Names of the parameters in the plan."""
        return {parameter for block in self.plan.blocks for parameter in block.parameters}

    def forecasts(self, chain: CodecChain) -> tuple[BlockForecast, ...]:
        """Returns a forecast of the structure and size of every block.

        Args:
            chain: Codecs that compress the result.
        """
        forecasts: list[BlockForecast] = []
        counted: set[int] = set()
        for collector in self._collectors:
            new = {id(tally): tally for tally in collector.tallies().values() if id(tally) not in counted}
            counted |= new.keys()
            size = sum(chain.shape_of(tally.total.shape()).nbytes for tally in new.values())
            block = collector.planned
            forecasts.append(
                BlockForecast(
                    block.name, block.parameters, block.kind, block.structure, block.join.rows, block.join.columns, size
                )
            )
        return tuple(forecasts)

    def peak_bytes(self, activations: int, chain: CodecChain) -> int:
        """Returns the expected peak memory in bytes, excluding the weights.

        This is the size of the sums, plus either the activations of a batch or the memory needed to compute the
        finished matrices from the sums, whichever is larger. A sum is freed only after its matrix has been packed.
        Compression needs several unpacked copies of a matrix, and keeps the original matrices until all of them are
        compressed. If the sums are on a GPU, the finished matrices are not counted, because they are on the CPU.

        Args:
            activations: Number of bytes that autograd saves for the backward pass of a batch.
            chain: Codecs that compress the result.
        """
        if self._settings.device.type != "cpu":
            return self.nbytes + activations  # matrices are packed on the CPU
        finished = [tally.total.shape() for tally in self._tallies().values()]
        results = max((matrix.nbytes for matrix in finished), default=0)
        if chain.steps:
            item = self._settings.dtype.itemsize
            unpacked = max((item * LAYOUTS[matrix.form].full(matrix.side) for matrix in finished), default=0)
            results += 4 * unpacked + sum(block.bytes for block in self.forecasts(chain))
        return self.nbytes + max(activations, results)

    def sum_flops(self, passes: int) -> int:
        """Returns the number of floating-point operations for adding one position to all sums.

        Args:
            passes: Number of backward passes. Only the first pass adds to the sums for A.
        """
        return sum(
            2 * (1 if role.endswith("/A") else passes) * sum(tensor.numel() for tensor in tally.tensors())
            for role, tally in self._tallies().items()
        )

    @property
    def nbytes(self) -> int:
        """Total size of all sums in bytes."""
        return sum(tensor.nbytes for _, tensor in self.tensors())

    @property
    def output_scale(self) -> OutputScale:
        """Mean squared norm and variance of f over the rows added so far."""
        count = int(self._rows)
        square = float(self._output_squares) / count
        mean = self._output_sum.cpu().double() / count
        variance = (square - float(mean.square().sum())) * count / max(count - 1, 1)
        # Rounded to six digits. Later digits depend on the order of summation, and thus on the number of processes.
        return OutputScale(mean_square=float(f"{square:.6g}"), variance=float(f"{max(variance, 0.0):.6g}"))

    def finish(self) -> list[CurvatureBlock]:
        """Divides the sums by the numbers of rows, positions and probes, and returns the finished blocks.

        The sums cannot be used afterwards.

        Raises:
            KfacpackError: If there are no examples, or a sum contains NaN or Inf.
        """
        if not self.examples:
            raise KfacpackError("no examples were added; an estimate needs at least one example")
        matrices = {}
        for collector in self._collectors:
            tallies = collector.tallies()
            positions = int(tallies["A"].positions) if "A" in tallies else None
            for role, tally in tallies.items():
                if id(tally) in matrices:
                    continue
                # Inputs are collected once per batch, regardless of the number of probes.
                divisor = self._rows * self._probes.divisor
                if role == "A":
                    divisor = self._examples if self._settings.reduce else tally.positions.clamp(min=1)
                if not tally.total.is_finite():
                    problem = f"block {collector.planned.name!r}: the sum for {role} contains NaN or Inf"
                    remedy = "Use float32 or bfloat16 for the model"
                    raise KfacpackError(f"{problem}: activations or gradients overflowed. {remedy}")
                matrices[id(tally)] = tally.total.finish(float(divisor), examples=int(self._rows), positions=positions)
        return [
            collector.block({role: matrices[id(tally)] for role, tally in collector.tallies().items()})
            for collector in self._collectors
        ]
