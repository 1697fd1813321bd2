"""What an estimate will consist of and cost, before it is made.

An estimate under way: a plan, its sums, and the batches that have been taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kfacpack.errors import KfacpackError
from kfacpack.estimation.autograd_graph import AutogradGraph, GraphSteps, pass_back
from kfacpack.estimation.collectors import BackwardPass, Collector, CollectorSettings, FactorTally, collector
from kfacpack.estimation.tracing import same_output
from kfacpack.format.manifest import OutputScale
from kfacpack.models.functional import Forward, ModelInput, batch_size_of, call_model, map_tensors, padding_mask

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from kfacpack.curvature.blocks import CurvatureBlock
    from kfacpack.estimation.block_plan import BlockPlan
    from kfacpack.estimation.options import Probes


@dataclass(frozen=True)
class BlockForecast:
    name: str
    parameters: tuple[str, ...]
    operation: str
    structure: str
    rows: int
    columns: int
    bytes: int
    """Of its matrices in the bundle, without those that a block before it brings along."""


@dataclass(frozen=True)
class Forecast:
    blocks: tuple[BlockForecast, ...]
    frozen: tuple[str, ...]
    """Parameters that are left out, by the model's family or because they were not asked for."""
    unused: tuple[str, ...]
    """Parameters that f does not depend on."""
    examples: int
    batches: int
    bytes: int
    """Of the bundle's tensors."""
    seconds: float
    """Measured on one batch, times the number of batches."""
    peak_memory: int
    """Bytes: weights, sums, and what a batch keeps between its forward and its backward pass."""


def kept_for_backward(model: nn.Module, forward: Forward, batch: ModelInput, batch_size: int) -> int:
    """Bytes that autograd keeps of a batch of that size, besides the weights; counted on two examples.

    The largest tensor counts three times: a gradient of its size comes in, and one goes out.
    """
    weights = {tensor.untyped_storage().data_ptr() for tensor in _tensors_of(model)}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    few = map_tensors(batch, lambda tensor: tensor[[0, 0]]) if batch_size_of(batch) else batch
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        f = call_model(forward, few)
    return (sum(kept.values()) + 2 * max(kept.values(), default=0)) * batch_size // len(f)


def weight_bytes(model: nn.Module) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in _tensors_of(model)}.values())


def _tensors_of(model: nn.Module) -> Collection[Tensor]:
    return [*model.parameters(), *model.buffers()]


NodeCollectors = dict["Node", list[tuple[Collector, GraphSteps]]]


class CurvatureAccumulator:
    def __init__(
        self,
        forward: Forward,
        plan: BlockPlan,
        wanted: Mapping[str, Tensor],
        probes: Probes,
        settings: CollectorSettings,
        known: tuple[int, Tensor] | None = None,
    ) -> None:
        """`known` is the number of an example and its f, (C,): if it begins a batch, it must have the same f there."""
        probes.check(plan.width)
        self._forward = forward
        self.plan = plan
        self._wanted = wanted
        self._probes = probes
        self._settings = settings
        self._known = known
        shared: dict[int, FactorTally] = {}
        self._collectors = [collector(planned, settings, shared) for planned in plan.blocks]
        self._examples = torch.zeros((), dtype=torch.int64)
        first = next(iter(wanted.values()))
        dtype = torch.promote_types(torch.float32, first.dtype)
        self._output_sum = torch.zeros(plan.width, dtype=dtype, device=first.device)
        self._output_squares = torch.zeros((), dtype=dtype, device=first.device)

    @property
    def dtype(self) -> torch.dtype:
        """The model's, as far as it is estimated."""
        return self._wanted[self.plan.blocks[0].parameter].dtype

    @property
    def examples(self) -> int:
        """How many examples have been taken."""
        return int(self._examples)

    def take(self, batch: ModelInput, numbers: int | Sequence[int]) -> None:
        """Forward once, and backward once for each probe.

        `numbers` are the examples' own, or that of the first if they are consecutive: their probes follow from them.
        """
        f = call_model(self._forward, batch)
        examples, width = f.shape
        if width != self.plan.width:
            problem = f"f has width {width}, in the first batch it was {self.plan.width}"
            raise KfacpackError(f"{problem}; every batch must give outputs of the same width")
        if isinstance(numbers, int):
            numbers = range(numbers, numbers + examples)
        if len(numbers) != examples:
            raise KfacpackError(f"f has {examples} rows for a batch of {len(numbers)} examples; expected one for each")
        if self._known is not None and numbers[0] == self._known[0]:
            self._require_independence(f[0].detach(), self._known[1])
        outputs = f.detach().to(self._output_sum.dtype)
        self._output_sum += outputs.sum(0)
        self._output_squares += outputs.square().sum()
        graph = AutogradGraph(f)
        places = self._places(graph)
        mask = padding_mask(batch)
        sinks = graph.sinks(set(places))
        # What is collected afterwards still needs its operation then, so nothing may be freed on the way.
        retain = any(not each.immediate for node, found in places.items() if node not in sinks for each, _ in found)
        passes = self._probes.passes(width)
        for number, probe in enumerate(self._probes.draw(numbers, width)):
            passing = BackwardPass(examples, mask, first=number == 0)
            self._backward(f, probe, places, sinks, passing, retain=retain or number + 1 < passes)
        self._examples += examples

    @staticmethod
    def _require_independence(found: Tensor, expected: Tensor) -> None:
        if not same_output(found, expected):
            problem = "an example's output changes with the batch it is in; examples must not influence each other"
            raise KfacpackError(f"{problem} (a softmax or a normalisation over the batch does that)")

    def _places(self, graph: AutogradGraph) -> NodeCollectors:
        places: NodeCollectors = defaultdict(list)
        for each in self._collectors:
            steps = graph.follow(self._wanted[each.planned.parameter], each.planned.way)
            if steps is None:
                problem = "is not used as it was in the first batch; a model whose steps depend on its input"
                raise KfacpackError(f"parameter {each.planned.parameter!r} {problem} cannot be estimated")
            places[steps[-1].node].append((each, steps))
        return places

    def _backward(
        self, f: Tensor, probe: Tensor, places: NodeCollectors, sinks: set[Node], passing: BackwardPass, *, retain: bool
    ) -> None:
        later: list[tuple[Collector, GraphSteps, Tensor]] = []

        def at(node: Node, g: Tensor, at_work: bool) -> None:
            for each, steps in places[node]:
                if each.immediate or not at_work:
                    each.collect(steps, g, passing)
                else:
                    later.append((each, steps, g))

        pass_back(f, probe.to(f), places, sinks, at, retain=retain)
        with torch.no_grad():
            for each, steps, g in later:
                each.collect(steps, g, passing)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that has been summed, by name, to be changed in place."""
        yield "examples", self._examples
        yield "output_sum", self._output_sum
        yield "output_squares", self._output_squares
        for name, tally in self._tallies().items():
            for number, tensor in enumerate(tally.tensors()):
                yield f"{name}/{number}", tensor

    def _tallies(self) -> dict[str, FactorTally]:
        """Each once, under the name of the first block that has it."""
        found: dict[int, tuple[str, FactorTally]] = {}
        for each in self._collectors:
            for role, tally in each.tallies().items():
                found.setdefault(id(tally), (f"{each.planned.name}/{role}", tally))
        return dict(found.values())

    @property
    def covered(self) -> set[str]:
        return {parameter for block in self.plan.blocks for parameter in block.parameters}

    def forecasts(self) -> tuple[BlockForecast, ...]:
        """What each block will weigh in the bundle."""
        found: list[BlockForecast] = []
        counted: set[int] = set()
        for each in self._collectors:
            own = {id(tally): tally for tally in each.tallies().values() if id(tally) not in counted}
            counted |= own.keys()
            size = sum(tally.total.stored_bytes for tally in own.values())
            block = each.planned
            found.append(
                BlockForecast(
                    block.name, block.parameters, block.kind, block.structure, block.join.rows, block.join.columns, size
                )
            )
        return tuple(found)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.tensors())

    @property
    def output_scale(self) -> OutputScale:
        """Scale of f over the examples taken so far."""
        count = self.examples
        square = float(self._output_squares) / count
        mean = self._output_sum.cpu().double() / count
        variance = (square - float(mean.square().sum())) * count / max(count - 1, 1)
        return OutputScale(mean_square=square, variance=max(variance, 0.0))

    def finish(self) -> list[CurvatureBlock]:
        """The blocks, scaled as the true GGN. The sums are used up."""
        if not self.examples:
            raise KfacpackError("there are no examples to estimate from")
        matrices = {}
        for each in self._collectors:
            tallies = each.tallies()
            positions = int(tallies["A"].positions) if "A" in tallies else None
            for role, tally in tallies.items():
                if id(tally) in matrices:
                    continue
                # Inputs are taken once for each batch, whatever the number of probes.
                divisor = self._examples * self._probes.divisor
                if role == "A":
                    divisor = self._examples if self._settings.reduce else tally.positions.clamp(min=1)
                if not tally.total.is_finite():
                    problem = f"block {each.planned.name!r}: {role} has numbers that are not finite"
                    raise KfacpackError(f"{problem}; gradients overflowed. Use float32 or bfloat16 for the model")
                matrices[id(tally)] = tally.total.finish(float(divisor), examples=self.examples, positions=positions)
        return [
            each.block({role: matrices[id(tally)] for role, tally in each.tallies().items()})
            for each in self._collectors
        ]
