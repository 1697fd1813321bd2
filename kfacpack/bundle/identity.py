"""Whose curvature is it? A base model is known by the bytes of the parameters that a bundle covers."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import Protocol

from kfacpack.bundle.container import Container
from kfacpack.bundle.manifest import Base, Parameter


class Weights(Protocol):
    """Somebody's parameters: for a name, its dtype in safetensors' words, its shape and its bytes, or None."""

    def __call__(self, name: str) -> tuple[str, tuple[int, ...], memoryview] | None: ...


def weights_of_file(path: str) -> Weights:
    """The parameters in a safetensors file, mapped, not loaded."""
    container = Container(path)

    def read(name: str) -> tuple[str, tuple[int, ...], memoryview] | None:
        spec = container.tensors.get(name)
        return None if spec is None else (spec.dtype, spec.shape, container.bytes_of(name))

    return read


def describe(name: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> Parameter:
    return Parameter(name=name, dtype=dtype, shape=shape, sha256=sha256(data).hexdigest())


def differences(base: Base, weights: Weights) -> Iterator[tuple[str, str]]:
    """Each covered parameter that is missing from `weights` or not the same there, and how it differs."""
    for expected in base.parameters:
        found = weights(expected.name)
        if found is None:
            yield expected.name, "is not among these weights"
            continue
        actual = describe(expected.name, *found)
        for key in ("dtype", "shape", "sha256"):
            if getattr(actual, key) != getattr(expected, key):
                yield (
                    expected.name,
                    f"has {key} {getattr(actual, key)}, the bundle says {getattr(expected, key)}",
                )
                break
