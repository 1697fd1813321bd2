"""`kp.add` merges task vectors into one; `kp.refine` reduces the effect of a vector on other tasks.

Most methods compute their result lazily, one parameter at a time. Methods that solve a least-squares problem, and
`refine`, compute the result immediately, because the resulting vector records how the iterations converged.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch

from kfacpack.curvature.curvature import Curvature
from kfacpack.errors import KfacpackError, TaskVectorError, abbreviate, printable
from kfacpack.format.identity import share_classes
from kfacpack.format.vector_manifest import Addend, MethodEntry
from kfacpack.vectors.bundle_matching import (
    MatchedBundle,
    check_same_model,
    load_bundles,
    match_bundles,
    require_tasks,
    task_weights,
)
from kfacpack.vectors.methods import METHODS, with_method_list
from kfacpack.vectors.methods.curvature import DAMPING, ITERATIONS, TOLERANCE, RefineMethod
from kfacpack.vectors.methods.method import MethodInput
from kfacpack.vectors.storage import VectorStorage
from kfacpack.vectors.task_vector import TaskVector

if TYPE_CHECKING:
    from torch import Tensor

    from kfacpack.format.units import OnProgress
    from kfacpack.format.vector_manifest import AboutVector
    from kfacpack.merging.inputs import Mergeable, MergeInput
    from kfacpack.models.heads import Head
    from kfacpack.vectors.bundle_matching import MatchedBundle
    from kfacpack.vectors.methods.method import MergedParameter, MergeMethod, SolvedParameters


Addable = TaskVector | str | os.PathLike[str]
"""A task vector, or the path of its file."""


class MergedVector(VectorStorage):
    """The result of a merge method, computed lazily, one parameter at a time."""

    def __init__(
        self, method: MergeMethod, inputs: Sequence[MethodInput], about: AboutVector, heads: Mapping[str, Head]
    ):
        self.about = about
        self._method, self._inputs, self._heads = method, inputs, heads

    @cached_property
    def _parameter(self) -> MergedParameter:
        return self._method.begin(self._inputs)

    def read(self, name: str) -> Tensor:
        """Merges the changes to one parameter and returns the result in float32."""
        with torch.no_grad():
            return self._parameter(name).float()

    @property
    def heads(self) -> Mapping[str, Head]:
        """Classification heads by task name."""
        return self._heads


class SolvedVector(VectorStorage):
    """The in-memory result of a method that merges all parameters at once. Low-rank changes are kept as factors."""

    def __init__(self, parameters: SolvedParameters, about: AboutVector, heads: Mapping[str, Head]):
        self.about = about
        self._parameters, self._heads = parameters, heads
        self._shapes = {parameter.name: parameter.shape for parameter in about.base.parameters}

    def read(self, name: str) -> Tensor:
        """Returns a parameter's change in float32."""
        if name in self._parameters.factors:
            U, V = self._parameters.factors[name]
            return (U @ V).reshape(self._shapes[name])
        return self._parameters.tensors[name]

    def factors(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Returns the factors U and V of a parameter's change, or None if the change is not stored as factors."""
        return self._parameters.factors.get(name)

    @property
    def heads(self) -> Mapping[str, Head]:
        """Classification heads by task name."""
        return self._heads


def add(
    vectors: Iterable[Addable],
    method: str = "sum",
    *,
    alpha: float | Sequence[float] = 1.0,
    bundles: Iterable[Mergeable] | None = None,
    on_progress: OnProgress = lambda done, total: None,
    **settings: Any,
) -> TaskVector:
    """Merges task vectors into one vector, which has the scale of their sum rather than of their mean.

    Most methods compute the result one parameter at a time, when the parameter is read or the vector is saved.
    "curvature", "regmean", "fisher" and "actmat" compute the whole result immediately. For these methods,
    `about.method` of the result contains the number of iterations, the residual and the objective of each block.

    Args:
        vectors: Task vectors, or paths of their files. A vector must not be passed more than once.
        method: One of

            {methods}
        alpha: A factor for the result, or one factor for each vector. For every method, multiplying all vectors by
            a factor multiplies the result by the same factor.
        bundles: Curvatures or paths of bundles for the vectors' tasks, in any order. They must be passed if and only if
            the method needs them. A vector with several tasks needs a merged bundle of these tasks or several bundles.
        on_progress: Called with the number of blocks done and the total number, but only by methods that compute the
            result immediately.
        **settings: Settings of the method, as listed above.

    Returns:
        The merged vector, with the heads of all tasks.

    Raises:
        KfacpackError: If the method, a setting or `alpha` is invalid, if bundles are missing or superfluous, or if the
            curvature of a block is not positive definite and cannot be repaired.
        TaskVectorError: If the vectors are incompatible, if a vector would be counted twice, or if a bundle was
            estimated for another base model or f.

    Example:
        >>> merged = kp.add(["cars.safetensors", "dtd.safetensors"], method="ties", keep=0.3)
        >>> edited = merged.apply(model)
        >>> paths = ["cars.safetensors", "dtd.safetensors"]
        >>> merged = kp.add(paths, "curvature", bundles=["cars.kfac", "dtd.kfac"])
        >>> merged.about.method.worst_residual
    """
    if not isinstance(method, str) or method not in METHODS:
        raise KfacpackError(f"unknown method {printable(str(method))!r}, expected one of {', '.join(METHODS)}")
    merge_method = METHODS[method].of(settings)
    if isinstance(vectors, TaskVector | str | os.PathLike):
        raise KfacpackError("add expects a list of task vectors or paths, got a single vector or path")
    if not isinstance(vectors, Iterable):
        raise KfacpackError(f"add expects a list of task vectors or paths, got {type(vectors).__name__}")
    sources = list(vectors)
    for number, source in enumerate(sources, start=1):
        if not isinstance(source, TaskVector | str | os.PathLike):
            raise KfacpackError(f"vector {number}: expected a task vector or a path, got {type(source).__name__}")
    loaded = [source if isinstance(source, TaskVector) else TaskVector.load(source) for source in sources]
    if not loaded:
        raise KfacpackError("nothing to add: expected at least one task vector, got 0")
    alphas = _alphas(alpha, len(loaded))
    _require_different(loaded, sources)
    first, *others = (vector * number for vector, number in zip(loaded, alphas, strict=True))
    total = sum(others, first)
    matched = _matched_bundles(merge_method, loaded, bundles)
    if merge_method.is_sum:
        return total
    base = total.about.base
    inputs = [
        MethodInput(number, vector if vector.about.base == base else vector.covering(base), vector.digest)
        for vector, number in zip(loaded, alphas, strict=True)
    ]
    addends = tuple(
        Addend(sha256=vector.digest, coefficient=number, tasks=vector.tasks)
        for vector, number in zip(loaded, alphas, strict=True)
    )
    entry = MethodEntry(name=merge_method.name, settings=merge_method.settings)
    about = total.about.model_copy(update={"addends": addends, "method": entry})
    solved = merge_method.solve(inputs, matched, on_progress)
    if solved is None:
        return TaskVector.from_storage(MergedVector(merge_method, inputs, about, total.heads))
    digests = tuple(bundle.input.curvature.digest for bundle in matched)
    entry = entry.model_copy(update={"bundles": digests, "blocks": solved.blocks})
    return TaskVector.from_storage(SolvedVector(solved, about.model_copy(update={"method": entry}), total.heads))


# The list is generated from the declarations of the methods; the documentation site does the same.
add.__doc__ = with_method_list(add.__doc__ or "")


def _matched_bundles(
    method: MergeMethod, vectors: Sequence[TaskVector], bundles: Iterable[Mergeable] | None
) -> list[MatchedBundle]:
    """Assigns the bundles to the vectors, and checks that bundles are passed if and only if the method uses them."""
    inputs = load_bundles(() if bundles is None else bundles)
    if not method.needs_bundles:
        if inputs:
            users = ", ".join(name for name, other in METHODS.items() if other.needs_bundles)
            raise KfacpackError(
                f"the method {method.name!r} does not use bundles: expected none, got {len(inputs)}. Omit the bundles, "
                f"or use one of the methods {users}"
            )
        return []
    for number, vector in enumerate(vectors, start=1):
        require_tasks(vector, f"vector {number}")
    if not inputs:
        tasks = list(dict.fromkeys(task for vector in vectors for task in vector.tasks))
        raise KfacpackError(
            f"the method {method.name!r} needs bundles for {abbreviate(map(repr, tasks))}, got none. Pass them: "
            f"--bundle {tasks[0]}.kfac (bundles=[…]), or first estimate them: kfacpack estimate --task {tasks[0]} -o "
            f"{tasks[0]}.kfac"
        )
    return match_bundles(vectors, inputs, equal_weights=method.settings.get("task_weights") == "equal")


def _alphas(alpha: float | Sequence[float], count: int) -> list[float]:
    if not isinstance(alpha, int | float | Sequence):
        raise KfacpackError(f"α: expected a number or a list with one number per vector, got {type(alpha).__name__}")
    numbers = [alpha] * count if isinstance(alpha, int | float) else list(alpha)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float) or not isfinite(number):
            raise KfacpackError(f"α is {number!r}, expected a finite number")
    if len(numbers) != count:
        expected = f"expected a single number or a list with one number per vector, of length {count}"
        raise KfacpackError(f"α is a list of length {len(numbers)}, {expected}")
    return [float(number) for number in numbers]


def _require_different(vectors: Sequence[TaskVector], sources: Sequence[Addable]) -> None:
    """Checks that no vector is counted twice with the same sign, by itself or as an addend of another vector.

    Opposite signs are allowed, so that an addend can be subtracted from a sum.
    """
    seen: dict[tuple[str, bool], str] = {}
    digests: dict[str, str] = {}
    for number, (vector, source) in enumerate(zip(vectors, sources, strict=True), start=1):
        name = f"vector {number}" if isinstance(source, TaskVector) else os.fspath(source)
        addends = {(addend.sha256, addend.coefficient > 0): addend.tasks for addend in vector.about.addends}
        for signed_digest, shared_tasks in {(vector.digest, True): vector.tasks, **addends}.items():
            if signed_digest in seen:
                pair = f"{printable(seen[signed_digest])} and {printable(name)}"
                tasks = f"tasks: {', '.join(map(printable, shared_tasks)) or 'unknown'}"
                problem = "have an addend in common"
                remedy = "Pass vectors without common addends"
                if vector.digest == digests[seen[signed_digest]]:
                    problem = "are the same vector"
                    remedy = "Pass this vector only once, with α = 2 if it should count twice"
                raise TaskVectorError(f"{pair} {problem}, which would be counted twice ({tasks}). {remedy}")
            seen[signed_digest] = name
        digests[name] = vector.digest


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
    """Reduces the effect of a task vector on other tasks, without training it again.

    The result τ' solves (G_own + λ Σ w_t G_t + ε) τ' = G_own τ + ε τ, where G_own is the curvature for the vector's own
    tasks, and w_t and G_t are the weight and the curvature for each other task t. τ' has little effect on the outputs
    for the other tasks, while its effect on the vector's own tasks stays close to that of τ.

    Args:
        vector: The task vector, or the path of its file.
        own: The bundle for the vector's task, or several bundles if the vector has several tasks.
        reg: One or several bundles for the other tasks. They may be merged bundles.
        strength: λ, the factor by which the curvature for the other tasks is multiplied.
        damping: ε, relative to the mean eigenvalue of G_own + λ Σ w_t G_t in each block of parameters.
        task_weights: "equal" gives every task a weight of one. "size" gives the tasks weights in proportion to the
            sizes of their datasets. The weights of the vector's own tasks and those of the other tasks are scaled
            separately, each to a mean of one.
        tolerance: Relative residual at which the iterative solver stops in each block.
        iterations: Maximum number of iterations per block.
        on_progress: Called with the number of blocks done and the total number.

    Returns:
        The refined vector. Its `about.method` contains the settings and a report on each block.

    Raises:
        KfacpackError: If a setting is invalid, if bundles are missing, superfluous or incompatible, or if the bundles
            for the other tasks contain a task of the vector.
        TaskVectorError: If the base model or f of a bundle differs from that of the vector.

    Example:
        >>> refined = kp.refine("cars.safetensors", "cars.kfac", ["dtd.kfac", "svhn.kfac"])
        >>> refined.save("cars-refined.safetensors")
    """
    method = RefineMethod(strength, damping, task_weights, tolerance, iterations)
    if not isinstance(vector, TaskVector | str | os.PathLike):
        raise KfacpackError(f"refine: expected a task vector or a path, got {type(vector).__name__}")
    tau = vector if isinstance(vector, TaskVector) else TaskVector.load(vector)
    bundles = _match_bundles(tau, _as_list(own), _as_list(reg), method)
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


def _match_bundles(
    tau: TaskVector, own: list[Mergeable], reg: list[Mergeable], method: RefineMethod
) -> list[MatchedBundle]:
    """Checks the bundles, and assigns them to the two inputs of the method.

    Bundles in `own` are assigned to index 0, the vector itself. Bundles in `reg` are assigned to index 1, the vector
    multiplied by zero, which is the target for the other tasks.
    """
    require_tasks(tau, "the vector")
    for name, bundles in (("own", own), ("reg", reg)):
        if not bundles:
            raise KfacpackError(f"refine: expected at least one bundle for {name} (--{name}), got none")
    # All bundles are opened together to check that they are compatible with each other.
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
    """Checks that a bundle for the other tasks does not contain a task of the vector."""
    for parent in item.parents:
        for task in tau.tasks:
            if parent.task is not None and share_classes(parent.task, task):
                raise KfacpackError(
                    f"{item.name}: this bundle for reg (--reg) contains the task {parent.task!r}, but the effect of "
                    f"the vector on its own task {task!r} must not be reduced. Pass bundles for other tasks only; to "
                    f"remove the task from a merged bundle, use kfacpack merge --without {parent.task}"
                )
