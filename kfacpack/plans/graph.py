"""Which stages a plan consists of, in an order in which they can run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kfacpack.evaluation.alphas import parse_alphas
from kfacpack.plans.stages.curvature import Estimate, Merge
from kfacpack.plans.stages.scores import Base, Negate, Sweep
from kfacpack.plans.stages.train import Add, Train
from kfacpack.plans.stages.understanding import Disentanglement, Drift, Localisation, Spectra

if TYPE_CHECKING:
    from kfacpack.plans.plan import Plan
    from kfacpack.plans.shop import Shop
    from kfacpack.plans.stages.base import Stage


@dataclass(frozen=True)
class Trial:
    """One arm with one seed."""

    arm: str
    seed: int
    vectors: dict[str, Train]
    """By task; so are those below."""
    own: dict[str, Sweep]
    sums: dict[str, dict[str, Sweep]]
    """By method, then by task: the test split."""
    validation: dict[str, Sweep]
    """Of the first method."""
    negated: dict[str, Negate]
    pairs: tuple[Disentanglement, ...]
    localisation: Localisation | None
    drift: Drift | None

    def stages(self) -> Iterator[Stage]:
        yield from self.own.values()
        for by_task in self.sums.values():
            yield from by_task.values()
        yield from self.validation.values()
        yield from self.negated.values()
        yield from self.pairs
        yield from (each for each in (self.localisation, self.drift) if each)


@dataclass
class Graph:
    """All stages of a plan."""

    shop: Shop
    root: Path
    bundles: dict[tuple[str, str, int], Estimate] = field(default_factory=dict)
    """By structure, task and seed."""
    merges: dict[tuple[str, str, int, str, int], Merge] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plan = self.plan
        self.alphas = with_one(parse_alphas(plan.evaluation.alphas))
        self.base = {task.name: Base(self.shop, self.root, task.name) for task in plan.tasks}
        # Seeds go last, so that a first comparison is there soon.
        self.trials = [self._trial(arm, seed) for seed in plan.seeds for arm in plan.arms]
        first = next(iter(self.bundles.values()), None)
        self.spectra = Spectra(self.shop, self.root, first) if plan.evaluation.spectra and first else None

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

    def _trial(self, arm: str, seed: int) -> Trial:
        plan, told = self.plan, self.plan.evaluation
        names = [task.name for task in plan.tasks]
        vectors = {name: self._train(name, arm, seed) for name in names}
        added = {method: Add(self.shop, self.root, tuple(vectors.values()), method) for method in told.methods}
        first_seed = seed == plan.seeds[0]
        pairs = told.disentanglement if first_seed else None
        wanted_pairs = (pairs.pairs or tuple((names[0], other) for other in names[1:])) if pairs else ()
        every = tuple(vectors.values())
        drift = told.drift if first_seed else None
        return Trial(
            arm,
            seed,
            vectors,
            own={name: Sweep(self.shop, self.root, vectors[name], name, (1.0,)) for name in names},
            sums={
                method: {
                    name: Sweep(self.shop, self.root, total, name, self.alphas if number == 0 else (1.0,))
                    for name in names
                }
                for number, (method, total) in enumerate(added.items())
            },
            validation={
                name: Sweep(self.shop, self.root, next(iter(added.values())), name, self.alphas, "validation")
                for name in names
            },
            negated={name: self._negate(vectors[name], name) for name in names} if told.negation else {},
            pairs=tuple(
                Disentanglement(
                    self.shop,
                    self.root,
                    (vectors[one], vectors[two]),
                    str(pairs.examples),
                    tuple(parse_alphas(pairs.alphas)),
                )
                for one, two in wanted_pairs
                if pairs
            ),
            localisation=Localisation(self.shop, self.root, every, str(told.localisation.examples))
            if told.localisation
            else None,
            drift=Drift(
                self.shop,
                self.root,
                every,
                str(drift.examples),
                tuple(self._bundle("kronecker", name, seed) for name in names),
            )
            if drift
            else None,
        )

    def _train(self, task: str, arm: str, seed: int) -> Train:
        said = self.plan.arms[arm]
        merged = None
        if said.penalty in ("kronecker", "diagonal"):
            key = (said.penalty, said.rule, said.rank, task, seed)
            if key not in self.merges:
                others = [self._bundle(said.penalty, other.name, seed) for other in self.plan.others(task)]
                self.merges[key] = Merge(self.shop, self.root, task, tuple(others), said.rule, said.rank)
            merged = self.merges[key]
        return Train(self.shop, self.root, task, arm, seed, merged)

    def _bundle(self, structure: str, task: str, seed: int) -> Estimate:
        key = (structure, task, seed)
        if key not in self.bundles:
            self.bundles[key] = Estimate(self.shop, self.root, task, structure, seed)  # type: ignore[arg-type]
        return self.bundles[key]

    def _negate(self, vector: Train, task: str) -> Negate:
        said = self.plan.evaluation.negation
        assert said is not None
        control = said.control if said.control != task else self.plan.others(task)[0].name
        return Negate(self.shop, self.root, vector, control, said.keep, tuple(parse_alphas(said.alphas)))


def _visit(stage: Stage, found: dict[str, Stage]) -> None:
    if stage.key in found:
        return
    for each in stage.inputs:
        _visit(each, found)
    found[stage.key] = stage


def with_one(alphas: list[float]) -> tuple[float, ...]:
    """With α = 1 among them: that is where vectors are used as they are."""
    return tuple(sorted({1.0, *alphas}))
