"""Measurement stages: accuracy, negation, disentanglement, localisation, drift and spectra."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kfacpack.curvature.curvature import load
from kfacpack.errors import KfacpackError
from kfacpack.evaluation.accuracy import Score, score, scores
from kfacpack.evaluation.bundle_quality import drift, spectra
from kfacpack.evaluation.disentanglement import disentanglement, localisation
from kfacpack.evaluation.sweep import SelectionTask, negate
from kfacpack.experiments.stage import MeasurementStage, Stage, StageProgress
from kfacpack.tasks.task import parse_count
from kfacpack.vectors.task_vector import TaskVector

if TYPE_CHECKING:
    from kfacpack.evaluation.accuracy import EvaluationSet
    from kfacpack.experiments.artifact_stages import AddStage, EstimateStage, TaskVectorStage
    from kfacpack.experiments.plan_sections import EvaluationSection


@dataclass(frozen=True, eq=False)
class BaseAccuracyStage(MeasurementStage):
    """Measures the accuracy of the base model on one task."""

    kind: ClassVar[str] = "scores"
    purpose: ClassVar[str] = "accuracy on the test or validation examples"

    task: str

    @property
    def name(self) -> str:
        """Name of the stage, derived from the task."""
        return f"{self.task}.base"

    def settings(self) -> dict[str, Any]:
        """Returns the settings that determine the result. Heads may be computed from the training examples."""
        plan = self.context.plan
        return {"what": "base", "head": plan.model.head, **evaluation_settings(self, [self.task], ["test", "train"])}

    def measure(self, monitor: StageProgress) -> dict[str, Any]:
        """Returns the accuracy, the number of examples and, if the task has completions, the perplexity."""
        context = self.context
        examples = context.evaluation_set(self.task)
        size = context.plan.evaluation.batch_size
        result = score(context.model, context.head(self.task), examples, batch_size=size, on_progress=monitor.report)
        return {"accuracy": result.accuracy, "examples": result.examples, **perplexity_entry(result)}

    def cost(self) -> float:
        """Returns the number of test examples, each of which needs one forward pass."""
        return count_examples(self, self.task)


@dataclass(frozen=True, eq=False)
class SweepStage(MeasurementStage):
    """Measures the accuracy on one task after adding α times a task vector to the model, for one or more α."""

    kind: ClassVar[str] = "scores"
    purpose: ClassVar[str] = BaseAccuracyStage.purpose

    vector: TaskVectorStage | AddStage
    task: str
    alphas: tuple[float, ...]
    split: str = "test"

    @property
    def name(self) -> str:
        """Name of the stage, composed of the task, the split and the vector."""
        return f"{self.task}.{self.split}.{self.vector.name}"

    @property
    def inputs(self) -> tuple[Stage, ...]:
        """The stage that writes the vector."""
        return (self.vector,)

    def settings(self) -> dict[str, Any]:
        """Returns the settings that determine the result, with the kind of head if the vector file contains no head."""
        head = {} if self.vector.has_head else {"head": self.context.plan.model.head}
        splits = [self.split, *(["train"] if head else [])]
        return {
            "what": "sweep",
            "alphas": list(self.alphas),
            **head,
            **evaluation_settings(self, [self.task], splits),
        }

    def measure(self, monitor: StageProgress) -> dict[str, Any]:
        """Returns the number of correct predictions at every α and, for tasks with completions, the log-likelihoods."""
        context, tau = self.context, TaskVector.load(self.vector.path)
        results = scores(
            context.model,
            tau.heads.get(self.task) or context.head(self.task),
            context.evaluation_set(self.task, self.split),
            tau,
            self.alphas,
            batch_size=context.plan.evaluation.batch_size,
            on_progress=monitor.report,
        )
        likelihoods = [result.log_likelihood for result in results]
        return {
            "alphas": list(self.alphas),
            "correct": [result.correct for result in results],
            "examples": results[0].examples,
            **({"tokens": results[0].tokens, "log_likelihood": likelihoods} if results[0].tokens else {}),
        }

    def cost(self) -> float:
        """Returns the number of forward passes that it takes to evaluate all examples at all values of α."""
        return _passes(self, self.vector.arm, self.alphas) * count_examples(self, self.task, self.split)

    def scores(self) -> list[Score]:
        """Reads the scores from the file of this stage, one score for each α."""
        values = self.read()
        correct, tokens = values["correct"], values.get("tokens")
        likelihoods = values.get("log_likelihood", [None] * len(correct))
        return [
            Score(count, values["examples"], tokens, likelihood)
            for count, likelihood in zip(correct, likelihoods, strict=True)
        ]

    def at(self, alpha: float) -> Score:
        """Reads the score at one α from the file of this stage."""
        return self.scores()[self.alphas.index(alpha)]


@dataclass(frozen=True, eq=False)
class NegationStage(MeasurementStage):
    """Subtracts a task vector from the model, and measures the accuracy on the vector's task and on a control task."""

    kind: ClassVar[str] = "negated"
    purpose: ClassVar[str] = "accuracy on each task and on a control task after subtracting the task vector"

    vector: TaskVectorStage
    control: str
    keep: float
    alphas: tuple[float, ...]

    @property
    def name(self) -> str:
        """Name of the stage, which is the same as the name of the stage that writes the vector."""
        return self.vector.name

    @property
    def inputs(self) -> tuple[Stage, ...]:
        """The stage that writes the vector."""
        return (self.vector,)

    def settings(self) -> dict[str, Any]:
        """Returns the settings that determine the result."""
        tasks = [self.vector.task, self.control]
        return {
            "control": self.control,
            "keep": self.keep,
            "alphas": list(self.alphas),
            "head": self.context.plan.model.head,
            **evaluation_settings(self, tasks, ["validation", "test", "train"]),
        }

    def measure(self, monitor: StageProgress) -> dict[str, Any]:
        """Selects α on the validation examples and returns the accuracies on the test examples."""
        context, task = self.context, self.vector.task
        tau = TaskVector.load(self.vector.path)
        target, control = (
            SelectionTask(head, context.evaluation_set(name, "validation"), context.evaluation_set(name))
            for name, head in (
                (task, tau.heads.get(task) or context.head(task)),
                (self.control, context.head(self.control)),
            )
        )
        negation = negate(
            context.model,
            [target],
            control,
            tau,
            self.alphas,
            keep=self.keep,
            batch_size=context.plan.evaluation.batch_size,
            on_progress=monitor.report,
        )
        return dict(negation)

    def cost(self) -> float:
        """Returns the cost of evaluating the vector's task and the control task on the validation and test splits."""
        tasks = (self.vector.task, self.control)
        examples = sum(count_examples(self, task, split) for task in tasks for split in ("validation", "test"))
        return _passes(self, self.vector.arm, self.alphas) * examples


def _passes(stage: MeasurementStage, arm: str, alphas: Sequence[float]) -> float:
    """Returns the number of forward passes that it takes to evaluate one example at all values of α."""
    return 3.0 if stage.context.plan.regime_of(arm) == "linear" else len(alphas)


def require_no_class_measurement(evaluation: EvaluationSection) -> None:
    """Checks that no measurement of the plan needs classes, because a task with completions has no classes.

    Raises:
        KfacpackError: If the plan measures negation or disentanglement.
    """
    for key in ("negation", "disentanglement"):
        if getattr(evaluation, key) is not None:
            problem = f"evaluation.{key} requires tasks with classes, but this task has completions"
            raise KfacpackError(f"{problem}. Remove {key} from evaluation, or remove the task")


def perplexity_entry(result: Score) -> dict[str, float]:
    """Returns a dictionary with the perplexity, or an empty dictionary for a task with classes."""
    return {} if result.perplexity is None else {"perplexity": result.perplexity}


def evaluation_settings(stage: Stage, tasks: Sequence[str], splits: Sequence[str]) -> dict[str, Any]:
    """Returns the settings that determine which examples are evaluated."""
    context = stage.context
    data = {f"{task} {split}": context.data_key(task, split) for task in tasks for split in splits}
    return {"examples": context.plan.evaluation.examples, "data": data}


def count_examples(stage: Stage, task: str, split: str = "test") -> float:
    """Returns how many examples of a split are evaluated."""
    return len(stage.context.evaluation_set(task, split).numbers)


@dataclass(frozen=True, eq=False)
class AnalysisStage(MeasurementStage):
    """Base class for measurements on several task vectors of one arm of the plan."""

    kind: ClassVar[str] = "understanding"
    purpose: ClassVar[str] = "disentanglement, localisation and drift of the vectors, and spectra of a bundle"

    vectors: tuple[TaskVectorStage, ...]
    examples: str

    measurement: ClassVar[str]
    """Name of the measurement."""

    @property
    def name(self) -> str:
        """Name of the stage, composed of the measurement, the arm and the seed."""
        return f"{self.measurement}.{self.vectors[0].variant}"

    @property
    def inputs(self) -> tuple[Stage, ...]:
        """The stages that write the vectors."""
        return self.vectors

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks of the vectors."""
        return [vector.task for vector in self.vectors]

    def settings(self) -> dict[str, Any]:
        """Returns the settings that determine the result."""
        return {"what": self.measurement, **evaluation_settings(self, self.tasks, ["test"]), "some": self.examples}

    def cost(self) -> float:
        """Returns the cost of evaluating every vector on the examples of every task."""
        return 3.0 * len(self.vectors) * sum(self._count(task) for task in self.tasks)

    def _count(self, task: str) -> int:
        return parse_count(self.examples, self.context.task(task).sizes["test"])

    def evaluation_options(self, monitor: StageProgress) -> dict[str, Any]:
        """Returns the keyword arguments that all measurement functions share."""
        return {"batch_size": self.context.plan.evaluation.batch_size, "on_progress": monitor.report}

    def evaluation_sets(self) -> list[EvaluationSet]:
        """Returns the test examples of every task."""
        return [self.context.evaluation_set(task, "test", self.examples) for task in self.tasks]

    def load_vectors(self) -> dict[str, TaskVector]:
        """Loads the vectors and returns them by task name."""
        return {vector.task: TaskVector.load(vector.path) for vector in self.vectors}


@dataclass(frozen=True, eq=False)
class DisentanglementStage(AnalysisStage):
    """Measures the disentanglement error ξ(α₁, α₂) of two task vectors, scaled by α₁ and α₂."""

    measurement: ClassVar[str] = "disentanglement"

    alphas: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """Name of the stage, composed of the measurement, the tasks, the arm and the seed."""
        return f"{self.measurement}.{'-'.join(self.tasks)}.{self.vectors[0].variant}"

    def settings(self) -> dict[str, Any]:
        """Returns the settings that determine the result."""
        return {**super().settings(), "alphas": list(self.alphas)}

    def measure(self, monitor: StageProgress) -> dict[str, Any]:
        """Returns ξ for all pairs of values of α."""
        first, second = self.evaluation_sets()
        first_vector, second_vector = self.load_vectors().values()
        options = self.evaluation_options(monitor)
        return disentanglement(
            self.context.model, (first, second), (first_vector, second_vector), alphas=self.alphas, **options
        )


@dataclass(frozen=True, eq=False)
class LocalisationStage(AnalysisStage):
    """Measures how much each task vector changes the output f of the model, on its own task and on other tasks."""

    measurement: ClassVar[str] = "localisation"

    def measure(self, monitor: StageProgress) -> dict[str, Any]:
        """Returns, by vector, the AUROC and quantiles of ‖Δf‖², where Δf is the change in the model's output."""
        options = self.evaluation_options(monitor)
        return localisation(self.context.model, self.evaluation_sets(), self.load_vectors(), **options)


@dataclass(frozen=True, eq=False)
class DriftStage(AnalysisStage):
    """Compares the drift that the bundles predict with the drift measured on data.

    The drift is the mean over examples of ‖Δf‖², where Δf is the change in the model's output that a vector causes.
    """

    measurement: ClassVar[str] = "drift"

    bundles: tuple[EstimateStage, ...] = ()
    layer_examples: int = 0

    @property
    def inputs(self) -> tuple[Stage, ...]:
        """The stages that write the vectors and the bundles."""
        return (*self.vectors, *self.bundles)

    def settings(self) -> dict[str, Any]:
        """Returns the settings that determine the result."""
        return {**super().settings(), "layer_examples": self.layer_examples}

    def cost(self) -> float:
        """Returns the cost of measuring the drift of whole vectors and of individual layers, assuming thirty layers."""
        layers = 30.0 * self.layer_examples * len(self.vectors) * len(self.bundles)
        return super().cost() + 3.0 * layers

    def measure(self, monitor: StageProgress) -> dict[str, Any]:
        """Returns the predicted and the measured drift for every vector and task."""
        return drift(
            self.context.model,
            self.evaluation_sets(),
            self.load_vectors(),
            {bundle.task: load(bundle.path) for bundle in self.bundles},
            layer_examples=self.layer_examples,
            **self.evaluation_options(monitor),
        )


@dataclass(frozen=True, eq=False)
class SpectraStage(MeasurementStage):
    """Computes the eigenvalues of the factors of one bundle."""

    measurement: ClassVar[str] = "spectra"

    kind: ClassVar[str] = "understanding"
    purpose: ClassVar[str] = AnalysisStage.purpose

    bundle: EstimateStage

    @property
    def name(self) -> str:
        """Name of the stage, composed of the measurement and the bundle."""
        return f"{self.measurement}.{self.bundle.name}"

    @property
    def inputs(self) -> tuple[Stage, ...]:
        """The stage that writes the bundle."""
        return (self.bundle,)

    def settings(self) -> dict[str, Any]:
        """Returns the name of the measurement; everything else is determined by the bundle."""
        return {"what": self.measurement}

    def measure(self, monitor: StageProgress) -> dict[str, Any]:
        """Returns the eigenvalues of every factor."""
        return spectra(load(self.bundle.path), on_progress=monitor.report)

    def cost(self) -> float:
        """Returns a constant cost, because no model is run."""
        return 200.0
