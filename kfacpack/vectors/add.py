"""A vector that a method makes of others, a parameter at a time, when it is read.

`kp.add`: task vectors of many tasks into one, by a method.
"""

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
    from kfacpack.vectors.methods.method import MergedParameter, MergeMethod, MethodInput


class MergedVector(VectorStorage):
    def __init__(
        self, method: MergeMethod, inputs: Sequence[MethodInput], about: AboutVector, heads: Mapping[str, Head]
    ):
        self.about = about
        self._method, self._inputs, self._heads = method, inputs, heads

    @cached_property
    def _parameter(self) -> MergedParameter:
        return self._method.begin(self._inputs)

    def read(self, name: str) -> Tensor:
        with torch.no_grad():
            return self._parameter(name).float()

    @property
    def heads(self) -> Mapping[str, Head]:
        return self._heads


Addable = TaskVector | str | os.PathLike[str]
"""A vector, or the path of its file."""


def add(
    vectors: Iterable[Addable], method: str = "sum", alpha: float | Sequence[float] = 1.0, **settings: Any
) -> TaskVector:
    """One vector of many, on the scale of their sum, computed a parameter at a time when it is read or saved.

    `alpha`: what the result is multiplied by, or one number for each vector, by which it is multiplied beforehand; one
    for all is the same either way, for every method.

    - sum: Σ α τ, which `+` and `*` give, too
    - ties: of each vector the share `keep` (0.2), largest in magnitude; signs elected, what agrees added up
    - dare: each number dropped with probability `drop` (0.9), the others made larger; random from `seed` (0)
    - tsv: the largest singular vectors of each task's matrices, made orthogonal to each other
    - iso: the sum, its singular values replaced by their mean
    - iso-cts: the same with directions of single tasks beside the share `common` (0.8) that are the sum's

    `mean=True`: averages where the publication has them: in ties, of what agrees; in the others, of parameters that are
    no matrices. Settings that a method does not have are refused, and so is a vector that is given twice.
    """
    if method not in METHODS:
        raise KfacpackError(f"there is no method {printable(str(method))!r}; there are {', '.join(METHODS)}")
    by = METHODS[method].of(settings)
    if isinstance(vectors, TaskVector | str | os.PathLike):
        raise KfacpackError("add takes a list of task vectors or of paths, found a single one")
    given = list(vectors)
    loaded = [each if isinstance(each, TaskVector) else TaskVector.load(each) for each in given]
    if not loaded:
        raise KfacpackError("there is nothing to add up")
    alphas = _alphas(alpha, len(loaded))
    _require_different(loaded, given)
    first, *others = (each * number for each, number in zip(loaded, alphas, strict=True))
    total = sum(others, first)
    if by.is_sum:
        return total
    inputs = [MethodInput(number, each, each.digest) for each, number in zip(loaded, alphas, strict=True)]
    addends = tuple(
        Addend(sha256=each.digest, coefficient=number, tasks=each.tasks)
        for each, number in zip(loaded, alphas, strict=True)
    )
    entry = MethodEntry(name=by.name, settings=by.settings)
    about = total.about.model_copy(update={"addends": addends, "method": entry})
    return TaskVector.of_leaf(MergedVector(by, inputs, about, total.heads))


def _alphas(alpha: float | Sequence[float], count: int) -> list[float]:
    found = [alpha] * count if isinstance(alpha, int | float) else list(alpha)
    for each in found:
        if isinstance(each, bool) or not isinstance(each, int | float) or not isfinite(each):
            raise KfacpackError(f"α is {each!r}, expected a finite number")
    if len(found) != count:
        raise KfacpackError(f"found {len(found)} α for {count} vectors: expected one for all, or one for each")
    return [float(each) for each in found]


def _require_different(loaded: Sequence[TaskVector], given: Sequence[Addable]) -> None:
    """What is there twice with the same sign would count twice; a sum from which one of its own is taken is none."""
    seen: dict[tuple[str, bool], str] = {}
    wholes: dict[str, str] = {}
    for number, (vector, source) in enumerate(zip(loaded, given, strict=True), start=1):
        name = f"vector {number}" if isinstance(source, TaskVector) else os.fspath(source)
        addends = [(each.sha256, each.coefficient > 0) for each in vector.about.addends]
        for piece in {(vector.digest, True), *addends}:
            if piece in seen:
                both = f"{printable(seen[piece])} and {printable(name)}"
                remedy = f"Give it once, or once with α = 2 ({', '.join(map(printable, vector.tasks))})"
                what = "are the same vector" if vector.digest == wholes[seen[piece]] else "have a vector in common"
                raise TaskVectorError(f"{both} {what}, which would count twice. {remedy}")
            seen[piece] = name
        wholes[name] = vector.digest
