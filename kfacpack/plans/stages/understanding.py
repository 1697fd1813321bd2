"""Why it went so: where vectors move the model, whether they disturb each other, and whether bundles knew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kfacpack.analysis.disentanglement import disentanglement
from kfacpack.analysis.drift import drift
from kfacpack.analysis.localisation import localisation
from kfacpack.analysis.spectra import spectra
from kfacpack.curvature.loading import load
from kfacpack.plans.stages.base import Measurement, Stage, Watch
from kfacpack.plans.stages.scores import examined
from kfacpack.tasks.sampling import how_many
from kfacpack.vectors.vector import TaskVector

if TYPE_CHECKING:
    from kfacpack.evaluation.accuracy import Exam
    from kfacpack.plans.stages.curvature import Estimate
    from kfacpack.plans.stages.train import Train


@dataclass(frozen=True, eq=False)
class Understanding(Measurement):
    kind: ClassVar[str] = "understanding"
    why: ClassVar[str] = "where vectors move the model, and whether its curvature foretold it"

    vectors: tuple[Train, ...]
    examples: str

    @property
    def what(self) -> str:
        return type(self).__name__.lower()

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
        return {"what": self.what, **examined(self, self.tasks, ["test"]), "some": self.examples}

    def cost(self) -> float:
        return 3.0 * len(self.vectors) * sum(self._count(task) for task in self.tasks)

    def _count(self, task: str) -> int:
        return how_many(self.examples, self.shop.task(task).sizes["test"])

    def how(self, watch: Watch) -> dict[str, Any]:
        return {"batch_size": self.shop.plan.evaluation.batch_size, "on_progress": watch.counted}

    def exams(self) -> list[Exam]:
        return [self.shop.exam(task, "test", self.examples) for task in self.tasks]

    def loaded(self) -> dict[str, TaskVector]:
        return {each.task: TaskVector.load(each.path) for each in self.vectors}


@dataclass(frozen=True, eq=False)
class Disentanglement(Understanding):
    alphas: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        first = self.vectors[0]
        return f"{self.what}.{'-'.join(self.tasks)}.{first.arm}.seed-{first.seed}"

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "alphas": list(self.alphas)}

    def measure(self, watch: Watch) -> dict[str, Any]:
        first, second = self.exams()
        one, two = self.loaded().values()
        return disentanglement(self.shop.model, (first, second), (one, two), self.alphas, **self.how(watch))


@dataclass(frozen=True, eq=False)
class Localisation(Understanding):
    def measure(self, watch: Watch) -> dict[str, Any]:
        return localisation(self.shop.model, self.exams(), self.loaded(), **self.how(watch))


@dataclass(frozen=True, eq=False)
class Drift(Understanding):
    bundles: tuple[Estimate, ...] = ()
    layer_examples: int = 0

    @property
    def inputs(self) -> tuple[Stage, ...]:
        return (*self.vectors, *self.bundles)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "layer_examples": self.layer_examples}

    def cost(self) -> float:
        layers = 30.0 * self.layer_examples * len(self.vectors) * len(self.bundles)  # of some thirty blocks
        return super().cost() + 3.0 * layers

    def measure(self, watch: Watch) -> dict[str, Any]:
        bundles = {each.task: load(each.path) for each in self.bundles}
        few = self.layer_examples
        return drift(self.shop.model, self.exams(), self.loaded(), bundles, layer_examples=few, **self.how(watch))


@dataclass(frozen=True, eq=False)
class Spectra(Measurement):
    kind: ClassVar[str] = "understanding"
    why: ClassVar[str] = Understanding.why

    bundle: Estimate

    @property
    def name(self) -> str:
        return f"spectra.{self.bundle.name}"

    @property
    def inputs(self) -> tuple[Stage, ...]:
        return (self.bundle,)

    def settings(self) -> dict[str, Any]:
        return {"what": "spectra"}

    def measure(self, watch: Watch) -> dict[str, Any]:
        return spectra(load(self.bundle.path), on_progress=watch.counted)

    def cost(self) -> float:
        return 200.0
