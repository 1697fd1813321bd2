"""How well it went: the model by itself, each vector on its own task, and all of them added up, for every α."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kfacpack.evaluation.accuracy import Score, score, scores
from kfacpack.evaluation.choice import Subject
from kfacpack.evaluation.negation import negate
from kfacpack.plans.stages.base import Measurement, Stage, Watch
from kfacpack.vectors.vector import TaskVector

if TYPE_CHECKING:
    from kfacpack.plans.stages.train import Add, Train


@dataclass(frozen=True, eq=False)
class Base(Measurement):
    kind: ClassVar[str] = "scores"
    why: ClassVar[str] = "how well everything does on the test examples"

    task: str

    @property
    def name(self) -> str:
        return f"{self.task}.base"

    def settings(self) -> dict[str, Any]:
        plan = self.shop.plan
        return {"what": "base", "head": plan.model.head, **examined(self, [self.task], ["test", "train"])}

    def measure(self, watch: Watch) -> dict[str, Any]:
        shop = self.shop
        exam = shop.exam(self.task)
        size = shop.plan.evaluation.batch_size
        found = score(shop.model, shop.head(self.task), exam, batch_size=size, on_progress=watch.counted)
        return {"accuracy": found.accuracy, "examples": found.examples}

    def cost(self) -> float:
        return examples_of(self, self.task)


@dataclass(frozen=True, eq=False)
class Sweep(Measurement):
    """A vector on a task, for every α."""

    kind: ClassVar[str] = "scores"
    why: ClassVar[str] = Base.why

    vector: Train | Add
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
        return {"what": "sweep", "alphas": list(self.alphas), **examined(self, [self.task], [self.split])}

    def measure(self, watch: Watch) -> dict[str, Any]:
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
class Negate(Measurement):
    kind: ClassVar[str] = "negated"
    why: ClassVar[str] = "one task taken out of the model, and whether another one stays"

    vector: Train
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
            **examined(self, tasks, ["validation", "test", "train"]),
        }

    def measure(self, watch: Watch) -> dict[str, Any]:
        shop, task = self.shop, self.vector.task
        tau = TaskVector.load(self.vector.path)
        target, control = (
            Subject(head, shop.exam(name, "validation"), shop.exam(name))
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


def examined(stage: Stage, tasks: Sequence[str], splits: Sequence[str]) -> dict[str, Any]:
    """What decides which examples are looked at."""
    shop = stage.shop
    data = {f"{task} {split}": shop.data_key(task, split) for task in tasks for split in splits}
    return {"examples": shop.plan.evaluation.examples, "data": data}


def examples_of(stage: Stage, task: str, split: str = "test") -> float:
    return len(stage.shop.exam(task, split).numbers)
