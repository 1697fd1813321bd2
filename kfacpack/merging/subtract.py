"""A task taken out of a merged curvature again.

`tak` keeps sums: of T tasks B = Σ B_t and T A = Σ w_t A_t. Of these, T_D are to go, whose weights were multiplied by f
on the way in. The other weights are scaled to average one again, and what remains is, to rounding, what merging the
others alone gives:

    B' = B − Σ_D B_d        A' = (T A − f Σ_D w_d A_d) / (T − f T_D)        G' = (T − T_D) (G − f G_D) / (T − f T_D)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isclose
from typing import TYPE_CHECKING

import torch

from kfacpack.curvature.curvature import Curvature
from kfacpack.errors import KfacpackError, SubtractionError
from kfacpack.format.manifest import Loss, Merge
from kfacpack.merging.combination import MatrixCombiner, gram
from kfacpack.merging.inputs import MergeInput, weighted_scale
from kfacpack.merging.rule import PARTIAL
from kfacpack.merging.rules import RULES, OptimalRule, TakRule

if TYPE_CHECKING:
    from kfacpack.curvature.matrices.matrix import Matrix
    from kfacpack.format.manifest import OutputScale


_SMALL = 1e-2
"""What remains of a matrix, relative to it, below which its rounding errors may show as negative eigenvalues."""
_PRECISION_LOSS = 1e-4
"""And below which they are a thousandth of what remains."""


def merge_without(inputs: Sequence[MergeInput], tasks: Sequence[str]) -> list[tuple[int, MergeInput]]:
    """The inputs without those of some tasks, which are also subtracted from merged ones; each with its old place."""
    own = [each for each in inputs if all(parent.task in tasks for parent in each.parents)]
    rest = [(place, each) for place, each in enumerate(inputs) if each not in own]
    there = {parent.task for each in inputs for parent in each.parents}
    for task in tasks:
        if task not in there:
            known = ", ".join(sorted(filter(None, there))) or "none that is named"
            raise KfacpackError(f"no input is of the task {task!r}; there are {known}")
    if not rest:
        raise KfacpackError(f"nothing remains without {', '.join(tasks)}")
    found = []
    for place, merged in rest:
        for each in own:
            if {parent.sha256 for parent in each.parents} <= {parent.sha256 for parent in merged.parents}:
                merged = subtract_parents(merged, each)
        if left := [parent.task for parent in merged.parents if parent.task in tasks]:
            problem = f"contains {left[0]!r}, and no input is that very bundle, which could be subtracted"
            raise SubtractionError(f"{merged.name}: {problem}. Give it, too, or merge the other tasks' bundles anew")
        found.append((place, merged))
    return found


def subtract_parents(merged: MergeInput, own: MergeInput) -> MergeInput:
    """What was merged, without one of its parents, or without what several of them were merged to."""
    _require_sums(merged, [TakRule.name])
    if own.curvature.about.merge:
        _require_sums(own, [name for name, rule in RULES.items() if rule.keeps_sums])
    factor = _factor(merged, own)
    others, remaining = merged.tasks - own.tasks, merged.tasks - factor * own.tasks
    combine = MatrixCombiner()
    blocks = []
    for block in merged.curvature.blocks:
        mine = own.blocks.get(block.name, block)
        whole, part = block.structure, mine.structure
        if mine is block or mine.join != block.join or len(part.sides) != len(whole.sides) or len(whole.weights) > 1:
            raise SubtractionError(f"{own.name}: has no such block {block.name!r} as {merged.name} has")
        sides = [(*ours, *theirs) for ours, theirs in zip(whole.sides, part.sides, strict=True)]
        G = [others / remaining, -factor * others / remaining]
        B = [1.0, *(-1.0 for _ in part.weights)]
        A = [merged.tasks * whole.weights[0], *(-factor * own.tasks / len(part.weights) * w for w in part.weights)]
        coefficients = [G] if len(sides) == 1 else [B, [each / remaining for each in A]]
        made = []
        for side, each in zip(sides, coefficients, strict=True):
            left = _remaining(side, each)
            if left < _PRECISION_LOSS:
                problem = f"what remains of its block {block.name!r} is lost in the rounding of what is subtracted"
                raise SubtractionError(f"{merged.name}: {problem}. Merge the other tasks' bundles anew")
            psd = left > _SMALL and all(matrix.psd for matrix in side)
            made.append([combine(side, each, psd=psd)])
        blocks.append(replace(block, structure=whole.of_sides([1.0], made), losses=_not_known(block.losses)))
    gone = {parent.sha256 for parent in own.parents}
    parents = tuple(
        parent.model_copy(update={"weight": parent.weight * others / remaining})
        for parent in merged.parents
        if parent.sha256 not in gone
    )
    about, merge = merged.curvature.about, Merge(rule=TakRule.name, parents=parents)
    changes = {
        "merge": merge,
        "losses": _not_known(about.losses),
        "output_scale": _remaining_output_scale(merged, own, factor),
    }
    about = about.model_copy(update=changes)
    return MergeInput(Curvature(blocks, about), f"{merged.name} without {own.name}")


def _remaining_output_scale(merged: MergeInput, own: MergeInput, factor: float) -> OutputScale | None:
    """Scale of f over the tasks that remain: the weighted mean without the subtracted tasks' share."""
    whole, part = (each.curvature.about.output_scale for each in (merged, own))
    if whole is None or part is None:
        return None
    return weighted_scale([whole, part], [merged.tasks, -factor * own.tasks])


def _not_known(losses: Sequence[Loss]) -> tuple[Loss, ...]:
    """The error of the remaining tasks' sum depends on each of them, and they are not there."""
    return tuple(Loss(step=TakRule.name) if loss.step == TakRule.name else loss for loss in losses)


def _require_sums(each: MergeInput, rules: Sequence[str]) -> None:
    """Refuse what does not consist of its parents' sums alone."""
    merge = each.curvature.about.merge
    remedy = "Merge the other tasks' bundles anew"
    if merge is None or merge.rule not in rules:
        how = f"was merged by {merge.rule!r}" if merge else "was not merged"
        raise SubtractionError(f"{each.name}: {how}; to subtract exactly takes {' or '.join(rules)}. {remedy}")
    # A codec that parents went through before they were merged is no hindrance: it is they that were added up.
    steps = [loss.step for loss in each.curvature.about.losses]
    since = steps[steps.index(TakRule.name) + 1 :] if TakRule.name in steps else steps
    other = [step for step in steps if step == PARTIAL or step.startswith(f"{OptimalRule.name}:")]
    if found := [*other, *since]:
        problem = f"it went through {found[0]!r}, so it may be no sum of its parents any more"
        raise SubtractionError(f"{each.name}: {problem}. {remedy}")


def _factor(merged: MergeInput, own: MergeInput) -> float:
    """By what `own` was multiplied when it was merged."""
    weights = {parent.sha256: parent.weight for parent in merged.parents}
    factors = [weights[parent.sha256] / parent.weight for parent in own.parents]
    if not all(isclose(factor, factors[0], rel_tol=1e-9) for factor in factors):
        raise SubtractionError(
            f"{own.name}: {merged.name} has its parents with other weights, so it cannot be subtracted"
        )
    return factors[0]


def _remaining(matrices: Sequence[Matrix], coefficients: Sequence[float]) -> float:
    """What remains of the first matrix, as a share of its norm."""
    values = torch.tensor(coefficients, dtype=torch.float64)
    products = gram(matrices)
    whole = float(products[0, 0]) * coefficients[0] ** 2
    return (max(float(values @ products @ values), 0.0) / whole) ** 0.5 if whole > 0 else 1.0
