"""The seal: one SHA-256 over length and header, and with them over every tensor's digest.

The safetensors container, read with suspicion and without torch.

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
import stat
import weakref
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from math import isfinite, prod
from typing import TYPE_CHECKING, Any, NamedTuple

from kfacpack.errors import BundleError
from kfacpack.format.hub_client import header_descriptor, local_copy
from kfacpack.format.reference import FileLocation, Reference, is_reference, locate

if TYPE_CHECKING:
    from collections.abc import Iterable


class SealKeys(NamedTuple):
    """Where a sealed file's metadata has what, and what such a file is called."""

    manifest: str
    seal: str
    kind: str
    use: str
    """What takes such files, for somebody who gave one to something else."""


MANIFEST_KEY = "kfac"
SEAL_KEY = "kfac.sha256"
BUNDLE = SealKeys(
    MANIFEST_KEY,
    SEAL_KEY,
    "bundle",
    "Bundles are added up by `kfacpack merge`, shown by `kfacpack inspect` and used by `kfacpack train --reg`",
)
VECTOR = SealKeys(
    "kfacpack.vector",
    "kfacpack.vector.sha256",
    "task vector",
    "Task vectors are added up by `kfacpack add`, negated by `kfacpack negate` and used by `kfacpack eval --vector`",
)
KINDS = (BUNDLE, VECTOR)
UNSEALED = "0" * 64


def seal(header: bytes, claimed: str = UNSEALED) -> str:
    """SHA-256 over length prefix and header, with the seal's own 64 digits read as zeros."""
    return sha256(header.replace(claimed.encode(), UNSEALED.encode(), 1)).hexdigest()


MAX_HEADER_BYTES = 8 * 2**20
MAX_JSON_VALUES = 2**18
MAX_DIMENSION = 2**40
_DIGITS = 1000

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip

NOT_SAFETENSORS = "Expected a safetensors file; pickles and other formats are never loaded"

# What people most often have in the place of a safetensors file, by its first bytes.
MAGIC_BYTES = {
    b"PK\x03\x04": "looks like an archive made by torch.save or zip",
    b"\x80": "looks like a pickle",
    b"version https://git-lfs": "is a Git LFS pointer, not the file it stands for",
    b"<": "looks like a web page",
}


DOWNLOAD_AGAIN = "The file is incomplete or damaged: fetch it again from where it was published"


def download_again(path: str | os.PathLike[str]) -> str:
    """What to do about a file that is not as it was published."""
    if is_reference(path):
        return f"The copy in the cache is incomplete or damaged: 'kfacpack pull {os.fspath(path)}' fetches it anew"
    return DOWNLOAD_AGAIN


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

    The file stays open, so that what was checked and what is read later are the same file, even if another one is
    renamed over it meanwhile; one that is changed in place is refused when it is next read.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = locate(path)
        try:
            self._descriptor = _opened(self.path)
            weakref.finalize(self, os.close, self._descriptor)
            if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                raise BundleError(path, "is not a regular file")
            self._state = self._look()
            self.nbytes = os.fstat(self._descriptor).st_size
            self.header = _read_header(self.path, self._descriptor, self.nbytes)
        except OSError as error:
            raise BundleError(path, error.strerror or str(error)) from error
        except ValueError as error:
            raise BundleError(path, str(error)) from error
        self._entries = parse_json(self.path, self.header[8:], "header")
        self.metadata = _metadata(self.path, self._entries.pop("__metadata__", {}))

    def _look(self) -> tuple[int, int]:
        """What shows that somebody wrote to the file: its size and the time of its last change."""
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """Looked at only when asked for, so that a bundle of a version to come is refused for its version."""
        found = _tensor_specs(self.path, self._entries, len(self.header), self.nbytes)
        self._entries = {}  # no longer needed, and large where many bundles are open
        return found

    def bytes_of(self, name: str) -> memoryview:
        """The bytes of one tensor, mapped from the file. Changing them changes no file."""
        spec = self.tensors[name]
        self._require_unchanged(name)
        if not spec.nbytes:
            return memoryview(b"")
        start = spec.start - spec.start % mmap.ALLOCATIONGRANULARITY
        try:
            mapped = mmap.mmap(self._descriptor, spec.stop - start, offset=start, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            problem = f"cannot be read: {error}"
            raise BundleError(self.path, problem, f"tensor {name!r}", download_again(self.path)) from error
        return memoryview(mapped)[spec.start - start :]

    def read(self, name: str, start: int, stop: int) -> bytearray:
        """Bytes `start` to `stop` of one tensor, copied: for a few, that costs less than to map them."""
        self._require_unchanged(name)
        data = bytearray(stop - start)
        place, done = self.tensors[name].start + start, 0
        try:
            while done < len(data):
                got = _read_at(self._descriptor, memoryview(data)[done:], place + done)
                if not got:
                    break
                done += got
        except OSError as error:
            problem = f"cannot be read: {error}"
            raise BundleError(self.path, problem, f"tensor {name!r}", download_again(self.path)) from error
        if done < len(data):
            problem = f"cannot be read: {done} of {len(data)} bytes are there"
            raise BundleError(self.path, problem, f"tensor {name!r}", download_again(self.path))
        return data

    def _require_unchanged(self, name: str) -> None:
        if self._look() != self._state:
            problem = "the file was changed in place since it was opened"
            raise BundleError(self.path, problem, f"tensor {name!r}", "Open it again; replace files by renaming")


def _opened(path: FileLocation) -> int:
    if isinstance(path, Reference) and path.header_only:
        return header_descriptor(path, MAX_HEADER_BYTES)
    # Without O_NONBLOCK, opening a pipe would wait for somebody to write to it.
    return os.open(local_copy(path) if isinstance(path, Reference) else path, os.O_RDONLY | os.O_NONBLOCK)


def _read_at(descriptor: int, target: memoryview, place: int) -> int:
    """How many bytes were read, from `place` on. Systems without preadv, such as macOS, copy them once more."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [target], place)
    part = os.pread(descriptor, len(target), place)
    target[: len(part)] = part
    return len(part)


def json_values(text: bytes) -> int:
    """At least as many values as a JSON text holds, without parsing it."""
    return sum(map(text.count, (b",", b"[", b"{")))


def refuse_duplicate_keys(values: Iterable[str]) -> str | None:
    """The first value that has been there before, if any."""
    seen: set[str] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None


def parse_json(path: FileLocation, text: bytes, where: str, remedy: str | None = None) -> dict[str, Any]:
    """One JSON object in UTF-8, with bounded cost, unique keys, finite numbers and no null."""
    if json_values(text) > MAX_JSON_VALUES:
        raise BundleError(path, f"more than {MAX_JSON_VALUES} JSON values", where)

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError(f"the key {refuse_duplicate_keys(key for key, _ in pairs)!r} stands there twice")
        if nothing := [key for key, value in pairs if value is None]:
            raise ValueError(f"the key {nothing[0]!r} is null, expected it to be left out")
        return found

    def finite(number: str) -> float:
        if not isfinite(float(number)):
            raise ValueError(f"{number} is not a finite number")
        return float(number)

    def whole(number: str) -> int:
        if len(number) > _DIGITS:
            raise ValueError(f"{number[:20]}… has {len(number)} digits")
        return int(number)

    try:
        found = json.loads(
            text.decode(), object_pairs_hook=members, parse_constant=finite, parse_float=finite, parse_int=whole
        )
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BundleError(path, f"cannot be read as JSON: {problem}", where, remedy or download_again(path)) from error
    if not isinstance(found, dict):
        raise BundleError(path, f"expected a JSON object, found {type(found).__name__}", where=where)
    return found


def _read_header(path: FileLocation, descriptor: int, nbytes: int) -> bytes:
    """The length prefix and the header, verbatim."""
    prefix = os.pread(descriptor, 8, 0)
    if len(prefix) < 8:
        raise BundleError(path, f"only {nbytes} bytes long, expected at least 8", remedy=download_again(path))
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        start = os.pread(descriptor, 32, 0)
        looks = next((words for magic, words in MAGIC_BYTES.items() if start.startswith(magic)), None)
        claims = f"claims a header of {length} bytes, at most {MAX_HEADER_BYTES} are allowed"
        problem = looks or f"is no safetensors file: {claims}"
        raise BundleError(path, problem, None, NOT_SAFETENSORS)
    if 8 + length > nbytes:
        problem = f"the header needs {8 + length} bytes, the file ends at {nbytes}"
        raise BundleError(path, problem, where="header", remedy=download_again(path))
    header = prefix + os.pread(descriptor, length, 8)
    if header[8:9] != b"{":
        raise BundleError(path, "does not begin with '{'", "header", NOT_SAFETENSORS)
    return header


def _metadata(path: FileLocation, metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BundleError(path, "expected an object of strings", where="header: __metadata__")
    return metadata


def _tensor_specs(path: FileLocation, entries: dict[str, Any], start: int, nbytes: int) -> dict[str, TensorSpec]:
    """Every tensor's spec, once they are known to fill the file from `start` to its end."""
    tensors = {name: _tensor_spec(path, name, entry, start) for name, entry in entries.items()}
    position, previous = start, "the header"
    for name, spec in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if spec.start != position:
            problem = f"starts at byte {spec.start}, expected {position}, right behind {previous}"
            raise BundleError(path, problem, where=f"tensor {name!r}")
        if spec.stop > nbytes:
            problem = f"ends at byte {spec.stop}, the file ends at {nbytes}"
            raise BundleError(path, problem, where=f"tensor {name!r}", remedy=download_again(path))
        position, previous = spec.stop, repr(name)
    if position != nbytes:
        problem = f"{nbytes - position} bytes follow {previous}, where the file should end"
        raise BundleError(path, problem, remedy=download_again(path))
    return tensors


def _tensor_spec(path: FileLocation, name: str, entry: Any, base: int) -> TensorSpec:
    def natural(value: Any) -> bool:
        return type(value) is int and 0 <= value <= MAX_DIMENSION

    def refuse(problem: str) -> BundleError:
        return BundleError(path, problem, where=f"tensor {name!r}")

    if not isinstance(entry, dict):
        raise refuse(f"expected an object, found {type(entry).__name__}")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise refuse(f"unknown dtype {_short(dtype)}, expected one of {', '.join(ITEM_BYTES)}")
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
