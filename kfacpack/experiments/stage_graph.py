"""Which stages a plan consists of, in an order in which they can run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kfacpack.experiments.artifact_stages import AddStage, EstimateStage, MergeStage, TrainStage
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
    from kfacpack.experiments.run import RunContext
    from kfacpack.experiments.stage import Stage


StageT = TypeVar("StageT")


@dataclass(frozen=True)
class ArmRun:
    """One arm with one seed."""

    arm: str
    seed: int
    vectors: dict[str, TrainStage]
    """By task; so are those below."""
    own: dict[str, SweepStage]
    sums: dict[str, dict[str, SweepStage]]
    """By method, then by task: the test split."""
    validation: dict[str, SweepStage]
    """Of the first method."""
    negated: dict[str, NegationStage]
    pairs: tuple[DisentanglementStage, ...]
    localisation: LocalisationStage | None
    drift: DriftStage | None

    def stages(self) -> Iterator[Stage]:
        yield from self.own.values()
        for by_task in self.sums.values():
            yield from by_task.values()
        yield from self.validation.values()
        yield from self.negated.values()
        yield from self.pairs
        yield from (each for each in (self.localisation, self.drift) if each)


@dataclass
class StageGraph:
    """All stages of a plan."""

    shop: RunContext
    root: Path
    bundles: dict[tuple[str, str, int], EstimateStage] = field(default_factory=dict)
    """By structure, task and seed."""
    merges: dict[tuple[str, str, int, str, int], MergeStage] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plan = self.plan
        self.alphas = with_one(parse_alphas(plan.evaluation.alphas))
        self.base = {task.name: self._stage(BaseAccuracyStage, task.name) for task in plan.tasks}
        # Seeds go last, so that a first comparison is there soon.
        self.trials = [self._trial(arm, seed) for seed in plan.seeds for arm in plan.arms]
        # A plan that asks for them has made this one for an arm or for drift, or it was refused.
        first = ("kronecker", plan.tasks[0].name, plan.seeds[0])
        self.spectra = self._stage(SpectraStage, self.bundles[first]) if plan.evaluation.spectra else None

    @property
    def plan(self) -> Plan:
        return self.shop.plan

    def in_order(self) -> list[Stage]:
        """Every stage once, after its inputs; those of one kind together, for as long as a seed lasts."""
        wanted: list[Stage] = list(self.base.values())
        for seed in self.plan.seeds:
            of_seed = [trial for trial in self.trials if trial.seed == seed]
            vectors = [each for trial in of_seed for each in trial.vectors.values()]
            merged = [each.merged for each in vectors if each.merged]
            measured = [stage for trial in of_seed for stage in trial.stages()]
            wanted += [each for merge in merged for each in merge.bundles]
            wanted += [*merged, *vectors, *measured]
        wanted += [self.spectra] if self.spectra else []
        found: dict[str, Stage] = {}
        for stage in wanted:
            _visit(stage, found)
        return list(found.values())

    def _trial(self, arm: str, seed: int) -> ArmRun:
        plan, told = self.plan, self.plan.evaluation
        names = [task.name for task in plan.tasks]
        vectors = {name: self._train(name, arm, seed) for name in names}
        added = {method: self._stage(AddStage, tuple(vectors.values()), method) for method in told.methods}
        first = next(iter(added.values()))
        deep = told.in_depth is None or arm in told.in_depth
        return ArmRun(
            arm,
            seed,
            vectors,
            own={name: self._stage(SweepStage, vectors[name], name, (1.0,)) for name in names},
            sums={
                method: {
                    name: self._stage(SweepStage, total, name, self.alphas if total is first else (1.0,))
                    for name in names
                }
                for method, total in added.items()
            },
            validation={name: self._stage(SweepStage, first, name, self.alphas, "validation") for name in names},
            negated={name: self._negate(vectors[name]) for name in names} if told.negation and deep else {},
            pairs=self._pairs(vectors) if deep and seed == plan.seeds[0] else (),
            localisation=self._stage(LocalisationStage, tuple(vectors.values()), told.localisation.examples)
            if told.localisation and deep
            else None,
            drift=self._drift(vectors, seed) if deep and seed == plan.seeds[0] else None,
        )

    def _stage(self, kind: Callable[..., StageT], *settings: Any) -> StageT:
        return kind(self.shop, self.root, *settings)

    def _train(self, task: str, arm: str, seed: int) -> TrainStage:
        said = self.plan.arms[arm]
        merged = None
        if said.penalty in ("kronecker", "diagonal"):
            key = (said.penalty, said.rule, said.rank, task, seed)
            if key not in self.merges:
                others = [self._bundle(said.penalty, other.name, seed) for other in self.plan.others(task)]
                self.merges[key] = self._stage(MergeStage, task, tuple(others), said.rule, said.rank)
            merged = self.merges[key]
        return self._stage(TrainStage, task, arm, seed, merged)

    def _bundle(self, structure: str, task: str, seed: int) -> EstimateStage:
        key = (structure, task, seed)
        if key not in self.bundles:
            self.bundles[key] = self._stage(EstimateStage, task, structure, seed)
        return self.bundles[key]

    def _negate(self, vector: TrainStage) -> NegationStage:
        said = self.plan.evaluation.negation
        assert said is not None
        instead = said.instead or self.plan.others(said.control)[0].name
        control = said.control if said.control != vector.task else instead
        return self._stage(NegationStage, vector, control, said.keep, tuple(parse_alphas(said.alphas)))

    def _pairs(self, vectors: Mapping[str, TrainStage]) -> tuple[DisentanglementStage, ...]:
        said = self.plan.evaluation.disentanglement
        if said is None:
            return ()
        first, *others = vectors
        alphas = tuple(parse_alphas(said.alphas))
        return tuple(
            self._stage(DisentanglementStage, (vectors[one], vectors[two]), said.examples, alphas)
            for one, two in said.pairs or [(first, other) for other in others]
        )

    def _drift(self, vectors: Mapping[str, TrainStage], seed: int) -> DriftStage | None:
        said = self.plan.evaluation.drift
        if said is None:
            return None
        bundles = tuple(self._bundle("kronecker", name, seed) for name in vectors)
        return self._stage(DriftStage, tuple(vectors.values()), said.examples, bundles, said.layer_examples)


def _visit(stage: Stage, found: dict[str, Stage]) -> None:
    if stage.key in found:
        return
    for each in stage.inputs:
        _visit(each, found)
    found[stage.key] = stage


def with_one(alphas: list[float]) -> tuple[float, ...]:
    """With α = 1 among them: that is where vectors are used as they are."""
    return tuple(sorted({1.0, *alphas}))
