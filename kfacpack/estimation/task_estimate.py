"""The estimate of a named task: drawn examples, several processes, stored and taken up again.

Every process runs the same job; each takes every n-th batch, and all end with the same curvature.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfacpack.errors import KfacpackError
from kfacpack.estimation import distributed
from kfacpack.estimation.accumulator import Forecast, kept_for_backward, weight_bytes
from kfacpack.estimation.estimate import begin_accumulation, compress_result, device_of, finish_curvature
from kfacpack.estimation.options import EstimateOptions
from kfacpack.estimation.resume import SAVE_INTERVAL, Interrupted, PartialFile, require_writable_folder
from kfacpack.format.manifest import Source
from kfacpack.models.data_loading import batches, fingerprint
from kfacpack.models.functional import eval_mode, select_parameters, to_device
from kfacpack.tasks.task import batched, parse_count, sample_indices

if TYPE_CHECKING:
    from torch import Tensor

    from kfacpack.compression.compression_report import CompressionReport
    from kfacpack.curvature.curvature import Curvature
    from kfacpack.estimation.accumulator import CurvatureAccumulator
    from kfacpack.format.manifest import Base
    from kfacpack.models.functional import ModelInput
    from kfacpack.models.model import Model
    from kfacpack.tasks.task import Split, Task


@dataclass
class TaskEstimate:
    model: Model
    task: Task
    options: EstimateOptions = field(default_factory=EstimateOptions)
    examples: str = "256"
    batch_size: int = 32
    split_name: str = "train"
    params: tuple[str, ...] | None = None
    """Names or patterns; None takes all that the model's family does not freeze."""
    shard: tuple[int, int] = (1, 1)
    """(k, n): every n-th of the examples, from the k-th on. The n shards merge into what one run over all gives."""
    report: CompressionReport | None = field(default=None, init=False)
    """What compression lost, once it has run, if that was asked for."""

    @cached_property
    def split(self) -> Split:
        return self.task.split(self.split_name)

    @cached_property
    def numbers(self) -> list[int]:
        """The examples that are taken, by their place in the split."""
        size = len(self.split)
        k, n = self.shard
        numbers = sample_indices(size, parse_count(self.examples, size), self.options.seed)[k - 1 :: n]
        if not numbers:
            raise KfacpackError(f"shard {k}/{n}: there are fewer than {k} examples")
        return numbers

    @cached_property
    def wanted(self) -> dict[str, Tensor]:
        return select_parameters(self.model.module, self.params, self.model.frozen)

    @property
    def own_batches(self) -> list[Sequence[int]]:
        """The examples of each batch that this process takes."""
        return list(batched(self.numbers, self.batch_size))[distributed.rank() :: distributed.world_size()]

    def run(
        self,
        output: Path,
        *,
        resume: bool = False,
        every: float = SAVE_INTERVAL,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Curvature:
        """Estimate and write the bundle. On the way the sums are stored beside it, every so many seconds.

        `on_progress` hears how many of this process's examples are done, and how many there are. Once `stopped` says
        so, the sums are stored after the batch at hand, and `Interrupted` is raised.
        """
        require_writable_folder(output)
        own = self.own_batches
        total = sum(map(len, own))
        with self._begun() as estimation:
            base = self.model.base(estimation.covered)
            partial = PartialFile(_partial_path(output), "an estimate", self._request(estimation, base), every)
            done = partial.restore(estimation) if resume else partial.require_absent()
            on_progress(estimation.examples, total)
            coming = batches(self.model, [(self.split, self.task.name)], [(0, examples) for examples in own[done:]])
            for number, (examples, batch) in enumerate(zip(own[done:], coming, strict=True), start=done + 1):
                estimation.take(to_device(batch, device_of(self.wanted)), examples)
                on_progress(estimation.examples, total)
                if stopped():
                    partial.keep(estimation, number, now=True)
                    raise Interrupted
                partial.keep(estimation, number)
            curvature = finish_curvature(estimation, self.options, base, self.model.function, self._source())
        if self.options.compress:
            curvature, self.report = compress_result(curvature, self.options)
        if distributed.rank() == 0:
            curvature.save(output)
        distributed.barrier()
        partial.remove()
        return curvature

    def forecast(self) -> Forecast:
        """What it would consist of and cost. One batch is run for it."""
        numbers = self.numbers[: self.batch_size]
        with self._begun() as estimation:
            start = time.perf_counter()
            estimation.take(self._batch(numbers), numbers)
            seconds = time.perf_counter() - start
            module = self.model.module
            kept = kept_for_backward(module, self.model.forward, self._batch(numbers[:1]), len(numbers))
        blocks = estimation.forecasts()
        return Forecast(
            blocks=blocks,
            frozen=tuple(name for name, _ in module.named_parameters() if name not in self.wanted),
            unused=estimation.plan.unused,
            examples=len(self.numbers),
            batches=len(self.own_batches),
            bytes=sum(block.bytes for block in blocks),
            seconds=seconds * len(self.own_batches),
            peak_memory=weight_bytes(module) + estimation.nbytes + kept,
        )

    @contextmanager
    def _begun(self) -> Iterator[CurvatureAccumulator]:
        first = self._batch(self.numbers[: self.batch_size])
        with eval_mode(self.model.module, self.wanted):
            yield begin_accumulation(self.model.forward, first, self.wanted, self.options, self.params, self.numbers[0])

    def _batch(self, numbers: Iterable[int]) -> ModelInput:
        prepared = self.model.prepare([self.split[number] for number in numbers], self.task.name)
        moved: ModelInput = to_device(prepared, device_of(self.wanted))
        return moved

    def _request(self, estimation: CurvatureAccumulator, base: Base) -> dict[str, Any]:
        """What must be the same for sums to be added to each other."""
        model = self.model
        blocks = [(block.name, block.structure) for block in estimation.plan.blocks]
        return {
            **asdict(self.options),
            "model": f"{model.family} {model.name}",
            "weights": base.sha256,
            "preprocessing": model.preprocessing,
            "task": self.task.name,
            "data": f"{self.split.source.dataset}, {self.split_name} of {len(self.split)} examples",
            "data_content": fingerprint(model, self.split, self.task.name, self.numbers),
            "examples": len(self.numbers),
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
            examples=len(self.numbers),
            dataset_size=len(self.split),
        )


def _partial_path(output: Path) -> Path:
    of = f"-{distributed.rank()}-of-{distributed.world_size()}" if distributed.world_size() > 1 else ""
    return output.with_name(f"{output.name}.partial{of}")
