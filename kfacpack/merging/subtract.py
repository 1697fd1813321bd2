"""Subtraction of tasks from a merged curvature.

`tak` stores sums over T tasks: B = Σ B_t and T A = Σ w_t A_t, or G = Σ w_t G_t for blocks with a single matrix. Let D
be the set of tasks to remove, T_D their number, and f the factor by which the merge multiplied their weights. The
weights of the other tasks are rescaled so that their mean is one again. Up to rounding errors, the result is the merge
of only the other tasks:

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
from kfacpack.merging.inputs import MergeInput, weighted_scale
from kfacpack.merging.rules import PARTIAL, RULES, OptimalRule, TakRule
from kfacpack.merging.strips import MatrixCombiner, gram

if TYPE_CHECKING:
    from kfacpack.curvature.blocks import CurvatureBlock
    from kfacpack.curvature.matrices.matrix import Matrix
    from kfacpack.format.manifest import OutputScale


_SMALL = 1e-2
"""Threshold on the fraction of a matrix's norm that remains after a subtraction.

At or below this threshold, rounding errors may make eigenvalues of the result negative, so the result is not marked as
positive semi-definite.
"""
_PRECISION_LOSS = 1e-4
"""Minimum fraction of a matrix's norm that must remain after a subtraction.

Below this fraction, rounding errors are at least a thousandth of the result, so the subtraction is refused.
"""
_REMEDY = "Merge the bundles of the other tasks again"


def merge_without(inputs: Sequence[MergeInput], tasks: Sequence[str]) -> list[tuple[int, MergeInput]]:
    """Removes tasks from the inputs of a merge.

    Inputs that contain only these tasks are first subtracted from the merged inputs that contain their bundles, and
    then dropped.

    Args:
        inputs: The inputs.
        tasks: Names of the tasks to remove.

    Returns:
        The remaining inputs, each with its index in `inputs`.

    Raises:
        KfacpackError: If one of the tasks is in none of the inputs, or if no input remains.
        SubtractionError: If a task cannot be subtracted exactly.
    """
    removed = [item for item in inputs if all(parent.task in tasks for parent in item.parents)]
    kept = [(index, item) for index, item in enumerate(inputs) if item not in removed]
    available = {parent.task for item in inputs for parent in item.parents}
    for task in tasks:
        if task not in available:
            names = ", ".join(sorted(filter(None, available))) or "none with a name"
            raise KfacpackError(f"no input contains the task {task!r}; available tasks: {names}")
    if not kept:
        raise KfacpackError(f"no input remains after the removal of these tasks: {', '.join(tasks)}")
    remaining = []
    for index, item in kept:
        merged = item
        for part in removed:
            if {parent.sha256 for parent in part.parents} <= {parent.sha256 for parent in merged.parents}:
                merged = subtract_parents(merged, part)
        if remaining_tasks := [parent.task for parent in merged.parents if parent.task in tasks]:
            _require_sums(merged, [TakRule.name])  # for other rules, passing the task's own bundle would not help
            problem = f"contains the task {remaining_tasks[0]!r}, but the bundle of this task is not among the inputs"
            raise SubtractionError(f"{merged.name}: {problem}. Add this bundle, or merge the other tasks again")
        remaining.append((index, merged))
    return remaining


def subtract_parents(merged: MergeInput, part: MergeInput) -> MergeInput:
    """Subtracts one or several parents from a merged curvature.

    Args:
        merged: A curvature that was merged with the rule `tak`.
        part: One of the parents of `merged`, or a curvature merged from several of them.

    Returns:
        The curvature of the remaining parents.

    Raises:
        SubtractionError: If the merged factors are not exact sums, if the blocks of `merged` and `part` do not match,
            or if too little precision would remain.
    """
    _require_sums(merged, [TakRule.name])
    if part.curvature.about.merge:
        _require_sums(part, [name for name, rule in RULES.items() if rule.keeps_sums])
    factor = _factor(merged, part)
    others, remaining = merged.tasks - part.tasks, merged.tasks - factor * part.tasks
    combine = MatrixCombiner()
    blocks = [_subtract_block(block, merged, part, factor, combine) for block in merged.curvature.blocks]
    removed = {parent.sha256 for parent in part.parents}
    parents = tuple(
        parent.model_copy(update={"weight": parent.weight * others / remaining})
        for parent in merged.parents
        if parent.sha256 not in removed
    )
    about = merged.curvature.about
    changes = {
        "merge": Merge(rule=TakRule.name, parents=parents),
        "losses": _unmeasured(about.losses),
        "output_scale": _remaining_output_scale(merged, part, factor),
    }
    return MergeInput(Curvature(blocks, about.model_copy(update=changes)), f"{merged.name} without {part.name}")


def _subtract_block(
    block: CurvatureBlock, merged: MergeInput, part: MergeInput, factor: float, combine: MatrixCombiner
) -> CurvatureBlock:
    others, remaining = merged.tasks - part.tasks, merged.tasks - factor * part.tasks
    own = part.blocks.get(block.name)
    whole = block.structure
    if own is None or own.join != block.join or len(own.structure.sides) != len(whole.sides) or len(whole.weights) > 1:
        raise SubtractionError(f"{part.name}: has no block {block.name!r} that matches the block in {merged.name}")
    weights = own.structure.weights
    sides = [(*matrices, *removed) for matrices, removed in zip(whole.sides, own.structure.sides, strict=True)]
    G = [others / remaining, -factor * others / remaining]
    B = [1.0, *(-1.0 for _ in weights)]
    A = [merged.tasks * whole.weights[0], *(-factor * part.tasks / len(weights) * weight for weight in weights)]
    coefficients = [G] if len(sides) == 1 else [B, [value / remaining for value in A]]
    combined = []
    for matrices, values in zip(sides, coefficients, strict=True):
        fraction = _remaining_fraction(matrices, values)
        if fraction < _PRECISION_LOSS:
            problem = f"the rounding errors of the subtraction would be too large in its block {block.name!r}"
            raise SubtractionError(f"{merged.name}: {problem}. {_REMEDY}")
        psd = fraction > _SMALL and all(matrix.psd for matrix in matrices)
        combined.append([combine(matrices, values, psd=psd)])
    return replace(block, structure=whole.of_sides([1.0], combined), losses=_unmeasured(block.losses))


def _remaining_output_scale(merged: MergeInput, part: MergeInput, factor: float) -> OutputScale | None:
    """Returns the scale of f over the remaining tasks, as a weighted mean without the subtracted tasks."""
    whole, removed = (item.curvature.about.output_scale for item in (merged, part))
    if whole is None or removed is None:
        return None
    return weighted_scale([whole, removed], [merged.tasks, -factor * part.tasks])


def _unmeasured(losses: Sequence[Loss]) -> tuple[Loss, ...]:
    """Clears the recorded error of `tak`, which cannot be updated without the bundles of the remaining tasks."""
    return tuple(Loss(step=TakRule.name) if loss.step == TakRule.name else loss for loss in losses)


def _require_sums(item: MergeInput, rules: Sequence[str]) -> None:
    """Checks that the factors of a merged curvature are exact sums of its parents' factors."""
    merge = item.curvature.about.merge
    if merge is None or merge.rule not in rules:
        problem = f"was merged by {merge.rule!r}" if merge else "was not merged"
        required = f"exact subtraction requires {' or '.join(rules)} as the merge rule"
        raise SubtractionError(f"{item.name}: {problem}; {required}. {_REMEDY}")
    # Parents may have been compressed before the merge, which then summed the compressed matrices.
    steps = [loss.step for loss in item.curvature.about.losses]
    since_merge = steps[steps.index(TakRule.name) + 1 :] if TakRule.name in steps else steps
    inexact = [step for step in steps if step == PARTIAL or step.startswith(f"{OptimalRule.name}:")]
    if lossy := [*inexact, *since_merge]:
        problem = f"it was processed by {lossy[0]!r}, so it may no longer be the sum of its parents"
        if lossy[0] == PARTIAL:
            missing = f"some of its parents lack some of its blocks (recorded as {PARTIAL!r})"
            problem = f"{missing}, so its parents cannot be subtracted exactly"
        raise SubtractionError(f"{item.name}: {problem}. {_REMEDY}")


def _factor(merged: MergeInput, part: MergeInput) -> float:
    """Returns the factor by which `part` was multiplied when it was merged into `merged`."""
    weights = {parent.sha256: parent.weight for parent in merged.parents}
    factors = [weights[parent.sha256] / parent.weight for parent in part.parents]
    if not all(isclose(factor, factors[0], rel_tol=1e-9) for factor in factors):
        raise SubtractionError(
            f"{part.name}: cannot be subtracted, because {merged.name} contains its parents with different relative "
            "weights"
        )
    return factors[0]


def _remaining_fraction(matrices: Sequence[Matrix], coefficients: Sequence[float]) -> float:
    """Returns the norm of Σ coefficient · matrix relative to the norm of its first term."""
    values = torch.tensor(coefficients, dtype=torch.float64)
    products = gram(matrices)
    whole = float(products[0, 0]) * coefficients[0] ** 2
    return (max(float(values @ products @ values), 0.0) / whole) ** 0.5 if whole > 0 else 1.0
