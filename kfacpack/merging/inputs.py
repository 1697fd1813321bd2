"""The inputs of a merge: their provenance, weights and compatibility.

The target of a merge is Σ w_t G_t, where G_t is the curvature of task t. λ_t is the task's share of all examples, or of
the weights that the user passes, and w_t = T λ_t, so that the mean weight of the T tasks is one. An input that was
itself merged from several tasks already contains such weights and is multiplied by a single factor.

Curvatures can be merged if they have the same base model, function f, metric, scaling and blocks, and were estimated
from different data.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import TYPE_CHECKING, TypeVar

from kfacpack.curvature.curvature import Curvature, load
from kfacpack.errors import KfacpackError
from kfacpack.format.identity import function_difference, share_classes
from kfacpack.format.manifest import OutputScale, Parent

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kfacpack.curvature.blocks import CurvatureBlock
    from kfacpack.format.manifest import Estimate, Parameter, Source

    Mergeable = Curvature | str | os.PathLike[str]


T = TypeVar("T")
_MIN_WEIGHT, _MAX_WEIGHT = 1e-30, 1e30
"""Smallest and largest valid weights. Other weights could cause an overflow or underflow."""
_ALLOW_PARTIAL = "To sum each block over the inputs that have it, pass --allow-partial (allow_partial=True)"


@dataclass(frozen=True)
class MergeInput:
    """A curvature to be merged, with the provenance that its manifest records."""

    curvature: Curvature
    """The curvature."""
    name: str
    """Name for error messages: the path of the file, or the position among the inputs."""

    @classmethod
    def of(cls, source: Mergeable, position: int) -> MergeInput:
        """Creates an input from a curvature or from the path of a bundle.

        Args:
            source: A curvature or the path of a bundle.
            position: Position among the inputs, counted from 1, for error messages.

        Raises:
            KfacpackError: If `source` is neither a curvature nor a path.
        """
        curvature = load(source) if isinstance(source, str | os.PathLike) else source
        if not isinstance(curvature, Curvature):
            raise KfacpackError(f"input {position}: expected a curvature or a path, got {type(source).__name__}")
        path = curvature.bundle.path if curvature.bundle else None
        return cls(curvature, str(path) if path else f"input {position}")

    @cached_property
    def parents(self) -> tuple[Parent, ...]:
        """The bundles that were merged into the input, with their weights, or the input itself if it is not merged."""
        if merge := self.curvature.about.merge:
            return merge.parents
        task, size = (self.source.task, self.source.dataset_size) if self.source else (None, self._example_count())
        return (Parent(sha256=self.curvature.digest, weight=1.0, task=task, dataset_size=size),)

    def _example_count(self) -> int | None:
        """Returns the number of examples in the estimate, used as the dataset size if no source is recorded."""
        matrices = (matrix for block in self.curvature.blocks for _, matrix in block.structure.matrices())
        return max((matrix.examples for matrix in matrices if matrix.examples), default=None)

    @property
    def tasks(self) -> float:
        """Number of tasks in the input, computed as the sum of the parents' weights.

        The mean of the weights is one if the parents are different tasks; their sum is one for shards of one task.
        """
        return sum(parent.weight for parent in self.parents)

    @property
    def dataset_size(self) -> int | None:
        """Total size of the parents' datasets, or None if the size of any dataset is unknown."""
        sizes = [parent.dataset_size for parent in self.parents if parent.dataset_size is not None]
        return sum(sizes) if len(sizes) == len(self.parents) else None

    @cached_property
    def blocks(self) -> dict[str, CurvatureBlock]:
        """Blocks by name."""
        return {block.name: block for block in self.curvature.blocks}

    @property
    def source(self) -> Source | None:
        """The data from which the curvature was estimated."""
        return self.curvature.about.source

    @property
    def estimate(self) -> Estimate | None:
        """The settings with which the curvature was estimated."""
        return self.curvature.about.estimate

    @property
    def estimate_without_seed(self) -> Estimate | None:
        """The settings in `estimate` without the seed, for comparing estimates that differ only in their seeds."""
        return self.estimate and self.estimate.model_copy(update={"seed": None})


def relative_weights(inputs: Sequence[MergeInput], weights: Sequence[float] | None) -> list[float]:
    """Computes the factor by which each input's G is multiplied. For an input with one task, the factor is w_t.

    Args:
        inputs: The inputs.
        weights: One positive weight per input. Only their ratios matter. If None, the dataset sizes are the weights.

    Returns:
        One factor per input.

    Raises:
        KfacpackError: If the weights are invalid, or if they are None and the size of a dataset is unknown.
    """
    shares = _dataset_sizes(inputs) if weights is None else _check_weights(inputs, weights)
    for item in inputs:
        if not item.tasks > 0:
            problem = f"the weights of its parents sum to {item.tasks:g}, expected a positive number"
            raise KfacpackError(f"{item.name}: {problem}")
    tasks = sum(item.tasks for item in inputs)
    return [tasks * share / sum(shares) / item.tasks for item, share in zip(inputs, shares, strict=True)]


def mean_output_scale(inputs: Sequence[MergeInput], factors: Sequence[float]) -> OutputScale | None:
    """Returns the scale of f over the merged tasks, or None if an input does not record its scale.

    The scale is a weighted mean, with the weights that the tasks have in the merged G.

    Args:
        inputs: The inputs.
        factors: The factor of each input, as computed by `relative_weights`.
    """
    weights = [factor * item.tasks for item, factor in zip(inputs, factors, strict=True)]
    scales = [item.curvature.about.output_scale for item in inputs]
    recorded = [scale for scale in scales if scale is not None]
    if len(recorded) < len(scales):
        return None
    return weighted_scale(recorded, weights)


def scale_of_f(inputs: Sequence[MergeInput]) -> float:
    """Returns the scale of f over the tasks of all bundles. If f is normalised, the scale is 1.

    The scale is a weighted mean, with the weights that the tasks have in the sum of all G. With the metric `kl`, the
    scale is also 1, because the unit of this metric, nats, does not depend on the scale of f.

    Args:
        inputs: The bundles. A bundle that does not record its scale is assumed to have the mean scale of the others.

    Returns:
        The scale, or 0 if no bundle records it.
    """
    about = inputs[0].curvature.about
    if about.function.normalized or about.metric == "kl":
        return 1.0
    recorded = [bundle for bundle in inputs if bundle.curvature.about.output_scale]
    scale = mean_output_scale(recorded, [1.0] * len(recorded)) if recorded else None
    return scale.reference if scale else 0.0


def weighted_scale(scales: Sequence[OutputScale], weights: Sequence[float]) -> OutputScale:
    """Returns the weighted mean of output scales. A negative weight subtracts a scale."""

    def mean(values: Iterable[float]) -> float:
        total = sum(weight * value for weight, value in zip(weights, values, strict=True))
        return max(total / sum(weights), 0.0)

    return OutputScale(
        mean_square=mean(scale.mean_square for scale in scales), variance=mean(scale.variance for scale in scales)
    )


def _dataset_sizes(inputs: Sequence[MergeInput]) -> list[float]:
    if len(inputs) == 1:
        return [1.0]
    for item in inputs:
        if not item.dataset_size:
            ones = ["1"] * len(inputs)
            raise KfacpackError(
                f"{item.name}: does not record the size of its dataset, which determines its weight. "
                f"Pass one weight per input: --weights {','.join(ones)} (weights=[{', '.join(ones)}]), "
                "or estimate the curvature with source=kp.Source(task=NAME, dataset_size=N)"
            )
    return [float(item.dataset_size or 0) for item in inputs]


def _check_weights(inputs: Sequence[MergeInput], weights: Sequence[float]) -> list[float]:
    if len(weights) != len(inputs):
        raise KfacpackError(f"the number of weights is {len(weights)}, expected {len(inputs)}, one per input")
    for item, weight in zip(inputs, weights, strict=True):
        if not isinstance(weight, int | float) or not (isfinite(weight) and _MIN_WEIGHT <= weight <= _MAX_WEIGHT):
            expected = f"expected a number from {_MIN_WEIGHT:g} to {_MAX_WEIGHT:g}"
            raise KfacpackError(f"{item.name}: the weight is {weight!r}, {expected}")
    return [float(weight) for weight in weights]


def check_compatible(inputs: Sequence[MergeInput], *, allow_partial: bool) -> None:
    """Checks that inputs can be merged block by block.

    Args:
        inputs: The inputs.
        allow_partial: Whether blocks may be missing from some inputs.

    Raises:
        KfacpackError: If two inputs are incompatible. The message names both inputs and describes the difference.
    """
    check_addable(inputs)
    _check_blocks(inputs, allow_partial)


def check_addable(inputs: Sequence[MergeInput]) -> None:
    """Checks that the quadratic forms of the inputs can be added, regardless of their blocks.

    Raises:
        KfacpackError: If the inputs differ in f, the metric, the scaling or the base model, or if two inputs contain
            the same bundle.
    """
    first, *others = inputs
    for other in others:
        _check_function(first, other)
        scaling, other_scaling = first.curvature.about.scaling, other.curvature.about.scaling
        if scaling != other_scaling:
            problem = f"use different scalings: {scaling.sharing!r} and {other_scaling.sharing!r}"
            raise _incompatible(first, other, problem)
    _check_base(inputs)
    _check_parents(inputs)


def merge_ordered(lists: Iterable[Sequence[T]]) -> list[T]:
    """Merges lists into one without duplicates, preserving the order of each list."""
    merged: list[T] = []
    for items in lists:
        if list(items) == merged:
            continue
        index = 0
        for item in items:
            if item not in merged:
                merged.insert(index, item)
            index = merged.index(item) + 1
    return merged


def _incompatible(one: MergeInput, other: MergeInput, difference: str, remedy: str = "") -> KfacpackError:
    return KfacpackError(f"{one.name} and {other.name} {difference}" + (f". {remedy}" if remedy else ""))


def _check_function(one: MergeInput, other: MergeInput) -> None:
    if difference := function_difference(one.curvature.about.function, other.curvature.about.function):
        raise _incompatible(one, other, f"have different functions f: {difference}")
    metric, other_metric = (item.curvature.about.metric or "l2" for item in (one, other))
    if metric != other_metric:
        remedy = "Estimate both with the same --metric"
        raise _incompatible(one, other, f"have different metrics: {metric!r} and {other_metric!r}", remedy)


def _check_base(inputs: Sequence[MergeInput]) -> None:
    seen: dict[str, tuple[MergeInput, Parameter]] = {}
    for item in inputs:
        parameters = item.curvature.about.base.parameters
        if seen and not any(parameter.name in seen for parameter in parameters):
            problem = "have no parameter in common, so their base models cannot be compared"
            raise _incompatible(inputs[0], item, problem)
        for parameter in parameters:
            other, first = seen.setdefault(parameter.name, (item, parameter))
            if first != parameter:
                models = " and ".join(owner.curvature.about.base.name for owner in (other, item))
                problem = f"have different base models ({models}): the parameter {parameter.name!r} differs"
                raise _incompatible(other, item, problem)


def _check_parents(inputs: Sequence[MergeInput]) -> None:
    seen: dict[str, MergeInput] = {}
    for item in inputs:
        for parent in item.parents:
            if parent.sha256 in seen:
                bundle = f"the bundle {parent.sha256[:12]}…" + (f" for the task {parent.task!r}" if parent.task else "")
                other, task = seen[parent.sha256], parent.task or "TASK"
                merged = other.curvature.about.merge or item.curvature.about.merge
                subtract = f"Subtract it from a merged bundle with kfacpack merge --without {task} (without={task!r})"
                remedy = subtract if merged else "Pass it only once"
                raise _incompatible(other, item, f"both contain {bundle}, which would be counted twice", remedy)
            seen[parent.sha256] = item


def check_tasks(inputs: Sequence[MergeInput]) -> None:
    """Checks that no task occurs in two inputs, even if their curvatures differ, for example because of compression.

    A class split of a task (NAME@k/n) overlaps with the task itself.

    Raises:
        KfacpackError: If two inputs share a task or classes of a task.
    """
    seen: dict[str, MergeInput] = {}
    for item in inputs:
        for task in {parent.task: None for parent in item.parents if parent.task}:
            if task in seen:
                remedy = "Pass only one of them. To combine estimates from different examples, use the rule 'shards'"
                problem = f"both contain the task {task!r}, which would be counted twice"
                raise _incompatible(seen[task], item, problem, remedy)
            others = (name for name, owner in seen.items() if owner is not item and share_classes(name, task))
            if other := next(others, None):
                problem = f"contain the tasks {other!r} and {task!r}, whose common classes would be counted twice"
                remedy = "Pass only one of them, or pass class splits without common classes"
                raise _incompatible(seen[other], item, problem, remedy)
            seen[task] = item


def _check_blocks(inputs: Sequence[MergeInput], allow_partial: bool) -> None:
    owner: dict[str, MergeInput] = {}
    partition: dict[str, tuple[MergeInput, set[str]]] = {}
    for item in inputs:
        for parameter, names in _partition(item).items():
            other, first_names = partition.setdefault(parameter, (item, names))
            if first_names != names:
                raise _incompatible(other, item, f"assign the parameter {parameter!r} to different blocks")
        for name, block in item.blocks.items():
            other = owner.setdefault(name, item)
            first_block = other.blocks[name]
            if first_block.join != block.join:
                raise _incompatible(other, item, f"arrange the parameters of the block {name!r} differently")
            if len(first_block.structure.sides) != len(block.structure.sides):
                problem = f"store the block {name!r} differently: one as Kronecker factors, one as a single matrix"
                raise _incompatible(other, item, problem)
    for item in inputs:
        missing = [name for name in owner if name not in item.blocks]
        if missing and not allow_partial:
            more = f" ({len(missing)} missing blocks in total)" if len(missing) > 1 else ""
            other = owner[missing[0]]
            raise KfacpackError(
                f"{item.name} does not have the block {missing[0]!r}, which {other.name} has{more}. {_ALLOW_PARTIAL}"
            )


def _partition(item: MergeInput) -> dict[str, set[str]]:
    """Returns the names of the blocks that cover each parameter."""
    blocks: dict[str, set[str]] = defaultdict(set)
    for block in item.curvature.blocks:
        for parameter in block.parameters:
            blocks[parameter].add(block.name)
    return blocks
