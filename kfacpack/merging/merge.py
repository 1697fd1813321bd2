"""What a merge lost, per block and in all.

What is lost of a block is Σ_st C_st B_s ⊗ A_t, with C = diag(w) minus what the rule made of that. In coordinates
(gram.py) its norm is that of Xᵀ C Y, so no Kronecker product is ever built.

`kp.merge`: curvatures of many tasks into one that stands for Σ w_t G_t.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import hypot
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfacpack.curvature.curvature import Curvature
from kfacpack.errors import KfacpackError
from kfacpack.format.manifest import About, Base, Loss, Merge, base_digest
from kfacpack.merging.combination import MatrixCombiner, coordinates, gram
from kfacpack.merging.inputs import MergeInput, check_compatible, in_order, mean_output_scale
from kfacpack.merging.rule import PARTIAL, MergeRule, Terms
from kfacpack.merging.rules import RULES
from kfacpack.merging.subtract import merge_without

if TYPE_CHECKING:
    from kfacpack.curvature.blocks import CurvatureBlock
    from kfacpack.curvature.matrices.matrix import Matrix
    from kfacpack.merging.inputs import Mergeable
    from kfacpack.merging.rule import Combination, Terms


@dataclass(frozen=True)
class BlockMergeReport:
    name: str
    terms: int
    """Of all inputs together."""
    missing: tuple[str, ...] = ()
    """The inputs that have no such block."""
    norm: float = 0.0
    """‖Σ w B ⊗ A‖, if it was measured."""
    error: float = 0.0
    """‖Σ w B ⊗ A − merged‖."""
    bound: float = 0.0
    """The paper's bound on that, T σ_A σ_B."""

    @property
    def frobenius(self) -> float:
        """The error, relative to the norm."""
        return self.error / self.norm if self.error else 0.0

    @property
    def relative_bound(self) -> float:
        return self.bound / self.norm if self.bound else 0.0


@dataclass(frozen=True)
class MergeReport:
    blocks: tuple[BlockMergeReport, ...]
    measured: bool
    """False where nothing was to be lost, so that nothing was measured."""
    subtracted: tuple[str, ...] = ()
    """Tasks that were subtracted from an input: then what it had lost on the remaining ones is not known."""

    @property
    def total(self) -> BlockMergeReport:
        """All blocks as one."""
        norm, error, bound = (
            hypot(*(getattr(block, key) for block in self.blocks)) for key in ("norm", "error", "bound")
        )
        terms, missing = sum(block.terms for block in self.blocks), {name for b in self.blocks for name in b.missing}
        return BlockMergeReport("", terms, tuple(sorted(missing)), norm, error, bound)

    @property
    def partial(self) -> tuple[BlockMergeReport, ...]:
        return tuple(block for block in self.blocks if block.missing)


def measured(name: str, terms: Terms, made: Combination, missing: Sequence[str]) -> BlockMergeReport:
    count = len(terms.weights)
    if len(terms.sides) == 1:
        (X,) = terms.coordinates
        return BlockMergeReport(name, count, tuple(missing), float((X.T @ terms.weights).norm()))
    X, Y = terms.coordinates
    B, A = made.sides
    target = torch.diag(terms.weights)
    lost = target - B.T @ (made.weights[:, None] * A)
    # The paper's proof, word for word, for C_t = w_t A_t: with equal weights that is the paper's bound itself.
    bound = _deviation(X / terms.tasks[:, None], terms.tasks) * _deviation(terms.weights[:, None] * Y, terms.tasks)
    return BlockMergeReport(
        name, count, tuple(missing), float((X.T @ target @ Y).norm()), float((X.T @ lost @ Y).norm()), bound
    )


def _deviation(points: Tensor, tasks: Tensor) -> float:
    """√T σ of T points. A row of (K, K) that stands for several tasks counts as often."""
    apart = points - tasks @ points / tasks.sum()
    return float((tasks[:, None].sqrt() * apart).norm())


_NOISE = 1e-12
"""A relative error below this is the rounding of Gram matrices: nothing was lost."""
WORKERS = 2
"""Some matrices are hashed while others are multiplied. Each worker holds its own strips."""


def merge(
    curvatures: Iterable[Mergeable],
    rule: str = "tak",
    rank: int = 1,
    weights: Sequence[float] | None = None,
    *,
    without: Iterable[str] | str = (),
    allow_partial: bool = False,
) -> Curvature:
    """One curvature for all: Σ w_t G_t over the tasks, with weights w_t that average one.

    `curvatures` are such or paths of bundles; merged and compressed ones may be among them. Dense blocks and diagonals
    are added up exactly. What is lost of the others is measured, and written into the blocks' `losses`.

    - rule: "tak" is the paper's (Σ B_t) ⊗ (Σ λ_t A_t); "optimal" the nearest sum of `rank` Kronecker products; "stack"
      keeps every term; "shards" joins estimates of one task from different examples into the estimate from all.
    - weights: one number for each input, in the place of its data set's size. Only their ratios matter.
    - without: tasks to leave out. From an input that "tak" has merged, the task's own bundle, which must be among the
      inputs, is subtracted.
    - allow_partial: add up a block that only some inputs have over those that have it.

    Its matrices are made when they are used or saved.
    """
    return merge_and_report(curvatures, rule, rank, weights, without=without, allow_partial=allow_partial).curvature


@dataclass(frozen=True)
class MergeResult:
    curvature: Curvature
    report: MergeReport


def merge_and_report(
    curvatures: Iterable[Mergeable],
    rule: str = "tak",
    rank: int = 1,
    weights: Sequence[float] | None = None,
    *,
    without: Iterable[str] | str = (),
    allow_partial: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> MergeResult:
    """`merge`, and what it lost; `progress` hears how many blocks are measured, and how many there are."""
    if rule not in RULES:
        raise KfacpackError(f"there is no rule {rule!r}; there are {', '.join(RULES)}")
    by = RULES[rule](rank)
    if isinstance(curvatures, str | os.PathLike | Curvature):
        raise KfacpackError("merge takes a list of curvatures or of paths, found a single one")
    inputs = [MergeInput.of(each, place) for place, each in enumerate(curvatures, start=1)]
    if not inputs:
        raise KfacpackError("there is nothing to merge")
    subtracted: tuple[str, ...] = ()
    if tasks := [without] if isinstance(without, str) else list(without):
        remaining = merge_without(inputs, tasks)
        if weights is not None and len(weights) == len(inputs):
            weights = [weights[place] for place, _ in remaining]
        subtracted = tuple(
            task for task in tasks if any(_without_missing(inputs[place], task) for place, _ in remaining)
        )
        inputs = [each for _, each in remaining]
    check_compatible(inputs, allow_partial=allow_partial)
    by.check(inputs)
    factors = by.weights(inputs, weights)
    blocks, report = _merged_blocks(by, inputs, factors, progress)
    return MergeResult(Curvature(blocks, _about(by, inputs, factors, report)), replace(report, subtracted=subtracted))


def _without_missing(each: MergeInput, task: str) -> bool:
    return any(parent.task == task for parent in each.parents)


def _merged_blocks(
    rule: MergeRule, inputs: Sequence[MergeInput], factors: Sequence[float], progress: Callable[[int, int], None]
) -> tuple[list[CurvatureBlock], MergeReport]:
    names = in_order([list(each.blocks) for each in inputs])
    found = [_terms(name, inputs, factors) for name in names]
    most = max(len(terms.weights) for terms in found)
    if rule.rank > most:
        raise KfacpackError(f"the rank is {rule.rank}, and the inputs have {most} terms together: at most that")
    combine = MatrixCombiner()
    blocks, reports = [], []
    measure = not rule.exact and most > 1
    with _LossMeasurement(found if measure else ()) as measuring:
        for number, (name, terms) in enumerate(zip(names, found, strict=True)):
            progress(number, len(names))
            terms = measuring.complete(terms)
            made = rule.kronecker(terms) if len(terms.sides) == 2 else rule.whole(terms)
            sides = [
                [combine(matrices, row.tolist()) for row in rows]
                for matrices, rows in zip(terms.sides, made.sides, strict=True)
            ]
            missing = [each.name for each in inputs if name not in each.blocks]
            report = BlockMergeReport(name, len(terms.weights), tuple(missing))
            if measure:
                report = measured(name, terms, made, missing)
            first = next(each.blocks[name] for each in inputs if name in each.blocks)
            structure = first.structure.of_sides(made.weights.tolist(), sides)
            lost = [each.blocks[name].losses for each in inputs if name in each.blocks]
            blocks.append(replace(first, structure=structure, losses=_losses(rule, lost, report)))
            reports.append(report)
    progress(len(names), len(names))
    return blocks, MergeReport(tuple(reports), measure)


def _terms(name: str, inputs: Sequence[MergeInput], factors: Sequence[float]) -> Terms:
    """A block's terms from all inputs that have it."""
    weights: list[float] = []
    tasks: list[float] = []
    sides: list[list[Matrix]] = []
    for each, factor in zip(inputs, factors, strict=True):
        if name in each.blocks:
            structure = each.blocks[name].structure
            weights += [factor * weight for weight in structure.weights]
            tasks += [each.tasks / len(structure.weights)] * len(structure.weights)
            sides = sides or [[] for _ in structure.sides]
            for all_of_them, own in zip(sides, structure.sides, strict=True):
                all_of_them += own
    return Terms(
        torch.tensor(weights, dtype=torch.float64),
        torch.tensor(tasks, dtype=torch.float64),
        tuple(map(tuple, sides)),
        inputs[0].curvature.about.scaling.sharing,
    )


class _LossMeasurement:
    """Gram matrices of all blocks, some at work while others are waited for; of matrices that blocks share, once."""

    def __init__(self, found: Sequence[Terms]):
        self._pool = ThreadPoolExecutor(max_workers=WORKERS)
        self._sides: dict[tuple[int, ...], Future[Tensor]] = {}
        for terms in found:
            for side in terms.sides:
                key = tuple(map(id, side))
                if key not in self._sides:
                    self._sides[key] = self._pool.submit(_coordinates_of, side)

    def __enter__(self) -> _LossMeasurement:
        return self

    def __exit__(self, *failure: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def complete(self, terms: Terms) -> Terms:
        keys = [tuple(map(id, side)) for side in terms.sides]
        return replace(terms, coordinates=tuple(self._sides[key].result() for key in keys if key in self._sides))


def _coordinates_of(side: Sequence[Matrix]) -> Tensor:
    return coordinates(gram(side))


def _losses(rule: MergeRule, lost: Iterable[Sequence[Loss]], report: BlockMergeReport) -> tuple[Loss, ...]:
    """What the inputs have lost already, each step once with its largest errors, and what is lost now."""
    before: dict[tuple[str, int], Loss] = {}
    for losses in lost:
        seen: dict[str, int] = {}
        for loss in losses:
            seen[loss.step] = seen.get(loss.step, 0) + 1
            key = loss.step, seen[loss.step]
            before[key] = _larger(before[key], loss) if key in before else loss
    now = [Loss(step=PARTIAL)] if report.missing else []
    if report.frobenius > _NOISE:
        now.append(Loss.measured(rule.step, frobenius=report.frobenius))
    return (*before.values(), *now)


def _larger(one: Loss, other: Loss) -> Loss:
    def larger(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else max(a, b)

    return Loss(
        step=one.step,
        frobenius=larger(one.frobenius, other.frobenius),
        quadratic=larger(one.quadratic, other.quadratic),
        vector=larger(one.vector, other.vector),
    )


def _about(rule: MergeRule, inputs: Sequence[MergeInput], factors: Sequence[float], report: MergeReport) -> About:
    first = inputs[0].curvature.about
    described = {p.name: p for each in inputs for p in each.curvature.about.base.parameters}
    names = in_order([each.curvature.parameters for each in inputs])
    parameters = tuple(described[name] for name in names)
    base = Base(
        family=first.base.family,
        name=first.base.name,
        revision=first.base.revision,
        sha256=base_digest(parameters),
        parameters=parameters,
    )
    merged = Merge(rule=rule.name, rank=rule.rank if rule.ranked else None, parents=rule.parents(inputs, factors))
    return About(
        base=base,
        function=first.function,
        output_scale=mean_output_scale(inputs, factors),
        scaling=first.scaling,
        estimate=rule.estimate(inputs),
        source=rule.source(inputs),
        merge=merged,
        losses=_losses(rule, [each.curvature.about.losses for each in inputs], report.total),
    )
