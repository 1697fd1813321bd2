"""Checks all stages of a plan without weights or data, and forecasts file sizes and the time on a given GPU.

The model has random weights. Published tasks are replaced by stand-ins with as many examples and classes as the data on
the Hub, but with blank images or dummy texts. All stages of the plan are built with this model and these tasks,
including the keys, commands and costs of the stages. File sizes are computed from the shapes of tensors. Times are
estimated from the number of operations in a forward pass and the speed of the GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from kfacpack.compression.codecs import CodecChain, NumberCodec
from kfacpack.curvature.matrices.components import nbytes_of
from kfacpack.curvature.matrices.dense import Dense
from kfacpack.demo import EMBEDDED_MODELS
from kfacpack.errors import KfacpackError, printable
from kfacpack.estimation.forecast import EFFICIENCY, find_gpu
from kfacpack.estimation.task_estimate import TaskEstimate
from kfacpack.experiments.artifact_stages import AddStage, CompressStage, EstimateStage, MergeStage, TaskVectorStage
from kfacpack.experiments.run import RunContext
from kfacpack.experiments.stage_graph import StageGraph
from kfacpack.format.units import parse_size
from kfacpack.models.families import load_model
from kfacpack.models.functional import call_model
from kfacpack.tasks.registry import PUBLISHED, TASKS, load_task
from kfacpack.tasks.task import ClassSplitTask, DataOrigin, parse_class_split
from kfacpack.training.regimes import KEEP, REGIMES

if TYPE_CHECKING:
    from kfacpack.estimation.accumulator import BlockForecast
    from kfacpack.estimation.forecast import Forecast
    from kfacpack.experiments.plan import Plan
    from kfacpack.experiments.stage import Stage
    from kfacpack.format.container import Spec
    from kfacpack.models.model import Model
    from kfacpack.tasks.published_tasks import PublishedTask
    from kfacpack.tasks.task import Example, Task


_T5_SHAPES = {
    "google-t5/t5-base": {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "google-t5/t5-small": {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
}
_WORDS = 64
"""Total number of words in the texts of a stand-in example."""
_IMAGE_SIZE = 256


@dataclass
class StandInSplit:
    """Stand-in for a split of a published task. It has the same size, but contains blank images or dummy texts."""

    source: DataOrigin
    size: int
    classes: int
    inputs: tuple[str, ...]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Example:
        if self.inputs == ("image",):
            from PIL import Image

            return {"image": Image.new("RGB", (_IMAGE_SIZE, _IMAGE_SIZE))}
        return dict.fromkeys(self.inputs, " ".join(["word"] * (_WORDS // len(self.inputs))))

    def label(self, index: int) -> int:
        """Returns the class of an example."""
        return index % self.classes


@dataclass(frozen=True)
class StandInTask:
    """Stand-in that replaces a published task and needs no data. Implements the `Task` protocol."""

    definition: PublishedTask

    license = None

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.definition.name

    @property
    def classes(self) -> tuple[str, ...]:
        """Placeholders for the class names."""
        return tuple(f"class {number}" for number in range(self.definition.classes))

    @property
    def sizes(self) -> Mapping[str, int]:
        """Number of examples in each split of the published task."""
        return self.definition.sizes

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        return tuple(self.sizes)

    @property
    def templates(self) -> tuple[str, ...]:
        """Prompt templates."""
        return self.definition.templates

    @property
    def source(self) -> str:
        """Repository of the published task on the Hub."""
        return self.definition.repository

    def notices(self, model: str) -> tuple[str, ...]:
        """Returns an empty tuple, because stand-ins have no notices."""
        return ()

    def listing(self, split: str) -> list[tuple[str, str]]:
        """Returns an empty list, because stand-ins have no files."""
        return []

    def split(self, name: str) -> StandInSplit:
        """Returns the stand-in for a split."""
        if name not in self.sizes:
            raise KfacpackError(f"{self.name}: no split {printable(name)!r}; expected one of {', '.join(self.sizes)}")
        inputs = tuple(self.definition.inputs)
        return StandInSplit(DataOrigin(self.source, name), self.sizes[name], self.definition.classes, inputs)


def stand_in_task(name: str, data: str | None) -> Task:
    """Returns a task without downloading data: an embedded task, or a stand-in for a published task.

    Args:
        name: Name of the task, possibly a class split.
        data: Location of the task's data as given in the plan; None for a registered task.

    Raises:
        KfacpackError: If the task is neither embedded nor published.
    """
    if part := parse_class_split(name):
        return ClassSplitTask(stand_in_task(part.whole, data), part.k, part.n)
    if data is None and name in TASKS:
        return load_task(name)
    if name not in PUBLISHED:
        problem = "the number of examples is unknown without the data"
        remedy = "--gpu supports only embedded and published tasks; omit --gpu"
        raise KfacpackError(f"{printable(name)}: {problem}. {remedy}")
    return StandInTask(PUBLISHED[name])


def _write_t5(folder: Path, shape: Mapping[str, Any]) -> None:
    """Writes the config of a T5 model, and a tokenizer that maps all words except `class0` to `class7` to `<unk>`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, T5Config

    words = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {f"class{number}": number + 3 for number in range(8)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    settings: dict[str, Any] = {**shape, "vocab_size": 32128, "decoder_start_token_id": 0}
    T5Config(**settings).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>").save_pretrained(folder)


class OfflineContext(RunContext):
    """A `RunContext` with random weights and with stand-ins for published tasks."""

    @cached_property
    def model(self) -> Model:
        """The model of the plan, with random weights."""
        section = self.plan.model
        with self.plan.at("model"), TemporaryDirectory() as folder:
            name, weights = section.name, None if section.name in EMBEDDED_MODELS else "random"
            if name.partition(":")[2] in _T5_SHAPES:
                _write_t5(Path(folder), _T5_SHAPES[name.partition(":")[2]])
                name = f"t5:{folder}"
            return load_model(
                name, weights=weights, image_size=section.image_size, device=self.device, prompts=section.prompts
            )

    @cached_property
    def model_key(self) -> str:
        """The name of the model, in place of a hash of its weights."""
        return self.plan.model.name

    def task(self, name: str) -> Task:
        """Returns the task `name` of the plan, or its stand-in."""
        if name not in self._tasks:
            with self.plan.at(*self.plan.task_location(name)):
                self._tasks[name] = stand_in_task(name, self.plan.task(name).data)
        return self._tasks[name]

    def data_key(self, task: str, split: str) -> str:
        """Returns the name of a split, in place of a hash of its content."""
        return f"{task} {split}"


@dataclass(frozen=True)
class KindForecast:
    """Forecast for the stages of one kind."""

    kind: str
    stages: int
    """Number of stages of this kind."""
    bytes: int
    """Total size in bytes of the files that these stages write."""
    hours: float
    """Total time of these stages in hours on one GPU."""


@dataclass(frozen=True)
class OfflineForecast:
    """The result of an offline check, which `kfacpack run --dry-run --gpu NAME --json` prints as JSON."""

    model: str
    parameters: int
    """Number of weights that the regime `linear` trains."""
    blocks: int
    """Number of blocks in a bundle."""
    largest_side: int
    """Side length of the largest matrix in a bundle."""
    forward_flops: int
    """Number of floating-point operations in a forward pass on one example."""
    gpu: str
    kinds: tuple[KindForecast, ...]
    bytes: int
    """Total size of all files in bytes."""
    hours: float
    """Total time of all stages in hours on one GPU."""


class _Sizes:
    """Computes the sizes of the stages' files from the shapes of the tensors in them."""

    def __init__(self, context: RunContext):
        self._context = context
        self._forecasts: dict[str, Forecast] = {}

    def forecast(self, stage: EstimateStage) -> Forecast:
        """Returns a forecast of the blocks of a bundle.

        The forecast assumes one example and one probe, because the sizes of the blocks depend on neither number.
        """
        if stage.structure not in self._forecasts:
            options = replace(stage.options, fisher="mc", samples=1, compress=None)
            task = self._context.task(stage.task)
            self._forecasts[stage.structure] = TaskEstimate(self._context.model, task, options, "1", 1).forecast()
        return self._forecasts[stage.structure]

    def of(self, stage: Stage) -> int:
        """Returns the size of a stage's file in bytes, or 0 for a measurement, whose file is small."""
        if isinstance(stage, EstimateStage):
            return self._bundle(stage, stage.options.compress, None)
        if isinstance(stage, CompressStage):
            codec, budget = (None, stage.codec) if stage.is_budget else (stage.codec, None)
            return self._bundle(stage.bundle, codec, budget)
        if isinstance(stage, MergeStage):
            terms = {"stack": len(stage.bundles), "optimal": min(stage.rank, len(stage.bundles))}.get(stage.rule, 1)
            return terms * self.of(stage.bundles[0])
        if isinstance(stage, TaskVectorStage | AddStage):
            return self._vector(stage.arm)
        return 0

    def _vector(self, arm: str) -> int:
        plan, training = self._context.plan, self._context.plan.training_of(arm)
        parameters = REGIMES[plan.regime_of(arm)](self._context.model).parameters
        size = sum(parameter.numel() for parameter in parameters.values())
        if plan.regime_of(arm) != "sparse":
            return 4 * size
        return int(4 * size * (training.keep or KEEP)) + size // 8

    def _bundle(self, stage: EstimateStage, codec: str | None, budget: str | None) -> int:
        blocks = self.forecast(stage).blocks
        if budget is not None:
            return parse_size(budget, 4 * sum(side**2 for block in blocks for side in matrix_sides(block)))
        if codec is None:
            return sum(block.bytes for block in blocks)
        chain = CodecChain.parse(codec)
        return sum(
            sum(encoded_bytes(chain, side) for side in matrix_sides(block))
            if block.structure == "kronecker"
            else block.bytes
            for block in blocks
        )


def matrix_sides(block: BlockForecast) -> list[int]:
    """Returns the side lengths of a block's symmetric matrices, except for matrices shared with an earlier block.

    Args:
        block: The block. Its size in bytes shows which of its matrices are not shared.
    """
    rows, columns = block.rows, block.columns
    candidates = [[rows, columns], [rows], [columns]] if block.structure == "kronecker" else [[rows * columns]]
    packed = (sides for sides in candidates if block.bytes == 4 * sum(n * (n + 1) // 2 for n in sides))
    return next(packed, [])


@cache
def encoded_bytes(chain: CodecChain, side: int) -> int:
    """Returns the size in bytes of a symmetric float32 matrix after compression by a chain of codecs.

    Args:
        chain: The chain of codecs. A structural codec that does not make the matrix smaller is skipped.
        side: Side length of the matrix.
    """
    triangle: dict[str, Spec] = {"data": ("F32", (side * (side + 1) // 2,))}
    encoded = chain.structure.specs(Dense.of(torch.zeros(side, side))) if chain.structure else None
    is_smaller = encoded is not None and sum(map(nbytes_of, encoded.values())) < nbytes_of(triangle["data"])
    specs: dict[str, Spec] = dict(encoded) if encoded is not None and is_smaller else triangle
    numbers = next((step.name for step in chain.steps if isinstance(step, NumberCodec)), None)
    if numbers is not None:
        specs["data"] = {"int8": "I8", "fp16": "F16", "bf16": "BF16"}[numbers], specs["data"][1]
    if numbers == "int8":
        specs["scale"] = "F32", (side,)
    return sum(map(nbytes_of, specs.values()))


def check_offline(plan: Plan, gpu: str) -> OfflineForecast:
    """Builds all stages of a plan without weights or data, and forecasts sizes and times.

    Args:
        plan: The plan.
        gpu: Name of a GPU that `find_gpu` knows.

    Returns:
        The sizes of the model, the bundles and the files, and the times of the stages.

    Raises:
        KfacpackError: If the GPU is unknown or a stage cannot be built. For an invalid setting of the plan, the message
            starts with the location of the setting.
    """
    known_gpu = find_gpu(gpu)
    context = OfflineContext(plan, torch.device("cpu"), 1)
    context.check()
    graph = StageGraph(context, Path("dry-run"))
    stages, sizes = graph.in_order(), _Sizes(context)
    flops = _forward_flops(context)
    seconds = flops / (EFFICIENCY * known_gpu.half)
    totals: dict[str, tuple[int, int, float]] = {}
    for stage in stages:
        json.dumps([stage.key, stage.command()])
        count, size, hours = totals.get(stage.kind, (0, 0, 0.0))
        totals[stage.kind] = count + 1, size + sizes.of(stage), hours + stage.cost() * seconds / 3600
    first = EstimateStage(context, graph.root, plan.tasks[0].name, "kronecker", plan.seeds[0], plan.curvature)
    blocks = sizes.forecast(first).blocks
    trained: Any = REGIMES["linear"](context.model).parameters.values()
    kinds = tuple(KindForecast(kind, *numbers) for kind, numbers in totals.items())
    return OfflineForecast(
        model=plan.model.name,
        parameters=sum(parameter.numel() for parameter in trained),
        blocks=len(blocks),
        largest_side=max(side for block in blocks for side in matrix_sides(block) or [1]),
        forward_flops=flops,
        gpu=known_gpu.name,
        kinds=kinds,
        bytes=sum(kind.bytes for kind in kinds),
        hours=sum(kind.hours for kind in kinds),
    )


def _forward_flops(context: RunContext) -> int:
    """Counts the floating-point operations in a forward pass on one example of the first task."""
    name = context.plan.tasks[0].name
    batch = context.model.prepare([context.task(name).split("test")[0]], name)
    # Gradients are enabled, because the counter does not count the fused attention that is used without gradients.
    with FlopCounterMode(display=False) as counter:
        call_model(context.model.forward, batch)
    return int(counter.get_total_flops())
