"""`kp.add`: merges task vectors into one, lazily, one parameter at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch

from kfacpack.errors import KfacpackError, TaskVectorError, printable
from kfacpack.format.vector_manifest import Addend, MethodEntry
from kfacpack.vectors.methods import METHODS
from kfacpack.vectors.methods.method import MethodInput
from kfacpack.vectors.storage import VectorStorage
from kfacpack.vectors.task_vector import TaskVector

if TYPE_CHECKING:
    from torch import Tensor

    from kfacpack.format.vector_manifest import AboutVector
    from kfacpack.models.heads import Head
    from kfacpack.vectors.methods.method import MergedParameter, MergeMethod


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
        """Merges one parameter and returns it in float32."""
        with torch.no_grad():
            return self._parameter(name).float()

    @property
    def heads(self) -> Mapping[str, Head]:
        """Heads by task name."""
        return self._heads


def add(
    vectors: Iterable[Addable], method: str = "sum", *, alpha: float | Sequence[float] = 1.0, **settings: Any
) -> TaskVector:
    """Merges task vectors into one on the scale of their sum.

    The result is computed one parameter at a time when it is read or saved.

    Args:
        vectors: Task vectors or paths of their files, each at most once.
        method: One of

            - "sum": Σ α τ, the same as `+` and `*`.
            - "ties": keeps the fraction `keep` (0.2) of each vector's entries that are largest in magnitude, elects
              signs and sums the entries that agree.
            - "dare": drops each entry with probability `drop` (0.9) and rescales the others; random from `seed` (0).
            - "tsv": keeps the largest singular vectors of each task's matrices and makes them orthogonal.
            - "iso": the sum with all singular values replaced by their mean.
            - "iso-cts": like "iso", with the fraction `common` (0.8) of the directions from the sum and the rest from
              single tasks.
        alpha: A factor for the result, or one factor for each vector. For every method, multiplying all vectors by
            the same factor multiplies the result.
        **settings: Settings of the method, as listed above. `mean=True` averages where the publication does: in
            "ties" the entries that agree, in "tsv", "iso" and "iso-cts" the parameters that are not matrices.

    Returns:
        The merged vector, with the heads of all tasks.

    Raises:
        KfacpackError: If the method, a setting or alpha is invalid.
        TaskVectorError: If the vectors are incompatible, or if one would be counted twice.

    Example:
        >>> merged = kp.add(["cars.safetensors", "dtd.safetensors"], method="ties", keep=0.3)
        >>> edited = merged.apply(model)
    """
    if method not in METHODS:
        raise KfacpackError(f"unknown method {printable(str(method))!r}, expected one of {', '.join(METHODS)}")
    merge_method = METHODS[method].of(settings)
    if isinstance(vectors, TaskVector | str | os.PathLike):
        raise KfacpackError("add expects a list of task vectors or paths, got a single one")
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
    return TaskVector.from_storage(MergedVector(merge_method, inputs, about, total.heads))


def _alphas(alpha: float | Sequence[float], count: int) -> list[float]:
    numbers = [alpha] * count if isinstance(alpha, int | float) else list(alpha)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float) or not isfinite(number):
            raise KfacpackError(f"α is {number!r}, expected a finite number")
    if len(numbers) != count:
        raise KfacpackError(f"got {len(numbers)} α for {count} vectors, expected one for all or one for each")
    return [float(number) for number in numbers]


def _require_different(vectors: Sequence[TaskVector], sources: Sequence[Addable]) -> None:
    """Checks that no vector occurs twice with the same sign; subtracting an addend from its sum is allowed."""
    seen: dict[tuple[str, bool], str] = {}
    digests: dict[str, str] = {}
    for number, (vector, source) in enumerate(zip(vectors, sources, strict=True), start=1):
        name = f"vector {number}" if isinstance(source, TaskVector) else os.fspath(source)
        addends = [(addend.sha256, addend.coefficient > 0) for addend in vector.about.addends]
        for signed_digest in {(vector.digest, True), *addends}:
            if signed_digest in seen:
                pair = f"{printable(seen[signed_digest])} and {printable(name)}"
                remedy = f"Pass it once, or once with α = 2 ({', '.join(map(printable, vector.tasks))})"
                problem = "are the same vector" if vector.digest == digests[seen[signed_digest]] else "share a vector"
                raise TaskVectorError(f"{pair} {problem}, which would be counted twice. {remedy}")
            seen[signed_digest] = name
        digests[name] = vector.digest
