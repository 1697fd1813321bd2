"""How much each input counts in Σ w_t G_t.

λ_t is a task's share of all examples, or of the weights that were given, and w_t = T λ_t: the weights of T tasks
average one. An input that was merged from several tasks has such weights inside already, and is multiplied as a whole.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from kfacpack.bundle.manifest import OutputScale
from kfacpack.errors import KfacpackError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kfacpack.merging.inputs import Input


_LEAST, _MOST = 1e-30, 1e30
"""Of a weight. What lies outside is a slip of the pen, and would overflow."""


def relative(inputs: Sequence[Input], given: Sequence[float] | None) -> list[float]:
    """By what each input's G is multiplied: w_t for one task."""
    shares = _data_set_sizes(inputs) if given is None else _given(inputs, given)
    for each in inputs:
        if not each.tasks > 0:
            problem = f"its parents' weights add up to {each.tasks:g}, expected the number of its tasks"
            raise KfacpackError(f"{each.name}: {problem}")
    tasks = sum(each.tasks for each in inputs)
    return [tasks * share / sum(shares) / each.tasks for each, share in zip(inputs, shares, strict=True)]


def mean_output_scale(inputs: Sequence[Input], factors: Sequence[float]) -> OutputScale | None:
    """Scale of f over the merged tasks, each task weighted as its G is; None if an input does not record its own."""
    weights = [factor * each.tasks for each, factor in zip(inputs, factors, strict=True)]
    scales = [each.curvature.about.output_scale for each in inputs]
    known = [scale for scale in scales if scale is not None]
    if len(known) < len(scales):
        return None
    return weighted_scale(known, weights)


def weighted_scale(scales: Sequence[OutputScale], weights: Sequence[float]) -> OutputScale:
    """Weighted mean of scales; negative weights subtract."""

    def mean(values: Iterable[float]) -> float:
        total = sum(weight * value for weight, value in zip(weights, values, strict=True))
        return max(total / sum(weights), 0.0)

    return OutputScale(
        mean_square=mean(scale.mean_square for scale in scales), variance=mean(scale.variance for scale in scales)
    )


def _data_set_sizes(inputs: Sequence[Input]) -> list[float]:
    if len(inputs) == 1:
        return [1.0]
    for each in inputs:
        if not each.dataset_size:
            ones = ["1"] * len(inputs)
            raise KfacpackError(
                f"{each.name}: does not say how large its data set is, by which tasks are weighted. "
                f"Give weights, one number for each input: --weights {','.join(ones)} (weights=[{', '.join(ones)}]), "
                "or estimate it with source=kp.Source(task=NAME, dataset_size=N)"
            )
    return [float(each.dataset_size or 0) for each in inputs]


def _given(inputs: Sequence[Input], given: Sequence[float]) -> list[float]:
    if len(given) != len(inputs):
        raise KfacpackError(f"expected {len(inputs)} weights, one for each input, found {len(given)}")
    for each, weight in zip(inputs, given, strict=True):
        if not isinstance(weight, int | float) or not (isfinite(weight) and _LEAST <= weight <= _MOST):
            raise KfacpackError(f"{each.name}: its weight is {weight}, expected a positive number")
    return [float(weight) for weight in given]
