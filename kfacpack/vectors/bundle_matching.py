"""Assigns bundles to task vectors by task, for merge methods that use curvature.

The base model and f of each bundle must be those of the vectors. A bundle is assigned to a vector if all of the
bundle's tasks are tasks of the vector. A vector with several tasks needs bundles that together cover all of these
tasks: a merged bundle, or several bundles.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfacpack.curvature.curvature import Curvature
from kfacpack.errors import KfacpackError, TaskVectorError, abbreviate
from kfacpack.format.identity import function_difference
from kfacpack.merging.inputs import MergeInput, check_compatible, relative_weights

if TYPE_CHECKING:
    from kfacpack.merging.inputs import Mergeable
    from kfacpack.vectors.task_vector import TaskVector


@dataclass(frozen=True)
class MatchedBundle:
    """A bundle and the vectors to which it is assigned."""

    input: MergeInput
    """The bundle."""
    vectors: tuple[int, ...]
    """Indices of the vectors. A bundle has several indices only if several vectors contain all of its tasks."""
    weight: float
    """Weight of the bundle's curvature G in the objective of the merge method."""


def load_bundles(bundles: Iterable[Mergeable] | Mergeable) -> list[MergeInput]:
    """Opens bundles and checks that they can be used together.

    Args:
        bundles: Curvatures, or paths of bundles.

    Returns:
        The opened bundles, in the same order.

    Raises:
        KfacpackError: If `bundles` is not a list of curvatures or paths, or if the bundles are incompatible.
    """
    if isinstance(bundles, str | os.PathLike | Curvature):
        raise KfacpackError("expected a list of bundles, got a single bundle")
    if not isinstance(bundles, Iterable):
        raise KfacpackError(f"expected a list of bundles, got {type(bundles).__name__}")
    inputs = [MergeInput.of(source, position) for position, source in enumerate(bundles, start=1)]
    if inputs:
        check_compatible(inputs, allow_partial=True)
    return inputs


def require_tasks(vector: TaskVector, name: str) -> None:
    """Checks that a vector records its task, which is needed to assign bundles to the vector.

    Args:
        vector: The vector.
        name: Name by which error messages refer to the vector.

    Raises:
        TaskVectorError: If the vector does not record its task.
    """
    if not vector.tasks:
        remedy = "Extract it again with the name of its task: kfacpack extract --task TASK (task=…)"
        raise TaskVectorError(f"{name}: does not record its task, so no bundle can be assigned to it. {remedy}")


def match_bundles(
    vectors: Sequence[TaskVector], inputs: Sequence[MergeInput], *, equal_weights: bool
) -> list[MatchedBundle]:
    """Assigns each bundle to the vectors that contain its tasks.

    Args:
        vectors: The vectors.
        inputs: The bundles.
        equal_weights: Whether every task has weight one. Otherwise, the weights are proportional to the sizes of the
            datasets and scaled to a mean of one.

    Returns:
        One entry per bundle, in the order of the bundles.

    Raises:
        KfacpackError: If a vector contains a task for which no bundle was passed, if no vector contains all tasks of a
            bundle, if a bundle does not record its task, or if the weights require the size of a dataset that a bundle
            does not record.
        TaskVectorError: If the base model or f of a bundle differs from that of the vectors.
    """
    for item in inputs:
        check_same_model(vectors[0], item)
    owners = [_owners(item, vectors) for item in inputs]
    for index, vector in enumerate(vectors):
        covered = {
            parent.task
            for item, indices in zip(inputs, owners, strict=True)
            if index in indices
            for parent in item.parents
        }
        if missing := [task for task in vector.tasks if task not in covered]:
            names = abbreviate(map(repr, missing))
            remedy = f"Pass their bundles; to estimate one: kfacpack estimate --task {missing[0]} -o {missing[0]}.kfac"
            raise KfacpackError(f"vector {index + 1} contains tasks for which no bundle was passed: {names}. {remedy}")
    weights = task_weights(inputs, equal_weights=equal_weights)
    return [MatchedBundle(item, indices, weight) for item, indices, weight in zip(inputs, owners, weights, strict=True)]


def task_weights(inputs: Sequence[MergeInput], *, equal_weights: bool) -> list[float]:
    """Returns the weight of each bundle's curvature G in the objective of a merge method.

    Args:
        inputs: The bundles.
        equal_weights: Whether every task has weight one. Otherwise, the weights are proportional to the sizes of the
            datasets and scaled to a mean of one.

    Raises:
        KfacpackError: If `equal_weights` is false and a bundle does not record the size of its dataset.
    """
    if equal_weights:
        return relative_weights(inputs, [item.tasks for item in inputs])
    for item in inputs:
        if len(inputs) > 1 and not item.dataset_size:
            raise KfacpackError(
                f"{item.name}: does not record the size of its dataset, which determines the weight of its task. To "
                "give all tasks the same weight, pass --task-weights equal (task_weights='equal')"
            )
    return relative_weights(inputs, None)


def check_same_model(vector: TaskVector, item: MergeInput) -> None:
    """Checks that a bundle was estimated for the base model and f of a vector.

    Raises:
        TaskVectorError: If the bundle was estimated for another base model or another f.
    """
    about, other = vector.about, item.curvature.about
    if difference := function_difference(other.function, about.function):
        raise TaskVectorError(f"{item.name}: the bundle and the vectors are for different functions f: {difference}")
    parameters = {parameter.name: parameter for parameter in other.base.parameters}
    common = [parameter for parameter in about.base.parameters if parameter.name in parameters]
    models = f"the bundle was estimated for {other.base.name}, and the vectors were trained from {about.base.name}"
    if not common:
        first = about.base.parameters[0].name
        raise TaskVectorError(f"{item.name}: covers none of the vectors' parameters, such as {first!r}; {models}")
    for parameter in common:
        if parameters[parameter.name] != parameter:
            problem = f"has a different base model than the vectors: the parameter {parameter.name!r} differs"
            remedy = "Estimate the bundle with the weights from which the vectors were trained"
            raise TaskVectorError(f"{item.name}: {problem} ({models}). {remedy}")


def _owners(item: MergeInput, vectors: Sequence[TaskVector]) -> tuple[int, ...]:
    """Returns the indices of the vectors that contain all tasks of a bundle."""
    tasks = [parent.task for parent in item.parents]
    if None in tasks:
        remedy = "Estimate it again with source=kp.Source(task=NAME)"
        raise KfacpackError(f"{item.name}: does not record its task, so it cannot be assigned to a vector. {remedy}")
    owners = tuple(index for index, vector in enumerate(vectors) if set(tasks) <= set(vector.tasks))
    if owners:
        return owners
    known = {task for vector in vectors for task in vector.tasks}
    names = abbreviate(repr(task) for task in tasks)
    if superfluous := [task for task in tasks if task not in known]:
        raise KfacpackError(
            f"{item.name}: no vector contains {superfluous[0]!r}, a task of this bundle; tasks of the vectors: "
            f"{abbreviate(sorted(known))}. Omit this bundle, or use it with a vector for {superfluous[0]!r}"
        )
    raise KfacpackError(
        f"{item.name}: contains {names}, which are tasks of different vectors. Pass a separate bundle for each vector"
    )
