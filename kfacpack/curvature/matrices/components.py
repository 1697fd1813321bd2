"""Symmetric matrices as their lower triangles, row by row: m[0,0], m[1,0], m[1,1], m[2,0], …

Shapes: a full matrix is (..., n, n), its triangle (..., n(n+1)/2); leading dimensions are carried along.

The tensors a matrix is held in: in memory, in a bundle, or made when the file is written.

A matrix asks its components for `specs` (name -> dtype and shape, free of charge) and for a tensor by name (which may
read or compute). So a curvature in memory and one on disk are the same object to everybody else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kfacpack.errors import CorruptTensor, MatrixError
from kfacpack.format.container import ITEM_BYTES, Spec
from kfacpack.format.schema import triangle_length

if TYPE_CHECKING:
    from kfacpack.format.reader import Bundle


_TILE = 512


def pack(full: Tensor) -> Tensor:
    """(..., n, n) -> (..., n(n+1)/2). What stands above the diagonal is not looked at."""
    if full.device.type != "cpu":
        return pack(full.cpu()).to(full.device)
    side = full.shape[-1]
    packed = full.new_empty((*full.shape[:-2], triangle_length(side)))
    _copy_rows(_for_copying(full), _for_copying(packed), range(side))
    return packed


def pack_rows(part: Tensor, row: int, left: int, packed: Tensor) -> None:
    """Put a part of a full matrix, from its row `row` and column `left` on, to its place in the triangle."""
    source, target = _for_copying(part), _for_copying(packed)
    width = part.shape[1]
    for values in source:
        start, count = triangle_length(row) + left, min(width, row + 1 - left)
        target[start : start + count] = values[:count]
        row += 1


def pack_in_parts(full: Tensor, limit: int) -> Iterator[Tensor]:
    """The numbers of `pack(full)`, some rows at a time: at most `limit` numbers, or one row."""
    full = full.cpu()
    side, start = full.shape[-1], 0
    source = _for_copying(full)
    while start < side:
        stop = start + 1
        while stop < side and triangle_length(stop + 1) - triangle_length(start) <= limit:
            stop += 1
        part = full.new_empty(triangle_length(stop) - triangle_length(start))
        _copy_rows(source, _for_copying(part), range(start, stop))
        yield part
        start = stop


def _copy_rows(source: Any, target: Any, rows: range) -> None:
    end = 0
    for row in rows:
        start, end = end, end + row + 1
        target[..., start:end] = source[..., row, : row + 1]


def unpack(packed: Tensor, side: int, scale: Tensor | None = None) -> Tensor:
    """(..., n(n+1)/2) -> (..., n, n), symmetric; with `scale`, (..., n), row i of the triangle times scale[i]."""
    if packed.device.type != "cpu" or not _has_memory(packed):
        if scale is not None:
            packed = packed * scale[..., row_indices(side).to(scale.device)]
        # One gather; n small copies would be n kernels.
        i, j = torch.meshgrid(*(torch.arange(side, device=packed.device),) * 2, indexing="ij")
        high, low = torch.maximum(i, j), torch.minimum(i, j)
        return packed[..., high * (high + 1) // 2 + low]
    full = packed.new_empty((*packed.shape[:-1], side, side), dtype=packed.dtype if scale is None else scale.dtype)
    source, target = _for_copying(packed), _for_copying(full)
    factors = None if scale is None else _for_copying(scale)
    for row in range(side):
        values, place = source[..., triangle_length(row) : triangle_length(row + 1)], target[..., row, : row + 1]
        if factors is None:
            place[...] = values
        else:
            np.multiply(values, factors[..., row, None], out=place)
    for rows in _tiles(side):
        for columns in _tiles(rows.start):
            full[..., columns, rows] = full[..., rows, columns].mT
        corner = full[..., rows, rows]
        corner.copy_(corner.tril() + corner.tril(-1).mT)
    return full


def _has_memory(tensor: Tensor) -> bool:
    """Whether numpy may look at a tensor's memory; inside torch.func's transforms it may not."""
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True


def _for_copying(tensor: Tensor) -> Any:
    """A numpy view: copying a row costs a quarter of what torch takes. It has no bfloat16; its bits travel as int16."""
    return tensor.detach().view(torch.int16 if tensor.dtype is torch.bfloat16 else tensor.dtype).numpy()


def row_indices(side: int) -> Tensor:
    """For every number of a triangle, the row it stands in: 0, 1, 1, 2, 2, 2, …"""
    rows = torch.arange(side)
    return rows.repeat_interleave(rows + 1)


def asymmetry(full: Tensor) -> float:
    """Largest |m - mᵀ| of (n, n); NaN where there is one."""
    gaps = [
        (full[rows, columns] - full[columns, rows].mT).abs().amax()
        for rows in _tiles(full.shape[-1])
        for columns in _tiles(rows.stop)
    ]
    return float(torch.stack(gaps).amax())


def _tiles(side: int) -> list[slice]:
    """Square tiles that stay in a core's cache while they are read along rows and columns."""
    return [slice(start, min(start + _TILE, side)) for start in range(0, side, _TILE)]


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


CHUNK_NUMBERS = 2**21
"""How many numbers of a tensor are written at a time: they are still in the cache when they are hashed."""


class MatrixTensors(ABC):
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
        yield from self[name].reshape(-1).split(CHUNK_NUMBERS)


class InMemoryTensors(MatrixTensors):
    def __init__(self, **tensors: Tensor):
        self._tensors = tensors
        self.specs = {name: spec_of(tensor) for name, tensor in tensors.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]


class LazyTensors(MatrixTensors):
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


class BundleTensors(MatrixTensors):
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


class LazyPackedTensors(MatrixTensors):
    """The triangle of a full matrix, packed each time it is read, and not kept."""

    def __init__(self, full: MatrixTensors):
        dtype, (side, _) = full.specs["data"]
        self.specs = {"data": (dtype, (triangle_length(side),))}
        self._full = full

    def __getitem__(self, name: str) -> Tensor:
        return torch.cat(list(self.parts(name)))

    def parts(self, name: str) -> Iterator[Tensor]:
        return pack_in_parts(self._full[name], CHUNK_NUMBERS)


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
