"""`kp.refine`: takes the curvature of other tasks out of a finished task vector, so that it disturbs them less."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kfacpack.curvature.curvature import Curvature
from kfacpack.errors import KfacpackError
from kfacpack.format.identity import share_classes
from kfacpack.format.vector_manifest import Addend, MethodEntry
from kfacpack.vectors.add import SolvedVector
from kfacpack.vectors.bundle_matching import (
    MatchedBundle,
    check_same_model,
    load_bundles,
    match_bundles,
    require_tasks,
    task_weights,
)
from kfacpack.vectors.methods.curvature import DAMPING, ITERATIONS, TOLERANCE, RefineMethod
from kfacpack.vectors.methods.method import MethodInput
from kfacpack.vectors.task_vector import TaskVector

if TYPE_CHECKING:
    from kfacpack.format.units import OnProgress
    from kfacpack.merging.inputs import Mergeable, MergeInput
    from kfacpack.vectors.add import Addable


def refine(
    vector: Addable,
    own: Mergeable | Iterable[Mergeable],
    reg: Mergeable | Iterable[Mergeable],
    *,
    strength: float = 1.0,
    damping: float = DAMPING,
    task_weights: str = "equal",
    tolerance: float = TOLERANCE,
    iterations: int = ITERATIONS,
    on_progress: OnProgress = lambda done, total: None,
) -> TaskVector:
    """Changes a vector so that it adds better to vectors of other tasks, without training it again.

    The result τ' solves (G_own + λ Σ w_t G_t + ε) τ' = G_own τ + ε τ, where t runs over the other tasks: τ' has little
    effect on the outputs of the other tasks, and changes those of the own task as little as possible.

    Args:
        vector: The task vector, or the path of its file.
        own: The bundle of the vector's task, or several for a vector of several tasks.
        reg: One or several bundles of the other tasks; merged ones are allowed.
        strength: λ, the factor of the other tasks' curvature.
        damping: ε relative to the mean eigenvalue of the summed curvature of a block.
        task_weights: "equal" gives every other task the weight one; "size" weights them by the sizes of their datasets,
            with weights that average one.
        tolerance: Relative residual at which the iteration for a block stops.
        iterations: Maximum number of iterations per block.
        on_progress: Called with the number of blocks done and their total.

    Returns:
        The refined vector. Its `about.method` has the settings and the report of each block.

    Raises:
        KfacpackError: If a setting is invalid, if bundles are missing, superfluous or incompatible, or if the bundles
            of the other tasks contain a task of the vector.
        TaskVectorError: If a bundle has another base model or f than the vector.

    Example:
        >>> refined = kp.refine("cars.safetensors", "cars.kfac", ["dtd.kfac", "svhn.kfac"])
        >>> refined.save("cars-refined.safetensors")
    """
    method = RefineMethod(strength, damping, task_weights, tolerance, iterations)
    if not isinstance(vector, TaskVector | str | os.PathLike):
        raise KfacpackError(f"expected a task vector or a path, got {type(vector).__name__}")
    tau = vector if isinstance(vector, TaskVector) else TaskVector.load(vector)
    bundles = _matched(tau, _as_list(own), _as_list(reg), method)
    inputs = [MethodInput(alpha, tau, tau.digest) for alpha in (1.0, 0.0)]
    solved = method.solve(inputs, bundles, on_progress)
    digests = tuple(bundle.input.curvature.digest for bundle in bundles)
    entry = MethodEntry(name=method.name, settings=method.settings, bundles=digests, blocks=solved.blocks)
    addend = Addend(sha256=tau.digest, coefficient=1.0, tasks=tau.tasks)
    about = tau.about.model_copy(update={"addends": (addend,), "method": entry})
    return TaskVector.from_storage(SolvedVector(solved, about, tau.heads))


def _as_list(bundles: Mergeable | Iterable[Mergeable]) -> list[Mergeable]:
    if isinstance(bundles, str | os.PathLike | Curvature):
        return [bundles]
    if not isinstance(bundles, Iterable):
        raise KfacpackError(f"refine: expected a bundle or a list of bundles, got {type(bundles).__name__}")
    return list(bundles)


def _matched(tau: TaskVector, own: list[Mergeable], reg: list[Mergeable], method: RefineMethod) -> list[MatchedBundle]:
    """Checks the bundles and returns those of the vector for index 0, and those of the other tasks for index 1."""
    require_tasks(tau, "the vector")
    for name, bundles in (("own", own), ("reg", reg)):
        if not bundles:
            raise KfacpackError(f"refine: expected at least one bundle for {name} (--{name}), got none")
    # Opened together, so that all of them are checked against each other.
    inputs = load_bundles([*own, *reg])
    own_inputs, others = inputs[: len(own)], inputs[len(own) :]
    for item in others:
        check_same_model(tau, item)
        _check_other(tau, item)
    equal = method.task_weights == "equal"
    weights = task_weights(others, equal_weights=equal)
    return match_bundles([tau], own_inputs, equal_weights=equal) + [
        MatchedBundle(item, (1,), method.strength * weight) for item, weight in zip(others, weights, strict=True)
    ]


def _check_other(tau: TaskVector, item: MergeInput) -> None:
    """Checks that a bundle of the other tasks does not contain a task of the vector."""
    for parent in item.parents:
        for task in tau.tasks:
            if parent.task is not None and share_classes(parent.task, task):
                raise KfacpackError(
                    f"{item.name}: contains {parent.task!r}, but the vector is of {task!r}, which would be taken out "
                    f"of itself. Pass bundles of other tasks; to leave a task out of a merged bundle: kfacpack merge "
                    f"--without {parent.task}"
                )
