"""The stages of a plan and the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kfacpack.experiments.artifact_stages import (
    AddStage,
    CompressStage,
    EstimateStage,
    ExtractStage,
    MergeStage,
    TaskVectorStage,
    TrainStage,
)
from kfacpack.experiments.measurement_stages import (
    BaseAccuracyStage,
    DisentanglementStage,
    DriftStage,
    LocalisationStage,
    NegationStage,
    SpectraStage,
    SweepStage,
)
from kfacpack.format.units import parse_alphas

if TYPE_CHECKING:
    from kfacpack.experiments.plan import Plan
    from kfacpack.experiments.plan_sections import CurvatureSection, MethodSection
    from kfacpack.experiments.run import RunContext
    from kfacpack.experiments.stage import Stage


StageT = TypeVar("StageT")


@dataclass(frozen=True)
class ArmRun:
    """The stages of one arm of a plan with one seed."""

    arm: str
    seed: int
    vectors: dict[str, TaskVectorStage]
    """Stages that write the vectors, by task."""
    own: dict[str, SweepStage]
    """Stages that evaluate the vector of each task on the test split of this task, by task."""
    sums: dict[str, dict[str, SweepStage]]
    """Stages that evaluate the merged vectors on the test splits, by label of the merge method and by task."""
    validation: dict[str, dict[str, SweepStage]]
    """Stages that evaluate the merged vectors on the validation splits; only for methods evaluated at every α."""
    negated: dict[str, NegationStage]
    """Stages that measure the accuracy after a vector is subtracted (negation), by task."""
    pairs: tuple[DisentanglementStage, ...]
    localisation: LocalisationStage | None
    drift: DriftStage | None

    def stages(self) -> Iterator[Stage]:
        """Yields all measurement stages."""
        yield from self.own.values()
        for by_task in self.sums.values():
            yield from by_task.values()
        for by_task in self.validation.values():
            yield from by_task.values()
        yield from self.negated.values()
        yield from self.pairs
        yield from (stage for stage in (self.localisation, self.drift) if stage)


@dataclass
class StageGraph:
    """All stages of a plan."""

    context: RunContext
    root: Path
    bundles: dict[str, EstimateStage] = field(default_factory=dict)
    """Stages that estimate bundles, by key."""
    compressed: dict[str, CompressStage] = field(default_factory=dict)
    """Stages that compress bundles, by key."""
    merges: dict[str, MergeStage] = field(default_factory=dict)
    """Stages that merge bundles, by key."""

    def __post_init__(self) -> None:
        plan = self.plan
        self.alphas = including_one(parse_alphas(plan.evaluation.alphas))
        self.base = {task.name: self._stage(BaseAccuracyStage, task.name) for task in plan.tasks}
        # Ordered by seed, so that all arms with the first seed come before any arm with the second seed.
        self.arm_runs = [self._arm_run(arm, seed) for seed in plan.seeds for arm in plan.arms]
        self.spectra = None
        if plan.evaluation.spectra:
            self.spectra = self._stage(SpectraStage, self._bundle("kronecker", plan.tasks[0].name, plan.seeds[0]))

    @property
    def plan(self) -> Plan:
        """The plan that the stages execute."""
        return self.context.plan

    def in_order(self) -> list[Stage]:
        """Returns every stage once, each after its inputs. All stages of one seed precede those of the next seed."""
        requested: list[Stage] = list(self.base.values())
        for seed in self.plan.seeds:
            of_seed = [arm_run for arm_run in self.arm_runs if arm_run.seed == seed]
            vectors = [vector for arm_run in of_seed for vector in arm_run.vectors.values()]
            merges = [stage for vector in vectors for stage in vector.inputs if isinstance(stage, MergeStage)]
            measurements = [stage for arm_run in of_seed for stage in arm_run.stages()]
            requested += [bundle for merge in merges for bundle in merge.bundles]
            requested += [*merges, *vectors, *measurements]
        requested += [self.spectra] if self.spectra else []
        ordered: dict[str, Stage] = {}
        for stage in requested:
            _visit(stage, ordered)
        return list(ordered.values())

    def _arm_run(self, arm: str, seed: int) -> ArmRun:
        plan, evaluation = self.plan, self.plan.evaluation
        names = [task.name for task in plan.tasks]
        vectors = {name: self._vector(name, arm, seed) for name in names}
        added = {
            method.label: self._stage(AddStage, tuple(vectors.values()), method, self._method_bundles(method, seed))
            for method in evaluation.methods
        }
        swept = list(added) if evaluation.method_alphas else list(added)[:1]
        in_depth = evaluation.in_depth is None or arm in evaluation.in_depth
        return ArmRun(
            arm,
            seed,
            vectors,
            own={name: self._stage(SweepStage, vectors[name], name, (1.0,)) for name in names},
            sums={
                label: {
                    name: self._stage(SweepStage, total, name, self.alphas if label in swept else (1.0,))
                    for name in names
                }
                for label, total in added.items()
            },
            validation={
                label: {name: self._stage(SweepStage, added[label], name, self.alphas, "validation") for name in names}
                for label in swept
            },
            negated={name: self._negate(vectors[name]) for name in names} if evaluation.negation and in_depth else {},
            pairs=self._pairs(vectors) if in_depth and seed == plan.seeds[0] else (),
            localisation=self._stage(LocalisationStage, tuple(vectors.values()), evaluation.localisation.examples)
            if evaluation.localisation and in_depth
            else None,
            drift=self._drift(vectors, seed) if in_depth and seed == plan.seeds[0] else None,
        )

    def _stage(self, kind: Callable[..., StageT], *settings: Any) -> StageT:
        return kind(self.context, self.root, *settings)

    def _method_bundles(self, method: MethodSection, seed: int) -> tuple[EstimateStage | CompressStage, ...]:
        """Returns the stages that write the bundles of all tasks, or an empty tuple if the method needs no bundles."""
        if not method.needs_bundles:
            return ()
        bundles = [self._bundle("kronecker", task.name, seed) for task in self.plan.tasks]
        return tuple(self._compressed(bundle, method.compress, None) for bundle in bundles)

    def _compressed(
        self, bundle: EstimateStage, codec: str | None, budget: str | None
    ) -> EstimateStage | CompressStage:
        """Returns the stage that compresses a bundle, or `bundle` itself if there is neither a codec nor a budget."""
        if (spec := codec or budget) is None:
            return bundle
        stage = self._stage(CompressStage, bundle, spec, budget is not None)
        return self.compressed.setdefault(stage.key, stage)

    def _vector(self, task: str, arm: str, seed: int) -> TaskVectorStage:
        section = self.plan.arms[arm]
        if section.vectors is not None:
            return self._stage(ExtractStage, task, arm, seed)
        merged = self._merged(task, arm, seed) if section.penalty in ("kronecker", "diagonal") else None
        training = self.plan.training_of(arm)
        by_bundles = training.regime == "sparse" and training.mask == "bundles"
        return self._stage(TrainStage, task, arm, seed, merged, self._merged(task, arm, seed) if by_bundles else None)

    def _merged(self, task: str, arm: str, seed: int) -> MergeStage:
        """Returns the stage that merges the bundles of an arm's protected tasks."""
        section, curvature = self.plan.arms[arm], self.plan.curvature_of(arm)
        structure = "diagonal" if section.penalty == "diagonal" else "kronecker"
        bundles = tuple(
            self._compressed(self._bundle(structure, name, seed, curvature), section.compress, section.budget)
            for name in self.plan.protected(arm, task)
        )
        stage = self._stage(MergeStage, task, bundles, section.rule, section.rank)
        return self.merges.setdefault(stage.key, stage)

    def _bundle(self, structure: str, task: str, seed: int, curvature: CurvatureSection | None = None) -> EstimateStage:
        stage = self._stage(EstimateStage, task, structure, seed, curvature or self.plan.curvature)
        return self.bundles.setdefault(stage.key, stage)

    def _negate(self, vector: TaskVectorStage) -> NegationStage:
        section = self.plan.evaluation.negation
        assert section is not None
        instead = section.instead or self.plan.others(section.control)[0].name
        control = section.control if section.control != vector.task else instead
        return self._stage(NegationStage, vector, control, section.keep, tuple(parse_alphas(section.alphas)))

    def _pairs(self, vectors: Mapping[str, TaskVectorStage]) -> tuple[DisentanglementStage, ...]:
        section = self.plan.evaluation.disentanglement
        if section is None:
            return ()
        first, *others = vectors
        alphas = tuple(parse_alphas(section.alphas))
        return tuple(
            self._stage(DisentanglementStage, (vectors[first_task], vectors[second_task]), section.examples, alphas)
            for first_task, second_task in section.pairs or [(first, other) for other in others]
        )

    def _drift(self, vectors: Mapping[str, TaskVectorStage], seed: int) -> DriftStage | None:
        section = self.plan.evaluation.drift
        if section is None:
            return None
        bundles = tuple(self._bundle("kronecker", name, seed) for name in vectors)
        return self._stage(DriftStage, tuple(vectors.values()), section.examples, bundles, section.layer_examples)


def _visit(stage: Stage, ordered: dict[str, Stage]) -> None:
    """Adds the inputs of a stage to `ordered`, depth first, and then the stage itself."""
    if stage.key in ordered:
        return
    for dependency in stage.inputs:
        _visit(dependency, ordered)
    ordered[stage.key] = stage


def including_one(alphas: list[float]) -> tuple[float, ...]:
    """Returns the sorted values of α, with α = 1 (unscaled vectors) added if it is missing."""
    return tuple(sorted({1.0, *alphas}))
