"""Each task's curvature, and the others' merged for it.

Each task's vector, in each arm, and an arm's vectors added up.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kfacpack.estimation.options import EstimateOptions, EstimateStructure
from kfacpack.estimation.task_estimate import TaskEstimate
from kfacpack.experiments.stage import (
    SealedStage,
    Stage,
    StageProgress,
    command,
    model_options,
    task_data_option,
    task_options,
)
from kfacpack.format.reader import Bundle
from kfacpack.merging.merge import merge_and_report
from kfacpack.merging.rules import RULES
from kfacpack.tasks.task import parse_count
from kfacpack.training.data_penalty import DataPenalty
from kfacpack.training.regimes import REGIMES
from kfacpack.training.regularizer import Regularizer
from kfacpack.training.settings import TrainingSettings
from kfacpack.training.trainer import Trainer
from kfacpack.vectors.add import add
from kfacpack.vectors.storage import VectorFile
from kfacpack.vectors.task_vector import TaskVector

if TYPE_CHECKING:
    from kfacpack.experiments.plan import ArmSection, TrainingSection
    from kfacpack.training.metrics import Metrics


@dataclass(frozen=True, eq=False)
class EstimateStage(SealedStage):
    kind: ClassVar[str] = "bundles"
    suffix: ClassVar[str] = ".kfac"
    opens = Bundle
    why: ClassVar[str] = "each task's curvature, from its own data: what its owner would publish"

    task: str
    structure: EstimateStructure
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}.{self.structure}.seed-{self.seed}"

    @property
    def options(self) -> EstimateOptions:
        said = self.shop.plan.curvature
        compress = said.compress if self.structure == "kronecker" else None
        return EstimateOptions(
            said.fisher, said.samples, said.probe, self.seed, structure=self.structure, compress=compress
        )

    def settings(self) -> dict[str, Any]:
        said = self.shop.plan.curvature
        return {
            **asdict(self.options),
            "task": self.task,
            "data": self.shop.data_key(self.task, "train"),
            "examples": said.examples,
            "batch_size": said.batch_size,
        }

    def make(self, watch: StageProgress) -> None:
        said = self.shop.plan.curvature
        job = TaskEstimate(self.shop.model, self.shop.task(self.task), self.options, said.examples, said.batch_size)
        job.run(self.path, resume=True, on_progress=watch.counted, stopped=watch.stopped)

    def cost(self) -> float:
        said = self.shop.plan.curvature
        return 8.0 * parse_count(said.examples, self.shop.task(self.task).sizes["train"]) * said.samples

    def command(self) -> str:
        said, options = self.shop.plan.curvature, self.options
        return command(
            "estimate",
            *model_options(self.shop.plan, self.root),
            *task_options(self.shop.plan, self.task, self.root),
            *("--examples", said.examples, "--fisher", options.fisher, "--samples", options.samples),
            *("--probe", options.probe, "--structure", options.structure, "--batch-size", said.batch_size),
            *(("--compress", options.compress) if options.compress else ()),
            *("--seed", self.seed, "-o", self.path.relative_to(self.root)),
        )


@dataclass(frozen=True, eq=False)
class MergeStage(SealedStage):
    kind: ClassVar[str] = "merged"
    suffix: ClassVar[str] = ".kfac"
    opens = Bundle
    why: ClassVar[str] = "for each task, the others' curvature in one bundle: what training must not disturb"

    without: str
    bundles: tuple[EstimateStage, ...]
    rule: str
    rank: int

    @property
    def name(self) -> str:
        first = self.bundles[0]
        rank = f"-{self.rank}" if self.rank > 1 else ""
        return f"not-{self.without}.{first.structure}.{self.rule}{rank}.seed-{first.seed}"

    @property
    def inputs(self) -> tuple[Stage, ...]:
        return self.bundles

    def settings(self) -> dict[str, Any]:
        return {"rule": self.rule, "rank": self.rank}

    def make(self, watch: StageProgress) -> None:
        paths, watch = [each.path for each in self.bundles], watch.of_one_piece()
        merged = merge_and_report(paths, self.rule, self.rank, progress=watch.counted)
        merged.curvature.save(self.path, progress=watch.counted)

    def cost(self) -> float:
        return 50.0 * len(self.bundles)

    def error(self) -> float | None:
        """Of the merged curvature, relative to the sum."""
        return RULES[self.rule](self.rank).error_in(Bundle(self.path).manifest.losses)

    def command(self) -> str:
        paths = [each.path.relative_to(self.root) for each in self.bundles]
        rank = ("--rank", self.rank) if self.rank > 1 else ()
        return command("merge", *paths, "--rule", self.rule, *rank, "-o", self.path.relative_to(self.root))


@dataclass(frozen=True, eq=False)
class TrainStage(SealedStage):
    kind: ClassVar[str] = "vectors"
    suffix: ClassVar[str] = ".safetensors"
    opens = VectorFile
    why: ClassVar[str] = "each task's vector, fine-tuned apart: with the others' curvature as a penalty, or without"

    task: str
    arm: str
    seed: int
    merged: MergeStage | None

    @property
    def name(self) -> str:
        return f"{self.task}.{self.arm}.seed-{self.seed}"

    @property
    def inputs(self) -> tuple[Stage, ...]:
        return (self.merged,) if self.merged else ()

    @property
    def _arm(self) -> ArmSection:
        return self.shop.plan.arms[self.arm]

    @property
    def _training(self) -> TrainingSection:
        return self.shop.plan.training_of(self.arm)

    @property
    def _held(self) -> tuple[str, ...]:
        """The tasks whose data is the penalty, if it is data."""
        return tuple(task.name for task in self.shop.plan.others(self.task)) if self._arm.penalty == "data" else ()

    def settings(self) -> dict[str, Any]:
        return {
            **self._training.model_dump(),
            "task": self.task,
            "seed": self.seed,
            "head": self.shop.plan.model.head,
            "data": self.shop.data_key(self.task, "train"),
            "strength": None if self._arm.penalty == "none" else self._arm.lam,
            "held": {task: self.shop.data_key(task, "train") for task in self._held},
        }

    def make(self, watch: StageProgress) -> None:
        said, arm, shop = self._training, self._arm, self.shop
        settings = TrainingSettings(
            steps=said.steps,
            batch_size=said.batch_size,
            lr=said.lr,
            warmup=said.warmup,
            weight_decay=said.weight_decay,
            seed=self.seed,
        )
        others = [shop.task(name) for name in self._held]
        job = Trainer(
            REGIMES[said.regime](shop.model),
            shop.task(self.task),
            shop.head(self.task),
            settings,
            Regularizer(self.merged.path, arm.lam) if self.merged else None,
            DataPenalty(others, arm.lam, said.batch_size, self.seed) if others else None,
        )

        def progress(metrics: Metrics, steps: int) -> None:
            watch.progress(metrics.step, steps, f"loss {metrics.loss:.2f}, accuracy {metrics.accuracy:.0%}")

        job.run(self.path, resume=True, on_progress=progress, stopped=watch.stopped)

    def cost(self) -> float:
        passes = 5.0 if self._training.regime == "linear" else 3.0
        return passes * self._training.steps * self._training.batch_size * (2 if self._held else 1)

    def command(self) -> str:
        said, plan = self._training, self.shop.plan
        penalty: tuple[object, ...] = ()
        if self.merged:
            penalty = ("--reg", self.merged.path.relative_to(self.root), "--strength", self._arm.lam)
        elif self._held:
            named = [task_data_option(plan, name, self.root) for name in self._held]
            penalty = (*(word for each in named for word in ("--reg-data", each)), "--strength", self._arm.lam)
        return command(
            "train",
            *model_options(plan, self.root),
            *task_options(plan, self.task, self.root),
            *(("--head", plan.model.head) if plan.model.head != "auto" else ()),
            *(("--regime", said.regime) if said.regime != "linear" else ()),
            *("--steps", said.steps, "--batch-size", said.batch_size, "--warmup", said.warmup),
            *("--weight-decay", said.weight_decay, *(("--lr", said.lr) if said.lr else ())),
            *penalty,
            *("--seed", self.seed, "-o", self.path.relative_to(self.root)),
        )


@dataclass(frozen=True, eq=False)
class AddStage(SealedStage):
    kind: ClassVar[str] = "sums"
    suffix: ClassVar[str] = ".safetensors"
    opens = VectorFile
    why: ClassVar[str] = "all tasks' vectors in one, as they are (α = 1)"

    vectors: tuple[TrainStage, ...]
    method: str

    @property
    def name(self) -> str:
        first = self.vectors[0]
        return f"{self.method}.{first.arm}.seed-{first.seed}"

    @property
    def inputs(self) -> tuple[Stage, ...]:
        return self.vectors

    def settings(self) -> dict[str, Any]:
        return {"method": self.method}

    def make(self, watch: StageProgress) -> None:
        vectors = [TaskVector.load(each.path) for each in self.vectors]
        add(vectors, self.method).save(self.path, progress=watch.of_one_piece().counted)

    def cost(self) -> float:
        return 20.0 * len(self.vectors)

    def command(self) -> str:
        paths = [each.path.relative_to(self.root) for each in self.vectors]
        return command("add", *paths, "--method", self.method, "-o", self.path.relative_to(self.root))
