"""The tensors of a matrix (its components), and the packing of symmetric matrices as lower triangles.

A triangle is stored row by row: m[0,0], m[1,0], m[1,1], m[2,0], … Shapes: a full matrix is (..., n, n) and its triangle
is (..., n(n+1)/2). Leading dimensions are batch dimensions.

Components are stored in memory or in a bundle, or computed on demand. `MatrixTensors.specs` contains the dtype and
shape of each component and is available without reading any values. Accessing a tensor by name may read or compute it.
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
    from kfacpack.format.container import Container
    from kfacpack.format.reader import Bundle, SealedFile


_TILE = 512
"""Side length of the square tiles in which large matrices are processed."""
_SMALL_SIDE = 64
"""Largest side length of a matrix that is unpacked with a single gather on a CPU. On a GPU, there is no such limit."""


def pack(full: Tensor) -> Tensor:
    """Packs the lower triangles of (..., n, n) matrices as (..., n(n+1)/2). Values above the diagonal are not read."""
    if full.device.type != "cpu":
        return pack(full.cpu()).to(full.device)
    side = full.shape[-1]
    packed = full.new_empty((*full.shape[:-2], triangle_length(side)))
    _copy_rows(_numpy_view(full), _numpy_view(packed), range(side))
    return packed


def pack_rows(part: Tensor, row: int, left: int, packed: Tensor) -> None:
    """Copies a part of a full matrix to its position in the packed triangle. Values above the diagonal are skipped.

    Args:
        part: Rows of the full matrix, (k, w).
        row: Index of the first row of `part`.
        left: Index of the first column of `part`.
        packed: The triangle to write to, (n(n+1)/2,).
    """
    source, target = _numpy_view(part), _numpy_view(packed)
    width = part.shape[1]
    for values in source:
        start, count = triangle_length(row) + left, min(width, row + 1 - left)
        target[start : start + count] = values[:count]
        row += 1


def pack_in_parts(full: Tensor, limit: int) -> Iterator[Tensor]:
    """Yields the values of `pack(full)` in chunks.

    A chunk consists of whole rows of the triangle. It has at most `limit` values, unless a single row has more.
    """
    full = full.cpu()
    side, start = full.shape[-1], 0
    source = _numpy_view(full)
    while start < side:
        stop = start + 1
        while stop < side and triangle_length(stop + 1) - triangle_length(start) <= limit:
            stop += 1
        part = full.new_empty(triangle_length(stop) - triangle_length(start))
        _copy_rows(source, _numpy_view(part), range(start, stop))
        yield part
        start = stop


def _copy_rows(source: Any, target: Any, rows: range) -> None:
    end = 0
    for row in rows:
        start, end = end, end + row + 1
        target[..., start:end] = source[..., row, : row + 1]


def unpack(packed: Tensor, side: int, scale: Tensor | None = None) -> Tensor:
    """Unpacks a lower triangle to a full symmetric matrix.

    Args:
        packed: Triangle, (..., n(n+1)/2).
        side: Number n of rows and of columns.
        scale: Factors by which the rows of the triangle are multiplied, (..., n). By default, the rows are not scaled.

    Returns:
        The full matrix, (..., n, n), in the dtype of `scale` if it is passed, and otherwise in the dtype of `packed`.
    """
    if packed.device.type != "cpu" or not _has_storage(packed) or side <= _SMALL_SIDE:
        # One gather is faster than n small copies, each of which would launch a kernel.
        i = torch.arange(side, dtype=torch.int32, device=packed.device)
        high = torch.maximum(i[:, None], i)
        index = high * (high + 1) // 2 + torch.minimum(i[:, None], i)
        full: Tensor = packed.index_select(-1, index.reshape(-1)).unflatten(-1, (side, side))
        if scale is None:
            return full
        return full * torch.where(i[:, None] >= i, scale[..., :, None], scale[..., None, :])
    if scale is not None and scale.dtype is torch.bfloat16:
        return unpack(packed, side, scale.float()).to(scale.dtype)  # numpy cannot multiply bfloat16
    full = packed.new_empty((*packed.shape[:-1], side, side), dtype=packed.dtype if scale is None else scale.dtype)
    source, target = _numpy_view(packed), _numpy_view(full)
    factors = None if scale is None else _numpy_view(scale)
    for row in range(side):
        values, destination = source[..., triangle_length(row) : triangle_length(row + 1)], target[..., row, : row + 1]
        if factors is None:
            destination[...] = values
        else:
            np.multiply(values, factors[..., row, None], out=destination)
    for rows in _tiles(side):
        for columns in _tiles(rows.start):
            full[..., columns, rows] = full[..., rows, columns].mT
        corner = full[..., rows, rows]
        corner.copy_(corner.tril() + corner.tril(-1).mT)
    return full


def _has_storage(tensor: Tensor) -> bool:
    """Returns whether a tensor has storage that numpy can view. Tensors inside torch.func transforms have none."""
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True


def _numpy_view(tensor: Tensor) -> Any:
    """Returns a numpy view of a tensor. Values in bfloat16 are viewed as int16.

    numpy is used because it copies rows about four times as fast as torch.
    """
    return tensor.detach().view(torch.int16 if tensor.dtype is torch.bfloat16 else tensor.dtype).numpy()


def row_indices(side: int) -> Tensor:
    """Returns the row index of every value in a packed triangle: 0, 1, 1, 2, 2, 2 and so on."""
    rows = torch.arange(side)
    return rows.repeat_interleave(rows + 1)


def asymmetry(full: Tensor) -> float:
    """Returns the largest difference |m[i,j] - m[j,i]| in an (n, n) tensor, or NaN if the tensor contains NaN."""
    differences = [
        (full[rows, columns] - full[columns, rows].mT).abs().amax()
        for rows in _tiles(full.shape[-1])
        for columns in _tiles(rows.stop)
    ]
    return float(torch.stack(differences).amax())


def _tiles(side: int) -> list[slice]:
    """Returns slices for square tiles that fit into a core's cache, which makes access along columns fast."""
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
"""Torch dtypes by their names in safetensors files."""
FILE_TYPES = {dtype: name for name, dtype in TORCH_TYPES.items()}
"""Names of dtypes in safetensors files, by torch dtype."""

CHUNK_VALUES = 2**21
"""Number of values that are written at a time. Small enough that the values are still in the CPU cache when
they are hashed."""


class MatrixTensors(ABC):
    """The components of a matrix, by name."""

    specs: Mapping[str, Spec]
    """Dtype and shape of each component."""

    @abstractmethod
    def __getitem__(self, name: str) -> Tensor: ...

    def raise_error(self, name: str, problem: str) -> None:
        """Raises an error about a component.

        Args:
            name: Name of the component.
            problem: Description of the problem.

        Raises:
            MatrixError: Always, unless the component is in a bundle.
            CorruptTensor: If the component is in a bundle. The error names the file and the tensor.
        """
        raise MatrixError(f"component {name!r} {problem}")

    def span(self, name: str, start: int, stop: int) -> Tensor:
        """Returns the values at positions `start` to `stop` - 1 of a component, in row-major order."""
        return self[name].reshape(-1)[start:stop]

    def parts(self, name: str) -> Iterator[Tensor]:
        """Yields the values of a component in row-major order, in chunks."""
        yield from self[name].reshape(-1).split(CHUNK_VALUES)


class InMemoryTensors(MatrixTensors):
    """Components that are stored in memory."""

    def __init__(self, **tensors: Tensor):
        self._tensors = tensors
        self.specs = {name: spec_of(tensor) for name, tensor in tensors.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]


class SpecTensors(MatrixTensors):
    """Components of which only the dtypes and shapes are known.

    They are used to determine the size of a matrix before its values are computed.
    """

    def __init__(self, specs: Mapping[str, Spec]):
        self.specs = specs

    def __getitem__(self, name: str) -> Tensor:
        raise AssertionError(f"the values of {name!r} have not been computed")


class LazyTensors(MatrixTensors):
    """A single component, `data`, which is computed on first use and then cached."""

    def __init__(self, spec: Spec, compute: Callable[[], Tensor]):
        self.specs = {"data": spec}
        self._compute: Callable[[], Tensor] | None = compute
        self._data: Tensor | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._data is None and self._compute is not None:
            self._data, self._compute = self._compute(), None
        assert name == "data"
        assert self._data is not None
        return self._data


def map_tensor(file: Container | SealedFile, name: str) -> Tensor:
    """Maps a tensor of an open safetensors file into memory.

    Args:
        file: The file.
        name: Name of the tensor.

    Returns:
        The tensor. Writing to it does not change the file.
    """
    spec, data = file.tensors[name], file.bytes_of(name)
    if not data:
        return torch.empty(spec.shape, dtype=TORCH_TYPES[spec.dtype])
    if spec.start % ITEM_BYTES[spec.dtype]:
        data = memoryview(bytearray(data))  # other software may write unaligned tensors
    return torch.frombuffer(data, dtype=TORCH_TYPES[spec.dtype]).view(spec.shape)


class BundleTensors(MatrixTensors):
    """Components in an open bundle, which are mapped into memory.

    The SHA-256 digest and the values of each tensor are checked when the tensor is first used; see `Bundle.bytes_of`.
    """

    def __init__(self, bundle: Bundle, names: Mapping[str, str]):
        self._bundle = bundle
        self._names = names
        self.specs = {key: (bundle.tensors[name].dtype, bundle.tensors[name].shape) for key, name in names.items()}

    def __getitem__(self, name: str) -> Tensor:
        return map_tensor(self._bundle, self._names[name])

    def span(self, name: str, start: int, stop: int) -> Tensor:
        """Reads the values at positions `start` to `stop` - 1 of a component, in row-major order."""
        dtype, _ = self.specs[name]
        if start == stop:
            return torch.empty(0, dtype=TORCH_TYPES[dtype])
        data = self._bundle.read(self._names[name], start * ITEM_BYTES[dtype], stop * ITEM_BYTES[dtype])
        return torch.frombuffer(data, dtype=TORCH_TYPES[dtype])

    def raise_error(self, name: str, problem: str) -> None:
        """Raises a `CorruptTensor` error that names the file and the tensor."""
        raise CorruptTensor(self._bundle.path, problem, f"tensor {self._names[name]!r}")


class LazyPackedTensors(MatrixTensors):
    """The lower triangle of a full matrix. The triangle is packed on every access and is not cached."""

    def __init__(self, full: MatrixTensors):
        dtype, (side, _) = full.specs["data"]
        self.specs = {"data": (dtype, (triangle_length(side),))}
        self._full = full

    def __getitem__(self, name: str) -> Tensor:
        return torch.cat(list(self.parts(name)))

    def parts(self, name: str) -> Iterator[Tensor]:
        """Yields the values of the triangle in chunks of whole rows."""
        return pack_in_parts(self._full[name], CHUNK_VALUES)


def spec_of(tensor: Tensor) -> Spec:
    """Returns the dtype and shape of a tensor, in the notation of safetensors files.

    Raises:
        MatrixError: If the file format does not support the dtype.
    """
    if tensor.dtype not in FILE_TYPES:
        supported = ", ".join(map(str, FILE_TYPES))
        raise MatrixError(f"cannot store a tensor of dtype {tensor.dtype}; expected one of {supported}")
    return FILE_TYPES[tensor.dtype], tuple(tensor.shape)


def nbytes_of(spec: Spec) -> int:
    """Returns the size in bytes of a tensor with the given dtype and shape."""
    dtype, shape = spec
    return prod(shape) * ITEM_BYTES[dtype]


def raw_bytes(tensor: Tensor) -> memoryview:
    """Returns the bytes of a tensor in row-major order. A contiguous tensor on the CPU is not copied."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
