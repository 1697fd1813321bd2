"""Implements `kp.estimate_task`: the curvature of a model on a sample of a task's examples, in resumable runs.

The command `kfacpack estimate` and the stages of a plan use this module as well. With n processes, each process uses
every n-th batch, and all processes return the same curvature.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfacpack.curvature.curvature import load
from kfacpack.curvature.saving import save_index
from kfacpack.errors import KfacpackError
from kfacpack.estimation import distributed
from kfacpack.estimation.estimate import begin_accumulation, compress_result, device_of, finish_curvature, probes_of
from kfacpack.estimation.forecast import Forecast, activation_bytes, forecast_stream, row_count, weight_bytes
from kfacpack.estimation.options import EstimateOptions
from kfacpack.estimation.resume import (
    SAVE_INTERVAL,
    Interrupted,
    PartialFile,
    StreamFiles,
    output_path,
    require_writable_folder,
)
from kfacpack.estimation.stream import LayerStream, StreamedEstimate
from kfacpack.format.bundle_index import is_index
from kfacpack.format.manifest import EstimateStructure, Source
from kfacpack.models.data_loading import batches, fingerprint
from kfacpack.models.families import resolve_model
from kfacpack.models.functional import eval_mode, select_parameters, to_device
from kfacpack.tasks.registry import resolve_task
from kfacpack.tasks.task import batched, parse_count, sample_indices

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kfacpack.compression.compression_report import CompressionReport
    from kfacpack.curvature.curvature import Curvature
    from kfacpack.estimation.accumulator import CurvatureAccumulator
    from kfacpack.estimation.block_plan import PlannedBlock
    from kfacpack.estimation.forecast import Gpu
    from kfacpack.format.manifest import Fisher, Metric, Probe, Sharing
    from kfacpack.format.units import OnProgress
    from kfacpack.models.functional import ModelInput
    from kfacpack.models.model import Batch, Model
    from kfacpack.tasks.task import Split, Task


def estimate_task(
    model: Model | str,
    task: Task | str,
    *,
    examples: int | str = 256,
    split: str = "train",
    shard: tuple[int, int] = (1, 1),
    fisher: Fisher = "mc",
    samples: int = 1,
    probe: Probe = "orthogonal",
    sharing: Sharing = "expand",
    structure: EstimateStructure = "kronecker",
    compress: str | None = None,
    params: Sequence[str] | str | None = None,
    seed: int = 0,
    batch_size: int = 32,
    offload: bool = False,
    metric: Metric = "l2",
    stream: bool = False,
    output: str | os.PathLike[str] | None = None,
    resume: bool = False,
    on_progress: OnProgress = lambda done, total: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Curvature:
    """Estimates the curvature of a model on a task's data.

    Args:
        model: A model from `kp.load_model`, or its name.
        task: A task from `kp.load_task`, or its name.
        examples: Number of examples to sample: a number, a percentage such as `"30%"`, or `"all"`.
        split: The split to sample from.
        shard: `(k, n)` uses every n-th of the sampled examples, starting with the k-th. The estimates from all n shards
            can be merged into the full estimate.
        fisher: `"mc"` for random probes, `"exact"` for all directions of f.
        samples: Number of probes per example with `"mc"`.
        probe: Distribution of the probes: `"orthogonal"`, `"rademacher"` or `"gaussian"`.
        sharing: KFAC variant for weights that several positions share: `"expand"` or `"reduce"`.
        structure: `"kronecker"`, or `"diagonal"` for the diagonal of G.
        compress: Codecs that compress the result, such as `"block:8+int8"`; see `kp.compress`.
        params: Names or patterns of the parameters to cover. Defaults to all parameters that the model family
            does not freeze.
        seed: Seed for the selection of the examples and for the probes.
        batch_size: Number of examples per forward pass.
        offload: Whether to keep the sums on the CPU, regardless of the model's device.
        metric: Measure of a change in f: `"l2"` for the squared norm of the change, or `"kl"` for the Kullback-Leibler
            divergence between the output distributions of a language model.
        stream: Whether to estimate layer by layer, for a model whose factors do not fit into memory. Inputs and
            gradients of the layers are stored in a folder beside `output`.
        output: File to write. The state of an interrupted run is saved beside it. By default, no file is written.
        resume: Whether to resume an interrupted run with the same `output`.
        on_progress: Function that is called with two arguments: the number of examples that this process has completed,
            and the total number of its examples.
        stopped: Function that is called after each batch. Once it returns True, the state is saved and `Interrupted` is
            raised.

    Returns:
        The curvature. Its manifest describes the model, the task and the options.

    Raises:
        KfacpackError: If the model, the task and the options are not compatible.
        Interrupted: If `stopped` returned True.

    Example:
        >>> curvature = kp.estimate_task("tiny", "digits", examples=64)
        >>> curvature.save("digits.kfac")
    """
    if not isinstance(params, str | Sequence | None):
        raise KfacpackError(f"params: expected a string or a sequence of strings, got {type(params).__name__}")
    options = EstimateOptions(fisher, samples, probe, seed, sharing, structure, compress, offload, metric)
    run = TaskEstimate(
        resolve_model(model),
        resolve_task(task),
        options,
        str(examples),
        batch_size,
        split,
        (params,) if isinstance(params, str) else tuple(params) if params is not None else None,
        shard,
        stream,
    )
    with output_path(output, "task.kfac", resume=resume) as path:
        return run.run(path, resume=resume, on_progress=on_progress, stopped=stopped)


@dataclass
class TaskEstimate:
    """An estimate of the curvature on a task's data, which can be run or forecast."""

    model: Model
    task: Task
    options: EstimateOptions = field(default_factory=EstimateOptions)
    examples: str = "256"
    """Number of examples to sample: a number, a percentage or "all"."""
    batch_size: int = 32
    split_name: str = "train"
    params: tuple[str, ...] | None = None
    """Names or patterns of the parameters to cover; None for all parameters that the model family does not freeze."""
    shard: tuple[int, int] = (1, 1)
    """Shard (k, n): every n-th of the sampled examples is used, starting with the k-th."""
    stream: bool = False
    """Whether to estimate layer by layer."""
    stream_folder: Path | None = None
    """Folder in which the inputs and gradients of the layers are stored; None for the folder of the output."""
    max_shard_size: str | None = None
    """Maximum size of each file if the bundle is divided into several files. A layer-by-layer estimate ignores this
    setting."""
    report: CompressionReport | None = field(default=None, init=False)
    """Report on the approximation error of the compression, which `run` sets if compression is requested."""

    def __post_init__(self) -> None:
        if type(self.batch_size) is not int or self.batch_size < 1:
            raise KfacpackError(f"batch size {self.batch_size!r}: expected a positive integer")
        shard = self.shard
        if not isinstance(shard, tuple | list) or len(shard) != 2 or any(type(number) is not int for number in shard):
            raise KfacpackError(f"shard {shard!r}: expected two integers (k, n) with k from 1 to n, such as (2, 8)")

    @cached_property
    def split(self) -> Split:
        """The split from which the examples are sampled."""
        return self.task.split(self.split_name)

    @cached_property
    def indices(self) -> list[int]:
        """Indices, within the split, of the sampled examples."""
        size = len(self.split)
        k, n = self.shard
        if not 1 <= k <= n:
            raise KfacpackError(f"shard {k}/{n}: expected K/N with K from 1 to N, such as 2/8")
        indices = sample_indices(size, parse_count(self.examples, size), self.options.seed)[k - 1 :: n]
        if not indices:
            raise KfacpackError(f"shard {k}/{n} is empty: there are fewer than {k} examples; use fewer shards")
        return indices

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters for which the curvature is estimated, by name."""
        return select_parameters(self.model.module, self.params, self.model.frozen)

    @property
    def own_batches(self) -> list[Sequence[int]]:
        """Indices of the examples in each batch of this process."""
        return list(batched(self.indices, self.batch_size))[distributed.rank() :: distributed.world_size()]

    def run(
        self,
        output: Path,
        *,
        resume: bool = False,
        every: float = SAVE_INTERVAL,
        on_progress: OnProgress = lambda done, total: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Curvature:
        """Estimates the curvature and writes the bundle.

        Args:
            output: File to write. The state is saved beside it at intervals.
            resume: Whether to resume from the saved state.
            every: Minimum number of seconds between two saves.
            on_progress: Function that is called with two arguments: the number of examples that this process has
                completed, and the total number of its examples.
            stopped: Function that is called after each batch. Once it returns True, the state is saved and
                `Interrupted` is raised.

        Returns:
            The curvature, which is the same in every process.

        Raises:
            Interrupted: If `stopped` returned True.
            KfacpackError: If the output cannot be written, or the state was saved with other settings.
        """
        require_writable_folder(output)
        if self.stream:
            return self._run_streamed(output, resume=resume, every=every, on_progress=on_progress, stopped=stopped)
        own_batches = self.own_batches
        total = sum(map(len, own_batches))
        with self._accumulator() as accumulator:
            base = self.model.base(accumulator.covered)
            request = self._request(accumulator.plan.blocks, base.sha256)
            partial = PartialFile(_partial_path(output), "an estimate", request, every)
            done = partial.restore(accumulator) if resume else partial.require_absent()
            on_progress(accumulator.examples, total)
            prepared = self._prepared(own_batches[done:])
            for number, (examples, batch) in enumerate(zip(own_batches[done:], prepared, strict=True), start=done + 1):
                accumulator.add_batch(to_device(batch, device_of(self.parameters)), examples)
                on_progress(accumulator.examples, total)
                if stopped():
                    partial.save(accumulator, number, now=True)
                    raise Interrupted
                # Saved before the sums of all processes are added up in place, which fails if a process is lost.
                partial.save(accumulator, number, now=distributed.world_size() > 1 and number == len(own_batches))
            curvature = finish_curvature(accumulator, self.options, base, self.model.function, self._source())
        if self.options.compress:
            curvature, self.report = compress_result(curvature, self.options)
        if distributed.rank() == 0:
            curvature.save(output, max_shard_size=self.max_shard_size)
        distributed.barrier()
        partial.remove()
        return curvature

    def _run_streamed(
        self, output: Path, *, resume: bool, every: float, on_progress: OnProgress, stopped: Callable[[], bool]
    ) -> Curvature:
        """Implements `run` for a layer-by-layer estimate."""
        layers = LayerStream(self.model, self.options, self.params)
        with eval_mode(self.model.module, layers.outer):
            plans = layers.plan(self._batch(self.indices[: self.batch_size], layers.device))
        request = self._request([block for plan in plans.all for block in plan.blocks], plans.weights)
        partial = PartialFile(_partial_path(output), "an estimate", request, every)
        if not resume:
            partial.require_absent()
        folder = self.stream_folder or output.parent
        own_batches = self.own_batches

        def prepared() -> Iterator[ModelInput]:
            with closing(self._prepared(own_batches)) as loader:
                for batch in loader:
                    yield to_device(batch, layers.device)

        files = StreamFiles(folder / f"{output.name}.partial-stream", layers.device)
        run = StreamedEstimate(layers, plans, files, own_batches, prepared, self._source(), on_progress, stopped)
        curvature = run.run(partial, resume=resume)
        self.report = run.report
        if is_index(output):
            save_index(curvature, output, run.segment_paths())
        else:
            curvature.save(output)
        partial.remove()
        run.remove_files()
        return load(output)

    def forecast(self, gpu: Gpu | None = None, *, keeps_segments: bool = False) -> Forecast:
        """Forecasts the blocks, size, time and memory of the estimate by running one batch.

        Args:
            gpu: GPU for which the time of a layer-by-layer estimate is forecast. It is ignored for other estimates. By
                default, the time is measured on this machine.
            keeps_segments: See `forecast_stream`.
        """
        indices = self.indices[: self.batch_size]
        if self.stream:
            layers = LayerStream(self.model, self.options, self.params)
            batch, counts = self._batch(indices, layers.device), (len(self.indices), len(self.own_batches))
            return forecast_stream(
                layers, batch, examples=counts[0], batches=counts[1], gpu=gpu, keeps_segments=keeps_segments
            )
        with self._accumulator() as accumulator:
            start = time.perf_counter()
            batch = self._batch(indices)
            accumulator.add_batch(batch, indices)
            seconds = time.perf_counter() - start
            module = self.model.module
            activations = activation_bytes(module, self.model.forward, batch)
        activations += probes_of(self.model, self.options).sampling_bytes(row_count(batch))
        blocks = accumulator.forecasts(self.options.chain)
        return Forecast(
            blocks=blocks,
            frozen=tuple(name for name, _ in module.named_parameters() if name not in self.parameters),
            unused=accumulator.plan.unused,
            examples=len(self.indices),
            batches=len(self.own_batches),
            bytes=sum(block.bytes for block in blocks),
            seconds=seconds * len(self.own_batches),
            peak_memory=weight_bytes(module) + accumulator.peak_bytes(activations, self.options.chain),
        )

    @contextmanager
    def _accumulator(self) -> Iterator[CurvatureAccumulator]:
        first = self._batch(self.indices[: self.batch_size])
        with eval_mode(self.model.module, self.parameters):
            yield begin_accumulation(
                self.model.forward,
                first,
                self.parameters,
                self.options,
                self.params,
                self.indices[0],
                probes_of(self.model, self.options),
            )

    def _prepared(self, own_batches: Sequence[Sequence[int]]) -> Generator[Batch, None, None]:
        """Yields the batches, prepared for the model, given the indices of the examples in each batch."""
        return batches(self.model, [(self.split, self.task.name)], [(0, examples) for examples in own_batches])

    def _batch(self, indices: Iterable[int], device: torch.device | None = None) -> ModelInput:
        prepared = self.model.prepare([self.split[index] for index in indices], self.task.name)
        batch: ModelInput = to_device(prepared, device or device_of(self.parameters))
        return batch

    def _request(self, planned: Sequence[PlannedBlock], weights: str) -> dict[str, Any]:
        """Returns the settings that are saved with a run and must not change before the run is resumed.

        Args:
            planned: The planned blocks of the estimate.
            weights: Digest of the weights.
        """
        model = self.model
        blocks = [(block.name, block.structure) for block in planned]
        return {
            **asdict(self.options),
            "model": f"{model.family} {model.name}",
            "weights": weights,
            **({"stream": True} if self.stream else {}),
            # The default folder is beside the output, and the two may be moved together.
            **({"stream_folder": str(self.stream_folder.absolute())} if self.stream_folder else {}),
            "preprocessing": model.preprocessing,
            "task": self.task.name,
            "data": f"{self.split.source.dataset}, {self.split_name} of {len(self.split)} examples",
            "data_content": fingerprint(model, self.split, self.task.name, self.indices),
            "examples": len(self.indices),
            "shard": list(self.shard),
            "batch_size": self.batch_size,
            "process": f"{distributed.rank()} of {distributed.world_size()}",
            "blocks": sha256(repr(blocks).encode()).hexdigest(),
        }

    def _source(self) -> Source:
        origin = self.split.source
        return Source(
            task=self.task.name,
            dataset=origin.dataset,
            revision=origin.revision,
            split=origin.split,
            license=origin.license,
            preprocessing=self.model.preprocessing,
            examples=len(self.indices),
            dataset_size=len(self.split),
        )


def _partial_path(output: Path) -> Path:
    suffix = f"-{distributed.rank()}-of-{distributed.world_size()}" if distributed.world_size() > 1 else ""
    return output.with_name(f"{output.name}.partial{suffix}")
