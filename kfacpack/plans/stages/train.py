"""Each task's vector, in each arm, and an arm's vectors added up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kfacpack.plans.commands import command, for_data, for_model, for_task
from kfacpack.plans.stages.base import Sealed, Stage, Watch
from kfacpack.training.drift import Drift
from kfacpack.training.job import Job
from kfacpack.training.regimes import REGIMES
from kfacpack.training.regularizer import Regularizer
from kfacpack.training.settings import Settings
from kfacpack.vectors.add import add
from kfacpack.vectors.leaf import VectorFile
from kfacpack.vectors.vector import TaskVector

if TYPE_CHECKING:
    from kfacpack.plans.plan import ArmPart, TrainingPart
    from kfacpack.plans.stages.curvature import Merge
    from kfacpack.training.metrics import Metrics


@dataclass(frozen=True, eq=False)
class Train(Sealed):
    kind: ClassVar[str] = "vectors"
    suffix: ClassVar[str] = ".safetensors"
    opens = VectorFile
    why: ClassVar[str] = "each task's vector, fine-tuned apart: with the others' curvature as a penalty, or without"

    task: str
    arm: str
    seed: int
    merged: Merge | None

    @property
    def name(self) -> str:
        return f"{self.task}.{self.arm}.seed-{self.seed}"

    @property
    def inputs(self) -> tuple[Stage, ...]:
        return (self.merged,) if self.merged else ()

    @property
    def _arm(self) -> ArmPart:
        return self.shop.plan.arms[self.arm]

    @property
    def _training(self) -> TrainingPart:
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

    def make(self, watch: Watch) -> None:
        said, arm, shop = self._training, self._arm, self.shop
        settings = Settings(
            steps=said.steps,
            batch_size=said.batch_size,
            lr=said.lr,
            warmup=said.warmup,
            weight_decay=said.weight_decay,
            seed=self.seed,
        )
        others = [shop.task(name) for name in self._held]
        job = Job(
            REGIMES[said.regime](shop.model),
            shop.task(self.task),
            shop.head(self.task),
            settings,
            Regularizer(self.merged.path, arm.lam) if self.merged else None,
            Drift(others, arm.lam, said.batch_size, self.seed) if others else None,
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
            named = [for_data(plan, name, self.root) for name in self._held]
            penalty = (*(word for each in named for word in ("--reg-data", each)), "--strength", self._arm.lam)
        return command(
            "train",
            *for_model(plan, self.root),
            *for_task(plan, self.task, self.root),
            *(("--head", plan.model.head) if plan.model.head != "auto" else ()),
            *(("--regime", said.regime) if said.regime != "linear" else ()),
            *("--steps", said.steps, "--batch-size", said.batch_size, "--warmup", said.warmup),
            *("--weight-decay", said.weight_decay, *(("--lr", said.lr) if said.lr else ())),
            *penalty,
            *("--seed", self.seed, "-o", self.path.relative_to(self.root)),
        )


@dataclass(frozen=True, eq=False)
class Add(Sealed):
    kind: ClassVar[str] = "sums"
    suffix: ClassVar[str] = ".safetensors"
    opens = VectorFile
    why: ClassVar[str] = "all tasks' vectors in one, as they are (α = 1)"

    vectors: tuple[Train, ...]
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

    def make(self, watch: Watch) -> None:
        vectors = [TaskVector.load(each.path) for each in self.vectors]
        add(vectors, self.method).save(self.path, progress=watch.of_one_piece().counted)

    def cost(self) -> float:
        return 20.0 * len(self.vectors)

    def command(self) -> str:
        paths = [each.path.relative_to(self.root) for each in self.vectors]
        return command("add", *paths, "--method", self.method, "-o", self.path.relative_to(self.root))
