"""Identifies and compares the tasks, base models and functions that manifests record.

`NAME@k/n` names the k-th part of a task whose classes are divided into n parts. A base model is identified by the bytes
of the parameters that a bundle covers.
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
    """Returns the name of a task without the class split: `cars` for both `cars@1/4` and `cars`."""
    task, _, split = name.rpartition("@")
    return task if task and CLASS_SPLIT.fullmatch(split) else name


def share_classes(one: str, other: str) -> bool:
    """Returns whether two tasks have classes in common, for example cars and cars@1/4, or cars@1/2 and cars@1/4.

    A name does not state how many classes the task has. Therefore only the fractions are compared: two splits of a task
    are assumed to share classes if their fractions overlap, as those of cars@1/2 and cars@1/4 do.

    Args:
        one: Name of a task.
        other: Name of another task.
    """
    if base_task_name(one) != base_task_name(other):
        return False
    (start, stop), (other_start, other_stop) = _class_range(one), _class_range(other)
    return start < other_stop and other_start < stop


def _class_range(name: str) -> tuple[Fraction, Fraction]:
    """Returns the classes of a task as a range of fractions: 1/4 to 1/2 for `cars@2/4`, and 0 to 1 for `cars`."""
    if base_task_name(name) == name:
        return Fraction(0), Fraction(1)
    k, n = map(int, name.rpartition("@")[2].split("/"))
    return Fraction(k - 1, n), Fraction(k, n)


WeightReader = Callable[[str], tuple[str, tuple[int, ...], memoryview] | None]
"""A function that takes the name of a parameter and returns its safetensors dtype, shape and bytes.

The function returns None if there is no parameter with this name.
"""


def weights_of_file(path: str | os.PathLike[str]) -> WeightReader:
    """Opens a safetensors file to read parameters from it.

    Args:
        path: A path or an `hf://` reference.

    Returns:
        A function that takes the name of a parameter and returns its safetensors dtype, shape and bytes, or None if the
        file does not contain the parameter. The bytes are mapped into memory.

    Raises:
        BundleError: If the file is not a valid safetensors file.
    """
    container = Container(path)
    tensors = container.tensors

    def read(name: str) -> tuple[str, tuple[int, ...], memoryview] | None:
        spec = tensors.get(name)
        return None if spec is None else (spec.dtype, spec.shape, container.bytes_of(name))

    return read


def describe(name: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> Parameter:
    """Creates the manifest entry of a parameter.

    Args:
        name: Name in the state dict.
        dtype: Name of the dtype in safetensors.
        shape: Shape of the parameter.
        data: Bytes of the parameter in row-major, little-endian order.
    """
    return Parameter(name=name, dtype=dtype, shape=shape, sha256=sha256(data).hexdigest())


def difference(expected: Parameter, weights: WeightReader) -> str | None:
    """Compares a model's parameter with a manifest entry.

    Args:
        expected: The manifest entry.
        weights: Function that takes the name of a parameter and returns its safetensors dtype, shape and bytes.

    Returns:
        A description of the first difference, or None if dtype, shape and bytes are equal.
    """
    parameter = weights(expected.name)
    if parameter is None:
        return "is missing from the model's weights"
    dtype, shape, data = parameter
    if dtype != expected.dtype:
        return f"has dtype {dtype}, expected {expected.dtype}"
    if shape != expected.shape:
        return f"has shape {list(shape)}, expected {list(expected.shape)}"
    if (digest := sha256(data).hexdigest()) != expected.sha256:
        return f"has sha256 {digest}, expected {expected.sha256}"
    return None


def function_difference(first: Function, second: Function) -> str | None:
    """Compares the model outputs f to which two curvatures or task vectors refer.

    Args:
        first: Manifest entry of the first function f.
        second: Manifest entry of the second function f.

    Returns:
        A description of both functions if they differ, otherwise None. A `detail` that only one of them has is ignored.
    """
    same_detail = first.detail is None or second.detail is None or first.detail == second.detail
    if first.model_copy(update={"detail": None}) == second.model_copy(update={"detail": None}) and same_detail:
        return None
    return f"{_describe_function(first)}; {_describe_function(second)}"


def _describe_function(function: Function) -> str:
    normalized = "normalised " if function.normalized else ""
    detail = f" ({function.detail})" if function.detail else ""
    return f"{normalized}{function.output} of width {function.width}{detail}"
