"""The tensors a matrix is held in: in memory, in a bundle, or made when the file is written.

A matrix asks its components for `specs` (name -> dtype and shape, free of charge) and for a tensor by name (which may
read or compute). So a curvature in memory and one on disk are the same object to everybody else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfacpack.bundle.container import ITEM_BYTES, Spec
from kfacpack.bundle.layout import triangle
from kfacpack.curvature.matrices.triangle import pack_in_parts
from kfacpack.errors import CorruptTensor, MatrixError

if TYPE_CHECKING:
    from kfacpack.bundle.reader import Bundle

TORCH_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
FILE_TYPES = {dtype: name for name, dtype in TORCH_TYPES.items()}


PART = 2**21
"""How many numbers of a tensor are written at a time: they are still in the cache when they are hashed."""


class Components(ABC):
    specs: Mapping[str, Spec]

    @abstractmethod
    def __getitem__(self, name: str) -> Tensor: ...

    def refuse(self, name: str, problem: str) -> None:
        """Say that a tensor is not what it should be, in words that lead to it."""
        raise MatrixError(f"{name!r} {problem}")

    def span(self, name: str, start: int, stop: int) -> Tensor:
        """Some of the tensor's numbers, in row-major order."""
        return self[name].reshape(-1)[start:stop]

    def parts(self, name: str) -> Iterator[Tensor]:
        """The tensor's numbers in row-major order, a part at a time."""
        yield from self[name].reshape(-1).split(PART)


class InMemory(Components):
    def __init__(self, **tensors: Tensor):
        self._tensors = tensors
        self.specs = {name: spec_of(tensor) for name, tensor in tensors.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]


class Deferred(Components):
    """The component `data`, made when it is first touched, and kept from then on."""

    def __init__(self, spec: Spec, make: Callable[[], Tensor]):
        self.specs = {"data": spec}
        self._make: Callable[[], Tensor] | None = make
        self._data: Tensor | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._data is None and self._make is not None:
            self._data, self._make = self._make(), None
        assert name == "data"
        assert self._data is not None
        return self._data


class InBundle(Components):
    """Tensors of an open bundle, mapped from its file. Every touch is a checked one (see `Bundle.bytes_of`)."""

    def __init__(self, bundle: Bundle, names: Mapping[str, str]):
        self._bundle = bundle
        self._names = names
        self.specs = {key: (bundle.tensors[name].dtype, bundle.tensors[name].shape) for key, name in names.items()}

    def __getitem__(self, name: str) -> Tensor:
        dtype, shape = self.specs[name]
        data = self._bundle.bytes_of(self._names[name])
        if not data:
            return torch.empty(shape, dtype=TORCH_TYPES[dtype])
        if self._bundle.tensors[self._names[name]].start % ITEM_BYTES[dtype]:
            data = memoryview(bytearray(data))  # other writers may lay tensors at odd places
        return torch.frombuffer(data, dtype=TORCH_TYPES[dtype]).view(shape)

    def span(self, name: str, start: int, stop: int) -> Tensor:
        dtype, _ = self.specs[name]
        if start == stop:
            return torch.empty(0, dtype=TORCH_TYPES[dtype])
        data = self._bundle.read(self._names[name], start * ITEM_BYTES[dtype], stop * ITEM_BYTES[dtype])
        return torch.frombuffer(data, dtype=TORCH_TYPES[dtype])

    def refuse(self, name: str, problem: str) -> None:
        raise CorruptTensor(self._bundle.path, problem, f"tensor {self._names[name]!r}")


class PackedOnDemand(Components):
    """The triangle of a full matrix, packed each time it is read, and not kept."""

    def __init__(self, full: Components):
        dtype, (side, _) = full.specs["data"]
        self.specs = {"data": (dtype, (triangle(side),))}
        self._full = full

    def __getitem__(self, name: str) -> Tensor:
        return torch.cat(list(self.parts(name)))

    def parts(self, name: str) -> Iterator[Tensor]:
        return pack_in_parts(self._full[name], PART)


def spec_of(tensor: Tensor) -> Spec:
    if tensor.dtype not in FILE_TYPES:
        known = ", ".join(map(str, FILE_TYPES))
        raise MatrixError(f"a tensor of {tensor.dtype} cannot be stored; expected one of {known}")
    return FILE_TYPES[tensor.dtype], tuple(tensor.shape)


def nbytes_of(spec: Spec) -> int:
    dtype, shape = spec
    return prod(shape) * ITEM_BYTES[dtype]


def raw_bytes(tensor: Tensor) -> memoryview:
    """A tensor's bytes in row-major order, without a copy where it already lies so on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
