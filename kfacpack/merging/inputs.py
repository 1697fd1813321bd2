"""What is merged: a curvature, and what its manifest tells about where it comes from.

How much each input counts in Σ w_t G_t.

λ_t is a task's share of all examples, or of the weights that were given, and w_t = T λ_t: the weights of T tasks
average one. An input that was merged from several tasks has such weights inside already, and is multiplied as a whole.

What may be merged: curvatures of one base model and one f, scaled alike, from different data, in the same blocks.
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


@dataclass(frozen=True)
class MergeInput:
    curvature: Curvature
    name: str
    """What errors call it: its file, or its place among the inputs."""

    @classmethod
    def of(cls, given: Mergeable, place: int) -> MergeInput:
        curvature = load(given) if isinstance(given, str | os.PathLike) else given
        if not isinstance(curvature, Curvature):
            raise KfacpackError(f"input {place}: expected a curvature or the path of one, found {type(given).__name__}")
        path = curvature.bundle.path if curvature.bundle else None
        return cls(curvature, str(path) if path else f"input {place}")

    @cached_property
    def parents(self) -> tuple[Parent, ...]:
        """The bundles behind it that were not merged themselves, with their weights; at least one."""
        if merge := self.curvature.about.merge:
            return merge.parents
        task, size = (self.source.task, self.source.dataset_size) if self.source else (None, self._seen())
        return (Parent(sha256=self.curvature.digest, weight=1.0, task=task, dataset_size=size),)

    def _seen(self) -> int | None:
        """The examples it was estimated from: the whole of its data, where nothing is said of a larger set."""
        matrices = (matrix for block in self.curvature.blocks for _, matrix in block.structure.matrices())
        return max((matrix.examples for matrix in matrices if matrix.examples), default=None)

    @property
    def tasks(self) -> float:
        """How many tasks it stands for. Weights average one over the tasks, so they add up to their number."""
        return sum(parent.weight for parent in self.parents)

    @property
    def dataset_size(self) -> int | None:
        """Of all the tasks behind it."""
        sizes = [parent.dataset_size for parent in self.parents if parent.dataset_size is not None]
        return sum(sizes) if len(sizes) == len(self.parents) else None

    @cached_property
    def blocks(self) -> dict[str, CurvatureBlock]:
        return {block.name: block for block in self.curvature.blocks}

    @property
    def source(self) -> Source | None:
        return self.curvature.about.source

    @property
    def estimate(self) -> Estimate | None:
        return self.curvature.about.estimate

    @property
    def estimate_without_seed(self) -> Estimate | None:
        return self.estimate and self.estimate.model_copy(update={"seed": None})


_LEAST, _MOST = 1e-30, 1e30
"""Of a weight. What lies outside is a slip of the pen, and would overflow."""


def relative_weights(inputs: Sequence[MergeInput], given: Sequence[float] | None) -> list[float]:
    """By what each input's G is multiplied: w_t for one task."""
    shares = _data_set_sizes(inputs) if given is None else _check_weights(inputs, given)
    for each in inputs:
        if not each.tasks > 0:
            problem = f"its parents' weights add up to {each.tasks:g}, expected the number of its tasks"
            raise KfacpackError(f"{each.name}: {problem}")
    tasks = sum(each.tasks for each in inputs)
    return [tasks * share / sum(shares) / each.tasks for each, share in zip(inputs, shares, strict=True)]


def mean_output_scale(inputs: Sequence[MergeInput], factors: Sequence[float]) -> OutputScale | None:
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


def _data_set_sizes(inputs: Sequence[MergeInput]) -> list[float]:
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


def _check_weights(inputs: Sequence[MergeInput], given: Sequence[float]) -> list[float]:
    if len(given) != len(inputs):
        raise KfacpackError(f"expected {len(inputs)} weights, one for each input, found {len(given)}")
    for each, weight in zip(inputs, given, strict=True):
        if not isinstance(weight, int | float) or not (isfinite(weight) and _LEAST <= weight <= _MOST):
            raise KfacpackError(f"{each.name}: its weight is {weight}, expected a positive number")
    return [float(weight) for weight in given]


T = TypeVar("T")
_ALLOW = "To add up each block over those that have it: --allow-partial (allow_partial=True)"


def check_compatible(inputs: Sequence[MergeInput], *, allow_partial: bool) -> None:
    """Refuse what does not belong together, naming both inputs and what differs."""
    check_addable(inputs)
    _check_blocks(inputs, allow_partial)


def check_addable(inputs: Sequence[MergeInput]) -> None:
    """Refuse quadratic forms that have no common meaning, whatever blocks they are in."""
    first, *others = inputs
    for other in others:
        _check_function(first, other)
        theirs, ours = other.curvature.about.scaling, first.curvature.about.scaling
        if theirs != ours:
            raise _incompatible(first, other, f"are scaled differently: {ours.sharing!r} and {theirs.sharing!r}")
    _check_base(inputs)
    _check_parents(inputs)


def in_order(lists: Iterable[Sequence[T]]) -> list[T]:
    """Everything that is in any of the lists, once, each after what stands before it in its own list."""
    found: list[T] = []
    for each in lists:
        if list(each) == found:
            continue
        place = 0
        for item in each:
            if item not in found:
                found.insert(place, item)
            place = found.index(item) + 1
    return found


def _incompatible(one: MergeInput, other: MergeInput, how: str, remedy: str = "") -> KfacpackError:
    return KfacpackError(f"{one.name} and {other.name} {how}" + (f". {remedy}" if remedy else ""))


def _check_function(one: MergeInput, other: MergeInput) -> None:
    if difference := function_difference(one.curvature.about.function, other.curvature.about.function):
        raise _incompatible(one, other, f"are of different f: {difference}")


def _check_base(inputs: Sequence[MergeInput]) -> None:
    seen: dict[str, tuple[MergeInput, Parameter]] = {}
    for each in inputs:
        parameters = each.curvature.about.base.parameters
        if seen and not any(parameter.name in seen for parameter in parameters):
            how = "cover no parameter in common, so that nothing shows that they are of the same base model"
            raise _incompatible(inputs[0], each, how)
        for parameter in parameters:
            other, known = seen.setdefault(parameter.name, (each, parameter))
            if known != parameter:
                models = " and ".join(i.curvature.about.base.name for i in (other, each))
                how = f"are of different base models ({models}): the parameter {parameter.name!r} is not the same"
                raise _incompatible(other, each, how)


def _check_parents(inputs: Sequence[MergeInput]) -> None:
    seen: dict[str, MergeInput] = {}
    for each in inputs:
        for parent in each.parents:
            if parent.sha256 in seen:
                called = f"the bundle {parent.sha256[:12]}…" + (f" of {parent.task}" if parent.task else "")
                other, task = seen[parent.sha256], parent.task or "TASK"
                merged = other.curvature.about.merge or each.curvature.about.merge
                remedy = f"To subtract it: --without {task} (without={task!r})" if merged else "Give it once"
                raise _incompatible(other, each, f"both contain {called}, which would count twice", remedy)
            seen[parent.sha256] = each


def check_tasks(inputs: Sequence[MergeInput]) -> None:
    """The same task in two inputs is its curvature twice: compressed, say, or from other examples. So are a part of it
    (NAME@k/n) and the whole."""
    seen: dict[str, MergeInput] = {}
    for each in inputs:
        for task in {parent.task: None for parent in each.parents if parent.task}:
            if task in seen:
                remedy = "Give one of them; parts of one task from different examples are joined by the rule 'shards'"
                raise _incompatible(seen[task], each, f"are both of the task {task!r}, which would count twice", remedy)
            others = (name for name, owner in seen.items() if owner is not each and share_classes(name, task))
            if other := next(others, None):
                how = f"are of {other!r} and {task!r}, whose common classes would count twice"
                raise _incompatible(seen[other], each, how, "Give one of them, or parts without a class in common")
            seen[task] = each


def _check_blocks(inputs: Sequence[MergeInput], allow_partial: bool) -> None:
    owner: dict[str, MergeInput] = {}
    partition: dict[str, tuple[MergeInput, set[str]]] = {}
    for each in inputs:
        for parameter, names in _partition(each).items():
            other, known = partition.setdefault(parameter, (each, names))
            if known != names:
                raise _incompatible(other, each, f"divide the parameter {parameter!r} into different blocks")
        for name, block in each.blocks.items():
            other = owner.setdefault(name, each)
            known_block = other.blocks[name]
            if known_block.join != block.join:
                raise _incompatible(other, each, f"join other parameters in the block {name!r}")
            if len(known_block.structure.sides) != len(block.structure.sides):
                how = f"hold the block {name!r} differently, one as Kronecker factors and one as a whole matrix"
                raise _incompatible(other, each, how)
    for each in inputs:
        missing = [name for name in owner if name not in each.blocks]
        if missing and not allow_partial:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            has = owner[missing[0]]
            raise KfacpackError(f"{each.name} has no block {missing[0]!r}{more}, which {has.name} has. {_ALLOW}")


def _partition(each: MergeInput) -> dict[str, set[str]]:
    """Which blocks cover a parameter."""
    found: dict[str, set[str]] = defaultdict(set)
    for block in each.curvature.blocks:
        for parameter in block.parameters:
            found[parameter].add(block.name)
    return found
