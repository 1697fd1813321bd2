"""Stages that write bundles, compressed bundles, merged bundles, task vectors and merged task vectors."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kfacpack.compression.compress import choose_codecs, compress_with
from kfacpack.curvature.curvature import load
from kfacpack.estimation.options import EstimateOptions
from kfacpack.estimation.task_estimate import TaskEstimate
from kfacpack.experiments.stage import (
    BundleStage,
    Stage,
    StageProgress,
    VectorStage,
    command,
    command_path,
    model_options,
    optional,
    params_options,
    params_setting,
    task_data_option,
    task_options,
)
from kfacpack.format.manifest import EstimateStructure
from kfacpack.format.reader import Bundle
from kfacpack.format.reference import is_reference
from kfacpack.merging.merge import merge_and_report
from kfacpack.merging.rules import RULES
from kfacpack.tasks.task import parse_count
from kfacpack.training.optimizer import TrainingSettings
from kfacpack.training.train import build_trainer, uses_autocast
from kfacpack.vectors.add import add
from kfacpack.vectors.task_vector import TaskVector

if TYPE_CHECKING:
    from kfacpack.experiments.plan_sections import ArmSection, CurvatureSection, MethodSection, TrainingSection
    from kfacpack.training.metrics import Metrics


@dataclass(frozen=True, eq=False)
class EstimateStage(BundleStage):
    """Estimates the curvature of one task."""

    kind: ClassVar[str] = "bundles"
    purpose: ClassVar[str] = "the curvature of each task, estimated on the data of the task"

    task: str
    structure: EstimateStructure
    seed: int
    section: CurvatureSection
    """Settings for the estimate, from the plan or from an arm."""

    @property
    def name(self) -> str:
        """Name of the stage, used as the start of the file name."""
        return f"{self.task}.{self.variant}"

    @property
    def variant(self) -> str:
        """Part of the file name: structure, seed, and settings that differ from the plan's `curvature` section."""
        usual = self.context.plan.curvature.model_dump()
        others = [f".{key}-{value}" for key, value in self.section.model_dump().items() if value != usual[key]]
        return f"{self.structure}.seed-{self.seed}{''.join(others)}"

    @property
    def options(self) -> EstimateOptions:
        """Options for the estimate."""
        section = self.section
        compress = section.compress if self.structure == "kronecker" else None
        return EstimateOptions(
            section.fisher,
            section.samples,
            section.probe,
            self.seed,
            structure=self.structure,
            compress=compress,
            metric=section.metric,
        )

    def settings(self) -> dict[str, Any]:
        """Returns the settings that determine the content of the output file."""
        section = self.section
        return {
            **asdict(self.options),
            "task": self.task,
            "data": self.context.data_key(self.task, "train"),
            "examples": section.examples,
            "batch_size": section.batch_size,
            **params_setting(self.context.plan),
        }

    def make(self, monitor: StageProgress) -> None:
        """Computes the output and writes it to `path`."""
        section = self.section
        job = TaskEstimate(
            self.context.model,
            self.context.task(self.task),
            self.options,
            section.examples,
            section.batch_size,
            params=self.context.plan.model.params,
        )
        job.run(self.path, resume=True, on_progress=monitor.report, stopped=monitor.stopped)

    def cost(self) -> float:
        """Returns the approximate cost of the stage, measured in forward passes on one example."""
        section = self.section
        probes = self.context.model.function.width if section.fisher == "exact" else section.samples
        return 8.0 * parse_count(section.examples, self.context.task(self.task).sizes["train"]) * probes

    def command(self) -> str:
        """Returns the `kfacpack` command that writes the same file as this stage."""
        section, options = self.section, self.options
        return command(
            "estimate",
            *model_options(self.context.plan, self.root),
            *task_options(self.context.plan, self.task, self.root),
            *("--examples", section.examples, "--fisher", options.fisher, "--samples", options.samples),
            *("--probe", options.probe, "--structure", options.structure, "--batch-size", section.batch_size),
            *optional("--compress", options.compress),
            *optional("--metric", options.metric if options.metric != "l2" else None),
            *params_options(self.context.plan),
            *("--seed", self.seed, "-o", self.file),
        )


@dataclass(frozen=True, eq=False)
class CompressStage(BundleStage):
    """Compresses the bundle of one task, for an arm or a merge method that uses compressed bundles."""

    kind: ClassVar[str] = "compressed"
    purpose: ClassVar[str] = "the compressed bundle of each task"

    bundle: EstimateStage
    codec: str
    """The codec or, if `is_budget` is true, the maximum size of the file, such as `70MB`."""
    is_budget: bool = False

    @property
    def name(self) -> str:
        """Name of the stage, used as the start of the file name."""
        return f"{self.bundle.name}.{self.codec}"

    @property
    def task(self) -> str:
        """The task whose curvature the bundle contains."""
        return self.bundle.task

    @property
    def structure(self) -> EstimateStructure:
        """The structure of the bundle, such as `kronecker` or `diagonal`."""
        return self.bundle.structure

    @property
    def seed(self) -> int:
        """The seed used to estimate the bundle."""
        return self.bundle.seed

    @property
    def variant(self) -> str:
        """Part of the file name: the variant of the bundle, followed by the codec or the maximum size."""
        return f"{self.bundle.variant}.{self.codec}"

    @property
    def inputs(self) -> tuple[Stage, ...]:
        """The stage that writes the uncompressed bundle."""
        return (self.bundle,)

    def settings(self) -> dict[str, Any]:
        """Returns the codec or the maximum size, whichever is given."""
        return {"budget" if self.is_budget else "codec": self.codec}

    def make(self, monitor: StageProgress) -> None:
        """Computes the output and writes it to `path`."""
        curvature, report = load(self.bundle.path), monitor.interruptible().report
        spec, budget = (None, self.codec) if self.is_budget else (self.codec, None)
        compressed, _ = compress_with(curvature, choose_codecs(curvature, spec, budget, report), on_progress=report)
        compressed.save(self.path)

    def cost(self) -> float:
        """Returns the approximate cost of the stage, measured in forward passes on one example."""
        return 50.0

    def command(self) -> str:
        """Returns the `kfacpack` command that writes the same file as this stage."""
        codec = ("--budget", self.codec) if self.is_budget else (self.codec,)
        return command("compress", self.bundle.file, *codec, "-o", self.file)


@dataclass(frozen=True, eq=False)
class MergeStage(BundleStage):
    """Merges the bundles of the tasks that an arm protects while the vector of another task is trained.

    An arm protects a task by penalising changes in the model's output on the examples of that task. By default, an arm
    protects all tasks of the plan except the task whose vector is trained.
    """

    kind: ClassVar[str] = "merged"
    purpose: ClassVar[str] = "for each task, the merged bundles of the other tasks"

    without: str
    """The task whose vector is trained."""
    bundles: tuple[EstimateStage | CompressStage, ...]
    rule: str
    rank: int

    @property
    def name(self) -> str:
        """Name of the stage, used as the start of the file name."""
        first = self.bundles[0]
        rank = f"-{self.rank}" if self.rank > 1 else ""
        protected = "" if len(self.bundles) > 1 else f"{first.task}-"
        return f"{protected}not-{self.without}.{self.rule}{rank}.{first.variant}"

    @property
    def inputs(self) -> tuple[Stage, ...]:
        """Stages whose files this stage reads."""
        return self.bundles

    def settings(self) -> dict[str, Any]:
        """Returns the settings that determine the content of the output file."""
        return {"rule": self.rule, "rank": self.rank}

    def make(self, monitor: StageProgress) -> None:
        """Computes the output and writes it to `path`."""
        paths, monitor = [bundle.path for bundle in self.bundles], monitor.interruptible()
        merged = merge_and_report(paths, self.rule, rank=self.rank, on_progress=monitor.report)
        merged.curvature.save(self.path, on_progress=monitor.report)

    def cost(self) -> float:
        """Returns the approximate cost of the stage, measured in forward passes on one example."""
        return 50.0 * len(self.bundles)

    def error(self) -> float | None:
        """Returns the relative error of the merged curvature, or None if the error was not measured.

        The error is measured in the Frobenius norm, relative to the exact sum of the curvatures.
        """
        return RULES[self.rule](self.rank).error_in(Bundle(self.path).manifest.losses)

    def command(self) -> str:
        """Returns the `kfacpack` command that writes the same file as this stage."""
        files = [bundle.file for bundle in self.bundles]
        rank = optional("--rank", self.rank, default=1)
        return command("merge", *files, "--rule", self.rule, *rank, "-o", self.file)


@dataclass(frozen=True, eq=False)
class TaskVectorStage(VectorStage):
    """Base class of stages that write the task vector of one task for one arm of the plan."""

    has_head: ClassVar[bool] = True
    """Whether the vector file contains the head of the task."""

    task: str
    arm: str
    seed: int

    @property
    def name(self) -> str:
        """Name of the stage, used as the start of the file name."""
        return f"{self.task}.{self.variant}"

    @property
    def variant(self) -> str:
        """Part of the file name: the arm and the seed."""
        return f"{self.arm}.seed-{self.seed}"

    @property
    def _arm(self) -> ArmSection:
        return self.context.plan.arms[self.arm]


@dataclass(frozen=True, eq=False)
class TrainStage(TaskVectorStage):
    """Trains the task vector of one task for one arm of the plan."""

    kind: ClassVar[str] = "vectors"
    purpose: ClassVar[str] = "the trained task vector for each task and arm"

    merged: MergeStage | None
    mask: MergeStage | None = None
    """Stage that writes the bundle with which the regime `sparse` selects the weights to train."""

    @property
    def inputs(self) -> tuple[Stage, ...]:
        """Stages whose files this stage reads."""
        return tuple(stage for stage in (self.merged, self.mask) if stage)

    @property
    def _training(self) -> TrainingSection:
        return self.context.plan.training_of(self.arm)

    @property
    def _protected(self) -> tuple[str, ...]:
        """Tasks on whose data the drift is penalised; empty unless the penalty of the arm is `data`."""
        return self.context.plan.protected(self.arm, self.task) if self._arm.penalty == "data" else ()

    def settings(self) -> dict[str, Any]:
        """Returns the settings that determine the content of the output file."""
        return {
            **self._training.key,
            **({"preset": self._arm.preset} if self._arm.preset else {}),
            **({"every": self._arm.every} if self._arm.every > 1 else {}),
            "task": self.task,
            "seed": self.seed,
            "head": self.context.plan.model.head,
            "data": self.context.data_key(self.task, "train"),
            "strength": None if self._arm.penalty == "none" else self._arm.lam,
            "held": {task: self.context.data_key(task, "train") for task in self._protected},
            **({"autocast": True} if uses_autocast(self.context.model) else {}),
            **params_setting(self.context.plan),
        }

    def make(self, monitor: StageProgress) -> None:
        """Trains the vector, as `kfacpack train` does."""
        section, arm, context = self._training, self._arm, self.context
        trainer = build_trainer(
            context.model,
            context.task(self.task),
            settings=TrainingSettings(
                steps=section.steps,
                batch_size=section.batch_size,
                lr=section.lr,
                warmup=section.warmup,
                weight_decay=section.weight_decay,
                clip=section.clip,
                seed=self.seed,
            ),
            reg=[self.merged.path] if self.merged else (),
            reg_data=[context.task(name) for name in self._protected],
            strength=arm.lam if self.merged or self._protected else None,
            preset=arm.preset,
            reg_every=arm.every,
            regime=section.regime,
            mask=[self.mask.path] if self.mask else (),
            keep=section.keep,
            params=context.plan.model.params,
            head=context.head(self.task),
            compile=section.compile,
        )

        def progress(metrics: Metrics, steps: int) -> None:
            monitor.progress(metrics.step, steps, f"loss {metrics.loss:.2f}, accuracy {metrics.accuracy:.0%}")

        trainer.run(self.path, resume=True, on_progress=progress, stopped=monitor.stopped)

    def cost(self) -> float:
        """Returns the approximate cost of the stage, measured in forward passes on one example."""
        passes = 5.0 if self._training.regime == "linear" else 3.0
        return passes * self._training.steps * self._training.batch_size * (2 if self._protected else 1)

    def command(self) -> str:
        """Returns the `kfacpack` command that writes the same file as this stage."""
        section, plan = self._training, self.context.plan
        penalty: tuple[object, ...] = ()
        if self.merged:
            penalty = ("--reg", self.merged.file, "--strength", self._arm.lam)
            penalty += (*optional("--preset", self._arm.preset), *optional("--reg-every", self._arm.every, default=1))
        elif self._protected:
            values = [task_data_option(plan, name, self.root) for name in self._protected]
            penalty = (*(word for value in values for word in ("--reg-data", value)), "--strength", self._arm.lam)
        return command(
            "train",
            *model_options(plan, self.root),
            *task_options(plan, self.task, self.root),
            *optional("--head", plan.model.head, default="auto"),
            *optional("--regime", section.regime, default="linear"),
            *("--steps", section.steps, "--batch-size", section.batch_size, "--warmup", section.warmup),
            *("--weight-decay", section.weight_decay, *optional("--lr", section.lr), *optional("--clip", section.clip)),
            *(("--mask", self.mask.file) if self.mask else ()),
            *optional("--keep", section.keep),
            *params_options(plan),
            *penalty,
            *(("--autocast",) if uses_autocast(self.context.model) else ()),
            *(("--compile",) if section.compile else ()),
            *("--seed", self.seed, "-o", self.file),
        )


@dataclass(frozen=True, eq=False)
class ExtractStage(TaskVectorStage):
    """Extracts the task vector of one task from a fine-tuned checkpoint or an adapter."""

    kind: ClassVar[str] = "extracted"
    purpose: ClassVar[str] = "the task vector for each task and arm, extracted from a checkpoint"
    has_head: ClassVar[bool] = False

    @property
    def _checkpoint(self) -> str:
        return (self._arm.vectors or {})[self.task]

    def settings(self) -> dict[str, Any]:
        """Returns the task and the key of the checkpoint; see `RunContext.checkpoint_key`."""
        return {"task": self.task, "checkpoint": self.context.checkpoint_key(self.arm, self.task)}

    def make(self, monitor: StageProgress) -> None:
        """Extracts the vector, as `kfacpack extract` does."""
        context, report = self.context, monitor.interruptible().report
        with context.plan.at("arms", self.arm, "vectors", self.task):
            source = self._checkpoint if is_reference(self._checkpoint) else context.plan.resolve_path(self._checkpoint)
            TaskVector.from_checkpoint(context.model, source, task=self.task, on_progress=report).save(self.path)

    def cost(self) -> float:
        """Returns the approximate cost of the stage, measured in forward passes on one example."""
        return 20.0

    def command(self) -> str:
        """Returns the `kfacpack` command that writes the same file as this stage."""
        plan, source = self.context.plan, self._checkpoint
        path = source if is_reference(source) else command_path(plan, source, self.root)
        return command("extract", path, *model_options(plan, self.root), "--task", self.task, "-o", self.file)


@dataclass(frozen=True, eq=False)
class AddStage(VectorStage):
    """Merges the task vectors of an arm with one merge method."""

    kind: ClassVar[str] = "sums"
    purpose: ClassVar[str] = "the merged task vector for each arm and merge method"

    vectors: tuple[TaskVectorStage, ...]
    method: MethodSection
    bundles: tuple[EstimateStage | CompressStage, ...] = ()
    """Stages that write the bundles of all tasks; empty if the method needs no bundles."""

    @property
    def arm(self) -> str:
        """Name of the arm."""
        return self.vectors[0].arm

    @property
    def has_head(self) -> bool:
        """Whether the merged vector's file contains the heads of the tasks."""
        return self.vectors[0].has_head

    @property
    def name(self) -> str:
        """Name of the stage, used as the start of the file name."""
        return f"{self.method.label}.{self.vectors[0].variant}"

    @property
    def inputs(self) -> tuple[Stage, ...]:
        """Stages whose files this stage reads."""
        return (*self.vectors, *self.bundles)

    def settings(self) -> dict[str, Any]:
        """Returns the settings that determine the content of the output file."""
        # Defaults are included, so that a file written by a version with other defaults is not reused.
        settings = self.method.all_settings
        return {"method": self.method.name, **({"settings": settings} if settings else {})}

    def make(self, monitor: StageProgress) -> None:
        """Computes the output and writes it to `path`."""
        vectors = [TaskVector.load(stage.path) for stage in self.vectors]
        report = monitor.interruptible().report
        bundles = [bundle.path for bundle in self.bundles] or None
        total = add(vectors, self.method.name, bundles=bundles, on_progress=report, **self.method.settings)
        total.save(self.path, on_progress=report)

    def cost(self) -> float:
        """Returns the approximate cost of the stage, measured in forward passes on one example."""
        return 20.0 * len(self.vectors) + 400.0 * len(self.bundles)

    def command(self) -> str:
        """Returns the `kfacpack` command that writes the same file as this stage."""
        files = [vector.file for vector in self.vectors]
        bundles = (word for bundle in self.bundles for word in ("--bundle", bundle.file))
        settings = (word for key, value in self.method.settings.items() for word in _setting_option(key, value))
        return command("add", *files, "--method", self.method.name, *settings, *bundles, "-o", self.file)


def _setting_option(key: str, value: object) -> tuple[object, ...]:
    """Converts a setting of a merge method to an option of `kfacpack add`, as a tuple of words.

    `True` becomes a flag without a value. `False` becomes an empty tuple.
    """
    flag = f"--{key.replace('_', '-')}"
    return ((flag,) if value else ()) if isinstance(value, bool) else (flag, value)
