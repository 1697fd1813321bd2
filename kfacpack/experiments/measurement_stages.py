"""How well it went: the model by itself, each vector on its own task, and all of them added up, for every α.

Why it went so: where vectors move the model, whether they disturb each other, and whether bundles knew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kfacpack.curvature.curvature import load
from kfacpack.evaluation.accuracy import Score, score, scores
from kfacpack.evaluation.bundle_quality import drift, spectra
from kfacpack.evaluation.disentanglement import disentanglement
from kfacpack.evaluation.localisation import localisation
from kfacpack.evaluation.negation import negate
from kfacpack.evaluation.sweep import SelectionTask
from kfacpack.experiments.stage import MeasurementStage, Stage, StageProgress
from kfacpack.tasks.task import parse_count
from kfacpack.vectors.task_vector import TaskVector

if TYPE_CHECKING:
    from kfacpack.evaluation.accuracy import EvaluationSet
    from kfacpack.experiments.artifact_stages import AddStage, EstimateStage, TrainStage


@dataclass(frozen=True, eq=False)
class BaseAccuracyStage(MeasurementStage):
    kind: ClassVar[str] = "scores"
    why: ClassVar[str] = "how well everything does on the test examples"

    task: str

    @property
    def name(self) -> str:
        return f"{self.task}.base"

    def settings(self) -> dict[str, Any]:
        plan = self.shop.plan
        return {"what": "base", "head": plan.model.head, **evaluation_settings(self, [self.task], ["test", "train"])}

    def measure(self, watch: StageProgress) -> dict[str, Any]:
        shop = self.shop
        exam = shop.exam(self.task)
        size = shop.plan.evaluation.batch_size
        found = score(shop.model, shop.head(self.task), exam, batch_size=size, on_progress=watch.counted)
        return {"accuracy": found.accuracy, "examples": found.examples}

    def cost(self) -> float:
        return examples_of(self, self.task)


@dataclass(frozen=True, eq=False)
class SweepStage(MeasurementStage):
    """A vector on a task, for every α."""

    kind: ClassVar[str] = "scores"
    why: ClassVar[str] = BaseAccuracyStage.why

    vector: TrainStage | AddStage
    task: str
    alphas: tuple[float, ...]
    split: str = "test"

    @property
    def name(self) -> str:
        return f"{self.task}.{self.split}.{self.vector.name}"

    @property
    def inputs(self) -> tuple[Stage, ...]:
        return (self.vector,)

    def settings(self) -> dict[str, Any]:
        return {"what": "sweep", "alphas": list(self.alphas), **evaluation_settings(self, [self.task], [self.split])}

    def measure(self, watch: StageProgress) -> dict[str, Any]:
        shop, tau = self.shop, TaskVector.load(self.vector.path)
        found = scores(
            shop.model,
            tau.heads[self.task],
            shop.exam(self.task, self.split),
            tau,
            self.alphas,
            batch_size=shop.plan.evaluation.batch_size,
            on_progress=watch.counted,
        )
        return {
            "alphas": list(self.alphas),
            "correct": [each.correct for each in found],
            "examples": found[0].examples,
        }

    def cost(self) -> float:
        return 3.0 * examples_of(self, self.task, self.split)

    def scores(self) -> list[Score]:
        """At every α."""
        found = self.read()
        return [Score(correct, found["examples"]) for correct in found["correct"]]

    def at(self, alpha: float) -> Score:
        return self.scores()[self.alphas.index(alpha)]


@dataclass(frozen=True, eq=False)
class NegationStage(MeasurementStage):
    kind: ClassVar[str] = "negated"
    why: ClassVar[str] = "one task taken out of the model, and whether another one stays"

    vector: TrainStage
    control: str
    keep: float
    alphas: tuple[float, ...]

    @property
    def name(self) -> str:
        return self.vector.name

    @property
    def inputs(self) -> tuple[Stage, ...]:
        return (self.vector,)

    def settings(self) -> dict[str, Any]:
        tasks = [self.vector.task, self.control]
        return {
            "control": self.control,
            "keep": self.keep,
            "alphas": list(self.alphas),
            "head": self.shop.plan.model.head,
            **evaluation_settings(self, tasks, ["validation", "test", "train"]),
        }

    def measure(self, watch: StageProgress) -> dict[str, Any]:
        shop, task = self.shop, self.vector.task
        tau = TaskVector.load(self.vector.path)
        target, control = (
            SelectionTask(head, shop.exam(name, "validation"), shop.exam(name))
            for name, head in ((task, tau.heads[task]), (self.control, shop.head(self.control)))
        )
        return negate(
            shop.model,
            [target],
            control,
            tau,
            self.alphas,
            keep=self.keep,
            batch_size=shop.plan.evaluation.batch_size,
            on_progress=watch.counted,
        )

    def cost(self) -> float:
        tasks = (self.vector.task, self.control)
        return 3.0 * sum(examples_of(self, task, split) for task in tasks for split in ("validation", "test"))


def evaluation_settings(stage: Stage, tasks: Sequence[str], splits: Sequence[str]) -> dict[str, Any]:
    """What decides which examples are looked at."""
    shop = stage.shop
    data = {f"{task} {split}": shop.data_key(task, split) for task in tasks for split in splits}
    return {"examples": shop.plan.evaluation.examples, "data": data}


def examples_of(stage: Stage, task: str, split: str = "test") -> float:
    return len(stage.shop.exam(task, split).numbers)


@dataclass(frozen=True, eq=False)
class AnalysisStage(MeasurementStage):
    kind: ClassVar[str] = "understanding"
    why: ClassVar[str] = "where vectors move the model, and whether its curvature foretold it"

    vectors: tuple[TrainStage, ...]
    examples: str

    what: ClassVar[str]

    @property
    def name(self) -> str:
        first = self.vectors[0]
        return f"{self.what}.{first.arm}.seed-{first.seed}"

    @property
    def inputs(self) -> tuple[Stage, ...]:
        return self.vectors

    @property
    def tasks(self) -> list[str]:
        return [each.task for each in self.vectors]

    def settings(self) -> dict[str, Any]:
        return {"what": self.what, **evaluation_settings(self, self.tasks, ["test"]), "some": self.examples}

    def cost(self) -> float:
        return 3.0 * len(self.vectors) * sum(self._count(task) for task in self.tasks)

    def _count(self, task: str) -> int:
        return parse_count(self.examples, self.shop.task(task).sizes["test"])

    def how(self, watch: StageProgress) -> dict[str, Any]:
        return {"batch_size": self.shop.plan.evaluation.batch_size, "on_progress": watch.counted}

    def exams(self) -> list[EvaluationSet]:
        return [self.shop.exam(task, "test", self.examples) for task in self.tasks]

    def loaded(self) -> dict[str, TaskVector]:
        return {each.task: TaskVector.load(each.path) for each in self.vectors}


@dataclass(frozen=True, eq=False)
class DisentanglementStage(AnalysisStage):
    what: ClassVar[str] = "disentanglement"

    alphas: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        first = self.vectors[0]
        return f"{self.what}.{'-'.join(self.tasks)}.{first.arm}.seed-{first.seed}"

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "alphas": list(self.alphas)}

    def measure(self, watch: StageProgress) -> dict[str, Any]:
        first, second = self.exams()
        one, two = self.loaded().values()
        return disentanglement(self.shop.model, (first, second), (one, two), self.alphas, **self.how(watch))


@dataclass(frozen=True, eq=False)
class LocalisationStage(AnalysisStage):
    what: ClassVar[str] = "localisation"

    def measure(self, watch: StageProgress) -> dict[str, Any]:
        return localisation(self.shop.model, self.exams(), self.loaded(), **self.how(watch))


@dataclass(frozen=True, eq=False)
class DriftStage(AnalysisStage):
    what: ClassVar[str] = "drift"

    bundles: tuple[EstimateStage, ...] = ()
    layer_examples: int = 0

    @property
    def inputs(self) -> tuple[Stage, ...]:
        return (*self.vectors, *self.bundles)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "layer_examples": self.layer_examples}

    def cost(self) -> float:
        layers = 30.0 * self.layer_examples * len(self.vectors) * len(self.bundles)  # of some thirty blocks
        return super().cost() + 3.0 * layers

    def measure(self, watch: StageProgress) -> dict[str, Any]:
        bundles = {each.task: load(each.path) for each in self.bundles}
        few = self.layer_examples
        return drift(self.shop.model, self.exams(), self.loaded(), bundles, layer_examples=few, **self.how(watch))


@dataclass(frozen=True, eq=False)
class SpectraStage(MeasurementStage):
    what: ClassVar[str] = "spectra"

    kind: ClassVar[str] = "understanding"
    why: ClassVar[str] = AnalysisStage.why

    bundle: EstimateStage

    @property
    def name(self) -> str:
        return f"spectra.{self.bundle.name}"

    @property
    def inputs(self) -> tuple[Stage, ...]:
        return (self.bundle,)

    def settings(self) -> dict[str, Any]:
        return {"what": "spectra"}

    def measure(self, watch: StageProgress) -> dict[str, Any]:
        return spectra(load(self.bundle.path), on_progress=watch.counted)

    def cost(self) -> float:
        return 200.0
