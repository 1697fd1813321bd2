"""`kp.merge`: merges the curvatures of many tasks into a curvature that approximates Σ w_t G_t, and measures the error.

The error of a block is Σ_st C_st B_s ⊗ A_t, where C is diag(w) minus the coefficients that the rule chooses. If X and Y
are the coordinates (see `strips.py`) of the matrices B and A, the norm of the error equals the norm of Xᵀ C Y.
Therefore, no Kronecker product is formed.
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
from kfacpack.merging.inputs import MergeInput, check_compatible, mean_output_scale, merge_ordered
from kfacpack.merging.rules import PARTIAL, RULES, MergeRule, Terms
from kfacpack.merging.strips import MatrixCombiner, coordinates, gram
from kfacpack.merging.subtract import merge_without

if TYPE_CHECKING:
    from kfacpack.curvature.blocks import CurvatureBlock
    from kfacpack.curvature.matrices.matrix import Matrix
    from kfacpack.merging.inputs import Mergeable
    from kfacpack.merging.rules import Combination


_NOISE = 1e-12
"""Relative errors below this value are rounding errors in the Gram matrices, not approximation errors."""
WORKERS = 2
"""Number of threads that compute Gram matrices. One thread can hash data while the other multiplies."""


@dataclass(frozen=True)
class BlockMergeReport:
    """The approximation error of one merged block."""

    name: str
    """Name of the block; empty for the total of all blocks."""
    terms: int
    """Number of terms of the block, summed over all inputs."""
    missing: tuple[str, ...] = ()
    """Inputs that do not have the block."""
    norm: float = 0.0
    """Norm ‖Σ w B ⊗ A‖ of the exact sum; 0 if it was not measured."""
    error: float = 0.0
    """Norm of the difference between the exact sum and the merged block."""
    bound: float = 0.0
    """The TAK paper's bound on the error, T σ_A σ_B, with the standard deviations of A and B over the T tasks."""

    @property
    def frobenius(self) -> float:
        """The error relative to the norm of the exact sum."""
        return self.error / self.norm if self.error else 0.0

    @property
    def relative_bound(self) -> float:
        """The bound on the error relative to the norm of the exact sum."""
        return self.bound / self.norm if self.bound else 0.0


@dataclass(frozen=True)
class MergeReport:
    """The approximation errors of a merge."""

    blocks: tuple[BlockMergeReport, ...]
    """One report per block."""
    measured: bool
    """Whether errors were measured; False if the merge is exact."""
    subtracted: tuple[str, ...] = ()
    """Tasks that were subtracted from an input. The error of the merge that produced this input is then unknown."""

    @property
    def total(self) -> BlockMergeReport:
        """A single report that combines the norms, errors and bounds of all blocks."""
        norm, error, bound = (
            hypot(*(getattr(block, key) for block in self.blocks)) for key in ("norm", "error", "bound")
        )
        terms, missing = sum(block.terms for block in self.blocks), {name for b in self.blocks for name in b.missing}
        return BlockMergeReport("", terms, tuple(sorted(missing)), norm, error, bound)

    @property
    def partial(self) -> tuple[BlockMergeReport, ...]:
        """Reports on the blocks that are missing from some inputs."""
        return tuple(block for block in self.blocks if block.missing)


@dataclass(frozen=True)
class MergeResult:
    """A merged curvature and its approximation errors."""

    curvature: Curvature
    """The merged curvature."""
    report: MergeReport
    """The approximation errors."""


def merge(
    curvatures: Iterable[Mergeable],
    rule: str = "tak",
    *,
    rank: int = 1,
    weights: Sequence[float] | None = None,
    without: Iterable[str] | str = (),
    allow_partial: bool = False,
) -> Curvature:
    """Merges curvatures into one curvature that approximates Σ w_t G_t, the weighted sum over all tasks t.

    The mean of the weights w_t is one. Blocks whose G is a single dense or diagonal matrix are summed exactly. For all
    other blocks, the approximation error of the rules "tak" and "optimal" is measured and recorded in the block's
    `losses`. The merged matrices are computed when they are used or saved.

    Args:
        curvatures: Curvatures or paths of bundles. Merged and compressed curvatures are allowed.
        rule: "tak" is the rule of the TAK paper, (Σ B_t) ⊗ (Σ λ_t A_t), where B_t and A_t are the Kronecker factors of
            G_t, and λ_t is w_t divided by the number of tasks; "optimal" is the nearest sum of `rank` Kronecker
            products; "stack" keeps every term; "shards" combines estimates of one task from different examples into
            the estimate from all these examples.
        rank: Number of Kronecker products that "optimal" keeps.
        weights: One positive weight per input. Only their ratios matter. By default, the weights are the dataset sizes.
        without: Names of tasks to leave out. If an input was merged by "tak" and contains such a task, the bundle for
            that task must be passed as another input so that it can be subtracted.
        allow_partial: Whether a block may be missing from some inputs. Such a block is summed over the inputs that
            have it.

    Returns:
        The merged curvature.

    Raises:
        KfacpackError: If the inputs are incompatible, or if the rule, rank or weights are invalid.
        SubtractionError: If a task to leave out cannot be subtracted exactly.

    Example:
        >>> merged = kp.merge(["cars.kfac", "dtd.kfac", "svhn.kfac"])
        >>> merged.save("merged.kfac")
        >>> others = kp.merge(["merged.kfac", "svhn.kfac"], without="svhn")
    """
    return merge_and_report(
        curvatures, rule, rank=rank, weights=weights, without=without, allow_partial=allow_partial
    ).curvature


def merge_and_report(
    curvatures: Iterable[Mergeable],
    rule: str = "tak",
    *,
    rank: int = 1,
    weights: Sequence[float] | None = None,
    without: Iterable[str] | str = (),
    allow_partial: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> MergeResult:
    """Merges curvatures like `merge` and reports the approximation errors.

    Args:
        curvatures: See `merge`.
        rule: See `merge`.
        rank: See `merge`.
        weights: See `merge`.
        without: See `merge`.
        allow_partial: See `merge`.
        on_progress: Called with the number of blocks merged and the total number of blocks.

    Returns:
        The merged curvature and the report.

    Raises:
        KfacpackError: See `merge`.
        SubtractionError: See `merge`.
    """
    if rule not in RULES:
        raise KfacpackError(f"unknown merge rule {rule!r}; expected one of {', '.join(RULES)}")
    merge_rule = RULES[rule](rank)
    if isinstance(curvatures, str | os.PathLike | Curvature):
        raise KfacpackError("expected a list of curvatures or paths to merge, got a single curvature or path")
    inputs = [MergeInput.of(source, position) for position, source in enumerate(curvatures, start=1)]
    if not inputs:
        raise KfacpackError("nothing to merge: expected at least one curvature")
    subtracted: tuple[str, ...] = ()
    if tasks := [without] if isinstance(without, str) else list(without):
        remaining = merge_without(inputs, tasks)
        if weights is not None and len(weights) == len(inputs):
            weights = [weights[index] for index, _ in remaining]
        subtracted = tuple(task for task in tasks if any(_contains_task(inputs[index], task) for index, _ in remaining))
        inputs = [item for _, item in remaining]
    check_compatible(inputs, allow_partial=allow_partial)
    merge_rule.check(inputs)
    factors = merge_rule.weights(inputs, weights)
    blocks, report = _merge_blocks(merge_rule, inputs, factors, on_progress)
    about = _about(merge_rule, inputs, factors, report)
    return MergeResult(Curvature(blocks, about), replace(report, subtracted=subtracted))


def _contains_task(item: MergeInput, task: str) -> bool:
    return any(parent.task == task for parent in item.parents)


def _merge_blocks(
    rule: MergeRule, inputs: Sequence[MergeInput], factors: Sequence[float], on_progress: Callable[[int, int], None]
) -> tuple[list[CurvatureBlock], MergeReport]:
    names = merge_ordered([list(item.blocks) for item in inputs])
    terms_of_blocks = [_terms(name, inputs, factors) for name in names]
    max_terms = max(len(terms.weights) for terms in terms_of_blocks)
    if rule.rank > max_terms:
        problem = f"the rank is {rule.rank}, but no block has that many terms"
        raise KfacpackError(f"{problem}; use a rank of at most {max_terms}")
    combine = MatrixCombiner()
    blocks, reports = [], []
    measure = not rule.exact and max_terms > 1
    with _GramMatrices(terms_of_blocks if measure else ()) as gram_matrices:
        for number, (name, block_terms) in enumerate(zip(names, terms_of_blocks, strict=True)):
            on_progress(number, len(names))
            terms = gram_matrices.add_coordinates(block_terms)
            combination = rule.kronecker(terms) if len(terms.sides) == 2 else rule.whole(terms)
            sides = [
                [combine(matrices, row.tolist()) for row in rows]
                for matrices, rows in zip(terms.sides, combination.sides, strict=True)
            ]
            missing = [item.name for item in inputs if name not in item.blocks]
            report = BlockMergeReport(name, len(terms.weights), tuple(missing))
            if measure:
                report = _measure(name, terms, combination, missing)
            own = [item.blocks[name] for item in inputs if name in item.blocks]
            structure = own[0].structure.of_sides(combination.weights.tolist(), sides)
            losses = _losses(rule, [block.losses for block in own], report)
            blocks.append(replace(own[0], structure=structure, losses=losses))
            reports.append(report)
    on_progress(len(names), len(names))
    return blocks, MergeReport(tuple(reports), measure)


def _terms(name: str, inputs: Sequence[MergeInput], factors: Sequence[float]) -> Terms:
    """Collects the terms of a block from all inputs that have it."""
    weights: list[float] = []
    tasks: list[float] = []
    sides: list[list[Matrix]] = []
    for item, factor in zip(inputs, factors, strict=True):
        if name in item.blocks:
            structure = item.blocks[name].structure
            weights += [factor * weight for weight in structure.weights]
            tasks += [item.tasks / len(structure.weights)] * len(structure.weights)
            sides = sides or [[] for _ in structure.sides]
            for matrices, own in zip(sides, structure.sides, strict=True):
                matrices += own
    return Terms(
        torch.tensor(weights, dtype=torch.float64),
        torch.tensor(tasks, dtype=torch.float64),
        tuple(map(tuple, sides)),
        inputs[0].curvature.about.scaling.sharing,
    )


class _GramMatrices:
    """Computes the coordinates of the matrices of all blocks in background threads.

    Matrices that several blocks share are processed only once.
    """

    def __init__(self, terms_of_blocks: Sequence[Terms]):
        self._pool = ThreadPoolExecutor(max_workers=WORKERS)
        self._sides: dict[tuple[int, ...], Future[Tensor]] = {}
        for terms in terms_of_blocks:
            for side in terms.sides:
                key = tuple(map(id, side))
                if key not in self._sides:
                    self._sides[key] = self._pool.submit(_coordinates_of, side)

    def __enter__(self) -> _GramMatrices:
        return self

    def __exit__(self, *failure: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add_coordinates(self, terms: Terms) -> Terms:
        """Waits until the coordinates of a block are computed. Returns the block's terms with these coordinates."""
        keys = [tuple(map(id, side)) for side in terms.sides]
        return replace(terms, coordinates=tuple(self._sides[key].result() for key in keys if key in self._sides))


def _coordinates_of(side: Sequence[Matrix]) -> Tensor:
    return coordinates(gram(side))


def _measure(name: str, terms: Terms, combination: Combination, missing: Sequence[str]) -> BlockMergeReport:
    """Computes the approximation error of a block and the TAK paper's bound on it."""
    count = len(terms.weights)
    if len(terms.sides) == 1:
        (X,) = terms.coordinates
        return BlockMergeReport(name, count, tuple(missing), float((X.T @ terms.weights).norm()))
    X, Y = terms.coordinates
    B, A = combination.sides
    target = torch.diag(terms.weights)
    lost = target - B.T @ (combination.weights[:, None] * A)
    # This bound applies the paper's proof to C_t = w_t A_t. With equal weights, it is the paper's own bound.
    bound = _deviation(X / terms.tasks[:, None], terms.tasks) * _deviation(terms.weights[:, None] * Y, terms.tasks)
    return BlockMergeReport(
        name, count, tuple(missing), float((X.T @ target @ Y).norm()), float((X.T @ lost @ Y).norm()), bound
    )


def _deviation(points: Tensor, tasks: Tensor) -> float:
    """Returns √T σ, where σ is the standard deviation of T points. Row k of `points` counts as `tasks[k]` points."""
    centered = points - tasks @ points / tasks.sum()
    return float((tasks[:, None].sqrt() * centered).norm())


def _losses(rule: MergeRule, earlier: Iterable[Sequence[Loss]], report: BlockMergeReport) -> tuple[Loss, ...]:
    """Combines the losses of the inputs, keeping the largest error for each step, and adds the losses of this merge."""
    before: dict[tuple[str, int], Loss] = {}
    for losses in earlier:
        seen: dict[str, int] = {}
        for loss in losses:
            seen[loss.step] = seen.get(loss.step, 0) + 1
            key = loss.step, seen[loss.step]
            before[key] = _larger(before[key], loss) if key in before else loss
    added = [Loss(step=PARTIAL)] if report.missing else []
    if report.frobenius > _NOISE:
        added.append(Loss.measured(rule.step, frobenius=report.frobenius))
    return (*before.values(), *added)


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
    """Builds the metadata of the merged curvature."""
    first = inputs[0].curvature.about
    by_name = {parameter.name: parameter for item in inputs for parameter in item.curvature.about.base.parameters}
    parameters = tuple(by_name[name] for name in merge_ordered([item.curvature.parameters for item in inputs]))
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
        metric=first.metric,
        scaling=first.scaling,
        estimate=rule.estimate(inputs),
        source=rule.source(inputs),
        merge=merged,
        losses=_losses(rule, [item.curvature.about.losses for item in inputs], report.total),
    )
