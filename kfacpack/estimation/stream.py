"""Estimates curvature layer by layer, for models whose factors or weights do not fit into memory.

A model is divided into segments: its stem, its layers and its head (`kfacpack.models.layer_list`). A forward pass over
all batches stores the inputs of every layer. A backward pass then goes from the head to the stem. Each segment is
recomputed from its stored inputs, its factors are accumulated from the gradients with respect to its output, and the
gradients with respect to its inputs are stored for the segment before it. Then its factors are written. At any time,
only the factors of one segment and the activations of one batch are in memory. The probes, the order of summation and
the result are the same as for an ordinary estimate.

The intermediate files are kept in a folder beside the output until the run is complete, so that an interrupted run can
be resumed at the segment where it stopped.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kfacpack.compression.compression_report import BlockCompressionReport, Moments, finish_report
from kfacpack.curvature.curvature import Curvature, load
from kfacpack.errors import KfacpackError
from kfacpack.estimation import distributed
from kfacpack.estimation.accumulator import BatchShape, CurvatureAccumulator, InputGradients
from kfacpack.estimation.autograd_graph import WITHOUT_CHECKPOINTS
from kfacpack.estimation.block_plan import BlockPlan, plan_blocks, require_used
from kfacpack.estimation.estimate import compress_result, finish_curvature, probes_of, require_metric, with_unknown_loss
from kfacpack.estimation.resume import ArgumentEncoder, Interrupted, StreamFiles, decode_arguments
from kfacpack.estimation.tracing import same_output, trace_output, trace_seeds
from kfacpack.format.manifest import Base, OutputScale, base_digest
from kfacpack.models.functional import (
    batch_size_of,
    eval_mode,
    map_tensors,
    padding_mask,
    reentrant_checkpoints_refused,
    require_finite,
    rows_per_example,
    select_parameters,
)
from kfacpack.models.layer_list import ORDINARY, LayerCall, LayerList

if TYPE_CHECKING:
    from kfacpack.compression.compression_report import CompressionReport
    from kfacpack.estimation.options import EstimateOptions
    from kfacpack.estimation.resume import PartialFile
    from kfacpack.format.manifest import Source
    from kfacpack.format.units import OnProgress
    from kfacpack.models.functional import ModelInput
    from kfacpack.models.model import Model

PreparedBatches = Callable[[], Iterable["ModelInput"]]
"""Function that returns an iterable of all batches, on the device of the model."""


@dataclass
class SegmentPlans:
    """The plans for the blocks of all segments."""

    stem: BlockPlan
    layers: list[BlockPlan]
    head: BlockPlan
    reference: Tensor
    """The first row of f for the first example, (C,)."""
    zero_gradients: list[int]
    """Number of operations whose gradients are zero for the traced example, by segment."""
    bases: list[Base | None]
    """Names and digests of the covered parameters, by segment; None for a segment without blocks or without digests."""

    @property
    def weights(self) -> str:
        """Digest of all covered parameters."""
        return base_digest(tuple(parameter for base in self.bases if base for parameter in base.parameters))

    @property
    def all(self) -> list[BlockPlan]:
        """The plans of all segments in order."""
        return [self.stem, *self.layers, self.head]

    @property
    def first_needed(self) -> int:
        """Index of the first layer that needs a backward pass, which is 0 if the stem has blocks."""
        return 0 if self.stem.blocks else next((i for i, p in enumerate(self.layers) if p.blocks), len(self.layers))


@dataclass
class _Progress:
    """The part of the state of a layer-by-layer estimate that is saved in the partial file."""

    batches: int
    shapes: Tensor = field(init=False)
    """Number of rows of f and number of backward passes for each of the B batches, (B, 2)."""
    scale: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    """Mean squared norm and variance of f."""

    def __post_init__(self) -> None:
        self.shapes = torch.zeros(self.batches, 2, dtype=torch.int64)

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Returns all tensors of the state, as pairs of a name and a tensor."""
        return [("shapes", self.shapes), ("scale", self.scale)]


@dataclass
class LayerStream:
    """A model whose blocks are planned and estimated segment by segment.

    Raises:
        KfacpackError: If the model cannot be divided into segments or does not support the metric, or if there are
            several processes.
    """

    model: Model
    options: EstimateOptions
    params: tuple[str, ...] | None
    """Names or patterns of the parameters to cover."""

    def __post_init__(self) -> None:
        if distributed.world_size() > 1:
            remedy = "run N separate commands with --shard K/N, then `kfacpack merge --rule shards`"
            problem = f"--stream (stream=True) supports only one process, found {distributed.world_size()}"
            raise KfacpackError(f"{problem}; {remedy}")
        model = self.model
        require_metric(model, self.options.metric)  # before the forward pass, which is slow and stores files
        self.selected = select_parameters(model.module, self.params, model.frozen)
        self.layers = LayerList(model.module, model.forward, self.selected, model.layer_weights)
        self.outer = {name: p for name, p in self.selected.items() if self.layers.is_outside(name)}
        self.device = next(p.device for n, p in model.module.named_parameters() if self.layers.is_outside(n))

    @contextmanager
    def layer(self, index: int) -> Iterator[tuple[torch.nn.Module, dict[str, Tensor]]]:
        """Context manager that loads the weights of a layer. Yields the layer and its selected parameters by name."""
        with self.layers.loaded(index) as layer:
            prefix = self.layers.prefix(index)
            own: dict[str, Tensor] = {f"{prefix}{name}": parameter for name, parameter in layer.named_parameters()}
            parameters = {name: own[name] for name in self.selected if name in own}
            with eval_mode(layer, parameters):
                yield layer, parameters

    def representatives(self) -> list[int]:
        """Returns, for every layer, the index of the first layer of its kind.

        Two layers are of the same kind if their parameters have the same names and shapes, and if the same parameters
        are selected.
        """
        first: dict[object, int] = {}
        kinds = []
        for index, layer in enumerate(self.layers.layers):
            prefix = self.layers.prefix(index)
            parameters = [(n, tuple(p.shape), f"{prefix}{n}" in self.selected) for n, p in layer.named_parameters()]
            kinds.append(first.setdefault(tuple(parameters), index))
        return kinds

    def plan(self, batch: ModelInput, *, one_per_kind: bool = False) -> SegmentPlans:
        """Plans the blocks of every segment from an example in a batch, as an ordinary estimate does.

        Args:
            batch: The first batch, on the device of the model.
            one_per_kind: Whether to plan only the first layer of each kind and skip the digests of the weights, which
                is sufficient for forecasts. All layers of a kind then share the plan of the first layer, including its
                parameter names.

        Raises:
            KfacpackError: If the curvature of a parameter cannot be estimated, or the model cannot be divided into
                segments.
        """
        size = batch_size_of(batch)
        if size is None:
            problem = "the tensors of a batch differ in their first dimension"
            raise KfacpackError(f"the curvature cannot be estimated layer by layer: {problem}. {ORDINARY}")
        best: SegmentPlans | None = None
        for example in sorted({0, size // 2, size - 1}):
            with reentrant_checkpoints_refused(WITHOUT_CHECKPOINTS):
                plans = self._plan_from(batch, example, check=best is None, one_per_kind=one_per_kind)
            if best is None:
                best = plans
            else:
                for index, (count, previous) in enumerate(zip(plans.zero_gradients, best.zero_gradients, strict=True)):
                    if count < previous:
                        best = _with_segment(best, plans, index)
            if not any(best.zero_gradients):
                break
        assert best is not None
        covered = tuple(block for plan in best.all for block in plan.blocks)
        unused = tuple(name for plan in best.all for name in plan.unused)
        require_used(BlockPlan(covered, unused, best.head.width), self.params)
        return best

    def _plan_from(self, batch: ModelInput, example: int, *, check: bool, one_per_kind: bool) -> SegmentPlans:
        doubled = map_tensors(batch, lambda tensor: tensor[[example, example]])
        rows = (rows_per_example(batch) or [1] * (example + 1))[example]
        if check:
            self.layers.check(doubled)
        hidden, calls = self.layers.stem(doubled)
        inputs = [hidden.detach()]
        kinds = self.representatives() if one_per_kind else list(range(len(self.layers)))
        for index, call in enumerate(calls):
            if kinds[index] != index:
                inputs.append(inputs[-1])
                continue
            with self.layer(index) as (layer, _):
                inputs.append(call.run(layer, inputs[-1]).detach())
        leaf = inputs.pop().requires_grad_()
        f = self.layers.head(doubled, leaf)
        require_finite(f)
        precision = torch.finfo(next(iter(self.selected.values())).dtype).eps
        if len(f) != 2 * rows or not same_output(f[:rows], f[rows:], precision):
            problem = "the output for an example depends on the other examples of its batch"
            raise KfacpackError(f"the curvature cannot be estimated layer by layer: {problem}. {ORDINARY}")
        common: dict[str, Any] = {"examples": 2, "twice": True, "example": example}
        head = trace_output(f, trace_seeds(f, [rows, rows], twice=True), self.outer, **common, inputs=leaf)
        width = f.shape[1]
        g = head.input_gradient
        of_layers: dict[int, tuple[BlockPlan, Base | None, int]] = {}
        for index in sorted(set(kinds), reverse=True):
            leaf = inputs[index].detach().requires_grad_()
            with self.layer(index) as (layer, parameters):
                output = calls[index].run(layer, leaf)
                g = torch.zeros_like(output) if g is None else g
                trace = trace_output(output, [g], parameters, **common, inputs=leaf)
                plan = _plan_of(trace, parameters, self.options, width)
                of_layers[index] = plan, None if one_per_kind else self._identity(plan), trace.zero_gradients
            g = trace.input_gradient
        stem, stem_zeros = BlockPlan((), (), width), 0
        hidden, _ = self.layers.stem(doubled)
        if hidden.requires_grad and g is not None:
            trace = trace_output(hidden, [g], self.outer, **common)
            stem, stem_zeros = _plan_of(trace, self.outer, self.options, width), trace.zero_gradients
        head_plan = _plan_of(head, self.outer, self.options, width)
        self._require_one_segment(stem, head_plan)
        used = {name for plan in (stem, head_plan) for block in plan.blocks for name in block.parameters}
        layers, bases, zeros = zip(*(of_layers[kind] for kind in kinds), strict=True)
        return SegmentPlans(
            replace(stem, unused=()),
            list(layers),
            replace(head_plan, unused=tuple(name for name in self.outer if name not in used)),
            f[0].detach(),
            [stem_zeros, *zeros, head.zero_gradients],
            [self._identity(stem), *bases, self._identity(head_plan)],
        )

    def _identity(self, plan: BlockPlan) -> Base | None:
        """Returns the names and digests of a plan's parameters, or None if the plan has no blocks."""
        covered = {name for block in plan.blocks for name in block.parameters}
        return self.model.base(covered) if covered else None

    def _require_one_segment(self, stem: BlockPlan, head: BlockPlan) -> None:
        """Checks that no parameter is used in both the stem and the head."""
        in_stem, in_head = ({name for block in plan.blocks for name in block.parameters} for plan in (stem, head))
        if both := sorted(in_stem & in_head):
            problem = f"parameter {both[0]!r} is used both before the first layer and after the last layer"
            raise KfacpackError(f"{problem}, so the curvature cannot be estimated layer by layer. {ORDINARY}")

    def accumulator(
        self, plan: BlockPlan, parameters: Mapping[str, Tensor], reference: tuple[int, Tensor] | None = None
    ) -> CurvatureAccumulator:
        """Returns an accumulator for the blocks of a segment, to which no batch has been added."""
        dtype = next(iter(self.selected.values())).dtype
        settings = self.options.settings(dtype, self.device)
        probes = probes_of(self.model, self.options)
        return CurvatureAccumulator(
            self.model.forward, plan, parameters, probes, settings, reference, split_inputs=True
        )


def _with_segment(best: SegmentPlans, other: SegmentPlans, index: int) -> SegmentPlans:
    """Returns `best`, with the plan of the segment at `index` replaced by the plan in `other`."""
    plans, zeros = best.all, list(best.zero_gradients)
    plans[index], zeros[index] = other.all[index], other.zero_gradients[index]
    return replace(best, stem=plans[0], layers=plans[1:-1], head=plans[-1], zero_gradients=zeros)


def _plan_of(trace: Any, parameters: Mapping[str, Tensor], options: EstimateOptions, width: int) -> BlockPlan:
    """Plans the blocks of one segment. If the segment uses none of the parameters, the plan is empty."""
    if not any(trace.graph.uses(parameter) for parameter in parameters.values()):
        return BlockPlan((), tuple(parameters), width)
    return replace(plan_blocks(trace, parameters, options), width=width)


@dataclass
class StreamedEstimate:
    """One run of a layer-by-layer estimate."""

    stream: LayerStream
    plans: SegmentPlans
    files: StreamFiles
    numbers: Sequence[Sequence[int]]
    """Indices of the examples in each batch."""
    prepared: PreparedBatches
    source: Source
    on_progress: OnProgress
    stopped: Callable[[], bool]
    report: CompressionReport | None = field(default=None, init=False)

    def run(self, partial: PartialFile, *, resume: bool) -> Curvature:
        """Runs all steps that have not been completed yet.

        Returns:
            The curvature, which is read from the bundles of the segments.

        Raises:
            Interrupted: If `stopped` returned True.
        """
        self._progress = _Progress(len(self.numbers))
        steps = self._steps()
        done = partial.restore(self._progress) if resume else partial.require_absent()
        self.files.create_folder()  # after the settings are compared, so that a refused run leaves nothing behind
        if not done:
            partial.save(self._progress, 0, now=True)
        self._total = sum(map(len, self.numbers))
        self._units, self._all_units = done * self._total, len(steps) * self._total
        with eval_mode(self.stream.model.module, self.stream.outer):
            for number, (step, finished) in enumerate(steps[done:], start=done + 1):
                step()
                partial.save(self._progress, number, now=True)
                for pattern in finished:
                    self.files.remove(pattern)
        return self._assembled()

    def _steps(self) -> list[tuple[Callable[[], None], tuple[str, ...]]]:
        """Returns all steps in order, each with patterns for the files that are no longer needed after the step."""
        count, first = len(self.stream.layers), self.plans.first_needed
        steps: list[tuple[Callable[[], None], tuple[str, ...]]] = [(self._stem_forward, ())]
        for index in range(count):
            finished = (f"inputs-{index}-*",) if index < first else ()
            steps.append((lambda index=index: self._layer_forward(index), finished))  # type: ignore[misc]
        steps.append((self._head, (f"inputs-{count}-*",)))
        for index in reversed(range(first, count)):
            both = (f"inputs-{index}-*", f"gradients-{index + 1}-*")
            steps.append((lambda index=index: self._layer_backward(index), both))  # type: ignore[misc]
        if self.plans.stem.blocks:
            steps.append((self._stem_backward, ("gradients-0-*",)))
        return steps

    def _advance(self, batch: int) -> None:
        """Reports progress, converted to a number of examples, and raises `Interrupted` if a stop was requested."""
        self._units += len(self.numbers[batch])
        self.on_progress(self._units * self._total // self._all_units, self._total)
        if self.stopped():
            raise Interrupted

    def _stem_forward(self) -> None:
        """Runs the stem, and stores the inputs of the first layer and the arguments of all layers."""
        for number, batch in enumerate(self.prepared()):
            hidden, calls = self.stream.layers.stem(batch)
            encoder = ArgumentEncoder()
            described = [[encoder.encode(call.args), encoder.encode(dict(call.kwargs))] for call in calls]
            mask = padding_mask(batch)
            tensors = encoder.tensors if mask is None else {**encoder.tensors, "mask": mask}
            self.files.save(f"calls-{number}", tensors, described)
            self.files.save(f"inputs-0-{number}", {"hidden": hidden})
            self._advance(number)

    def _call(self, index: int, batch: int) -> tuple[LayerCall, Tensor | None]:
        """Reads the stored arguments of a layer, and the padding mask of the batch if there is one."""
        tensors, described = self.files.load(f"calls-{batch}")
        args, kwargs = (decode_arguments(entry, tensors) for entry in described[index])
        return LayerCall(args, kwargs), tensors.get("mask")

    def _hidden(self, index: int, batch: int) -> Tensor:
        return self.files.load(f"inputs-{index}-{batch}")[0]["hidden"]

    def _layer_forward(self, index: int) -> None:
        """Runs a layer and stores its outputs, which are the inputs of the next segment."""
        # Gradients are enabled because modules such as nn.MultiheadAttention use other kernels without them.
        needs_gradient = index > self.plans.first_needed or bool(self.plans.stem.blocks)
        with self.stream.layer(index) as (layer, _):
            for batch in range(len(self.numbers)):
                call, _ = self._call(index, batch)
                output = call.run(layer, self._hidden(index, batch).requires_grad_(needs_gradient))
                self.files.save(f"inputs-{index + 1}-{batch}", {"hidden": output})
                self._advance(batch)

    def _head(self) -> None:
        """Computes f, writes the factors of the head, and stores the gradients with respect to the head's inputs."""
        stream, count = self.stream, len(self.stream.layers)
        reference = (self.numbers[0][0], self.plans.reference)
        accumulator = stream.accumulator(self.plans.head, stream.outer, reference)
        for number, batch in enumerate(self.prepared()):
            hidden = self._hidden(count, number).requires_grad_()
            f = stream.layers.head(batch, hidden)
            require_finite(f)
            shape = accumulator.add_evaluated(f, batch, self.numbers[number], self._gradients(count, number, hidden))
            self._progress.shapes[number] = torch.tensor([shape.rows, shape.passes])
            self._advance(number)
        scale = accumulator.output_scale
        self._progress.scale.copy_(torch.tensor([scale.mean_square, scale.variance], dtype=torch.float64))
        self._write(accumulator, count + 1)

    def _gradients(self, index: int, batch: int, inputs: Tensor) -> InputGradients | None:
        """Returns the inputs of a layer, with a function that stores the gradients with respect to them.

        Returns:
            The inputs and the function; None if no earlier segment needs the gradients.
        """
        if index <= self.plans.first_needed and not (index == 0 and self.plans.stem.blocks):
            return None
        return InputGradients(
            inputs, lambda number, g: self.files.save(f"gradients-{index}-{batch}-{number}", {"gradient": g})
        )

    def _seeds(self, index: int, batch: int) -> Iterator[Tensor]:
        """Yields the stored gradients with respect to the inputs of a layer, one per backward pass."""
        for number in range(int(self._progress.shapes[batch, 1])):
            yield self.files.load(f"gradients-{index}-{batch}-{number}")[0]["gradient"]

    def _shape(self, batch: int, mask: Tensor | None) -> BatchShape:
        rows, passes = self._progress.shapes[batch].tolist()
        return BatchShape(len(self.numbers[batch]), rows, passes, mask)

    def _layer_backward(self, index: int) -> None:
        """Accumulates and writes the factors of a layer, and stores the gradients with respect to its inputs."""
        with self.stream.layer(index) as (layer, parameters):
            accumulator = self.stream.accumulator(self.plans.layers[index], parameters)
            for batch in range(len(self.numbers)):
                call, mask = self._call(index, batch)
                hidden = self._hidden(index, batch).requires_grad_()
                output = call.run(layer, hidden)
                inputs = self._gradients(index, batch, hidden)
                accumulator.add_output(output, self._seeds(index + 1, batch), self._shape(batch, mask), inputs)
                self._advance(batch)
            self._write(accumulator, index + 1)

    def _stem_backward(self) -> None:
        """Accumulates and writes the factors of the stem."""
        accumulator = self.stream.accumulator(self.plans.stem, self.stream.outer)
        for number, batch in enumerate(self.prepared()):
            hidden, _ = self.stream.layers.stem(batch)
            accumulator.add_output(hidden, self._seeds(0, number), self._shape(number, padding_mask(batch)))
            self._advance(number)
        self._write(accumulator, 0)

    def _write(self, accumulator: CurvatureAccumulator, segment: int) -> None:
        """Writes the factors of a segment to a bundle, which is compressed if `options.compress` is set."""
        base = self.plans.bases[segment]
        if base is None:
            return
        model, options = self.stream.model, self.stream.options
        mean_square, variance = self._progress.scale.tolist()
        curvature = finish_curvature(
            accumulator,
            options,
            base,
            model.function,
            self.source,
            OutputScale(mean_square=mean_square, variance=variance),
        )
        if options.compress:
            curvature, report = compress_result(curvature, options)
            text = json.dumps([asdict(block) for block in report.blocks])
            (self.files.folder / f"segment-{segment}.json").write_text(text, encoding="utf-8")
        curvature.save(self._segment_path(segment))

    def _segment_path(self, segment: int) -> Path:
        return self.files.folder / f"segment-{segment}.kfac"

    def segment_paths(self) -> list[Path]:
        """Returns the paths of the bundles of all segments that have blocks."""
        return [self._segment_path(index) for index, plan in enumerate(self.plans.all) if plan.blocks]

    def _assembled(self) -> Curvature:
        """Reads the bundles of all segments and returns their blocks as one curvature."""
        parts = [load(path) for path in self.segment_paths()]
        order = {name: position for position, name in enumerate(self.stream.selected)}
        parameters = sorted(
            (parameter for part in parts for parameter in part.about.base.parameters), key=lambda p: order[p.name]
        )
        first = parts[0].about
        digest = base_digest(tuple(parameters))
        base = Base(**{**first.base.model_dump(), "sha256": digest, "parameters": tuple(parameters)})
        blocks = sorted(
            (block for part in parts for block in part.blocks),
            key=lambda block: (order[block.join.pieces[0].parameter], block.join.pieces[0].rows or (0, 0)),
        )
        curvature = Curvature(blocks, first.model_copy(update={"base": base, "losses": ()}))
        options = self.stream.options
        if options.compress:
            reports = {report.name: report for report in self._reports()}
            ordered = [reports[block.name] for block in blocks]
            curvature, self.report = finish_report(curvature, blocks, ordered, str(options.chain))
            curvature = with_unknown_loss(curvature, options)
        return curvature

    def _reports(self) -> Iterator[BlockCompressionReport]:
        for path in self.segment_paths():
            for entry in json.loads(path.with_suffix(".json").read_text(encoding="utf-8")):
                values = {**entry, "kept": tuple(entry["kept"]), "moments": Moments(**entry["moments"])}
                yield BlockCompressionReport(**values)

    def remove_files(self) -> None:
        """Removes the folder with the temporary files."""
        shutil.rmtree(self.files.folder, ignore_errors=True)
