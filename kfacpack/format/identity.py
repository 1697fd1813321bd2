"""What the names of tasks in manifests say: NAME@k/n is the k-th of n parts of a task, by its classes.

Whose curvature is it? A base model is known by the bytes of the parameters that a bundle covers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from hashlib import sha256
from typing import TYPE_CHECKING

from kfacpack.format.container import Container
from kfacpack.format.manifest import Function, Parameter

if TYPE_CHECKING:
    import os


CLASS_SPLIT = re.compile(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})")


def base_task_name(name: str) -> str:
    """What a part is of; of any other task, its own name."""
    whole, _, which = name.rpartition("@")
    return whole if whole and CLASS_SPLIT.fullmatch(which) else name


def share_classes(one: str, other: str) -> bool:
    """Whether two names are of one task and of classes that both have: cars and cars@1/4, cars@1/2 and cars@1/4.

    How many classes there are, a name does not say: parts whose stretches meet are taken to share some. Those whose
    stretches do not meet have none in common, however many there are.
    """
    if base_task_name(one) != base_task_name(other):
        return False
    (start, stop), (other_start, other_stop) = _class_range(one), _class_range(other)
    return start < other_stop and other_start < stop


def _class_range(name: str) -> tuple[Fraction, Fraction]:
    """Of all classes in their order, from which share to which."""
    if base_task_name(name) == name:
        return Fraction(0), Fraction(1)
    k, n = map(int, name.rpartition("@")[2].split("/"))
    return Fraction(k - 1, n), Fraction(k, n)


WeightReader = Callable[[str], tuple[str, tuple[int, ...], memoryview] | None]
"""Somebody's parameters: for a name, its dtype in safetensors' words, its shape and its bytes, or None."""


def weights_of_file(path: str | os.PathLike[str]) -> WeightReader:
    """The parameters in a safetensors file, mapped, not loaded."""
    container = Container(path)
    tensors = container.tensors

    def read(name: str) -> tuple[str, tuple[int, ...], memoryview] | None:
        spec = tensors.get(name)
        return None if spec is None else (spec.dtype, spec.shape, container.bytes_of(name))

    return read


def describe(name: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> Parameter:
    return Parameter(name=name, dtype=dtype, shape=shape, sha256=sha256(data).hexdigest())


def difference(expected: Parameter, weights: WeightReader) -> str | None:
    """How a covered parameter differs in `weights`, in words, or None if it is the same."""
    found = weights(expected.name)
    if found is None:
        return "is not among these weights"
    dtype, shape, data = found
    if dtype != expected.dtype:
        return f"has dtype {dtype}, expected {expected.dtype}"
    if shape != expected.shape:
        return f"has shape {list(shape)}, expected {list(expected.shape)}"
    if (digest := sha256(data).hexdigest()) != expected.sha256:
        return f"has sha256 {digest}, expected {expected.sha256}"
    return None


def function_difference(ours: Function, theirs: Function) -> str | None:
    """How two f differ, in words, or None. A detail that only one of them gives is no difference."""
    same_detail = ours.detail is None or theirs.detail is None or ours.detail == theirs.detail
    if ours.model_copy(update={"detail": None}) == theirs.model_copy(update={"detail": None}) and same_detail:
        return None
    return f"{_words(ours)}; {_words(theirs)}"


def _words(function: Function) -> str:
    normalized = "normalised " if function.normalized else ""
    detail = f" ({function.detail})" if function.detail else ""
    return f"{normalized}{function.output} of width {function.width}{detail}"
