"""The safetensors container, read with suspicion and without torch.

    8 bytes   little-endian length n of the header
    n bytes   the header: one JSON object, tensor name -> {dtype, shape, data_offsets}, and __metadata__
    the rest  the tensors, one behind the other, no gap, no overlap

The header may come from anywhere, so nothing is allocated on its word: its length is bounded, its nesting and number
of values are bounded, and every tensor must lie within the file as it is on disk.
"""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from kfacpack.errors import BundleError

MAX_HEADER_BYTES = 8 * 2**20
MAX_JSON_VALUES = 2**18
MAX_DIMENSION = 2**40

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip

DOWNLOAD_AGAIN = "The file is incomplete or damaged: fetch it again from where it was published"
NOT_A_BUNDLE = "A bundle is a safetensors file; pickles and other formats are never loaded"


Spec = tuple[str, tuple[int, ...]]
"""A tensor's dtype, in safetensors' words, and its shape."""


@dataclass(frozen=True)
class TensorSpec:
    """What a header says of one tensor. `start` and `stop` are offsets in the file, not in the data section."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Container:
    """An open safetensors file: its header, and its tensors' bytes when asked for.

    The file is mapped once, privately. What was checked and what is read later are the same file, even if another one
    is renamed over it meanwhile.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self.nbytes = os.fstat(file.fileno()).st_size
                self.header = _read_header(self.path, file.fileno(), self.nbytes)
                self._entries = parse_json(self.path, self.header[8:], "header")
                self.metadata = _metadata(self.path, self._entries.pop("__metadata__", {}))
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise BundleError(path, error.strerror or str(error)) from error

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """Looked at only when asked for, so that a bundle of a version to come is refused for its version."""
        return _tensor_specs(self.path, self._entries, len(self.header), self.nbytes)

    def bytes_of(self, name: str) -> memoryview:
        """The bytes of one tensor, as a view into the mapped file."""
        spec = self.tensors[name]
        return memoryview(self._map)[spec.start : spec.stop]


def parse_json(path: Path, text: bytes, where: str) -> dict[str, Any]:
    """One JSON object in UTF-8, with bounded cost, unique keys and finite numbers."""
    if sum(map(text.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        raise BundleError(path, f"more than {MAX_JSON_VALUES} JSON values", where=where)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ValueError(f"the key {twice!r} stands there twice")
        return found

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a JSON number")

    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BundleError(path, f"not valid JSON: {problem}", where=where, remedy=DOWNLOAD_AGAIN) from error
    if not isinstance(found, dict):
        raise BundleError(path, f"expected a JSON object, found {type(found).__name__}", where=where)
    return found


def _read_header(path: Path, descriptor: int, nbytes: int) -> bytes:
    """The length prefix and the header, verbatim."""
    prefix = os.pread(descriptor, 8, 0)
    if len(prefix) < 8:
        raise BundleError(path, f"only {nbytes} bytes long, expected at least 8", remedy=DOWNLOAD_AGAIN)
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        problem = f"claims a header of {length} bytes, at most {MAX_HEADER_BYTES} are allowed"
        raise BundleError(path, problem, where="header", remedy=NOT_A_BUNDLE)
    if 8 + length > nbytes:
        problem = f"the header needs {8 + length} bytes, the file ends at {nbytes}"
        raise BundleError(path, problem, where="header", remedy=DOWNLOAD_AGAIN)
    header = prefix + os.pread(descriptor, length, 8)
    if header[8:9] != b"{":
        raise BundleError(path, "does not begin with '{'", where="header", remedy=NOT_A_BUNDLE)
    return header


def _metadata(path: Path, metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BundleError(path, "expected an object of strings", where="header: __metadata__")
    return metadata


def _tensor_specs(path: Path, entries: dict[str, Any], start: int, nbytes: int) -> dict[str, TensorSpec]:
    """Every tensor's spec, once they are known to fill the file from `start` to its end."""
    tensors = {name: _tensor_spec(path, name, entry, start) for name, entry in entries.items()}
    position, previous = start, "the header"
    for name, spec in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if spec.start != position:
            problem = f"starts at byte {spec.start}, expected {position}, right behind {previous}"
            raise BundleError(path, problem, where=f"tensor {name!r}")
        if spec.stop > nbytes:
            problem = f"ends at byte {spec.stop}, the file ends at {nbytes}"
            raise BundleError(path, problem, where=f"tensor {name!r}", remedy=DOWNLOAD_AGAIN)
        position, previous = spec.stop, repr(name)
    if position != nbytes:
        problem = f"{nbytes - position} bytes follow {previous}, where the file should end"
        raise BundleError(path, problem, remedy=DOWNLOAD_AGAIN)
    return tensors


def _tensor_spec(path: Path, name: str, entry: Any, base: int) -> TensorSpec:
    def natural(value: Any) -> bool:
        return type(value) is int and 0 <= value <= MAX_DIMENSION

    def refuse(problem: str) -> BundleError:
        return BundleError(path, problem, where=f"tensor {name!r}")

    if not isinstance(entry, dict):
        raise refuse(f"expected an object, found {type(entry).__name__}")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise refuse(f"unknown dtype {dtype!r}, expected one of {', '.join(ITEM_BYTES)}")
    if not isinstance(shape, list) or len(shape) > 8 or not all(map(natural, shape)):
        raise refuse(f"bad shape {_short(shape)}, expected at most 8 numbers from 0 to {MAX_DIMENSION}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(natural, offsets)):
        raise refuse(f"bad data_offsets {_short(offsets)}, expected two numbers from 0 to {MAX_DIMENSION}")
    start, stop = offsets
    if stop - start != prod(shape) * ITEM_BYTES[dtype]:
        raise refuse(f"{dtype} of shape {shape} needs {prod(shape) * ITEM_BYTES[dtype]} bytes, found {stop - start}")
    return TensorSpec(dtype, tuple(shape), base + start, base + stop)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
