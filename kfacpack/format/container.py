"""The safetensors container and its seal. This module does not import torch.

    8 bytes   little-endian length n of the header
    n bytes   the header: a JSON object that maps tensor names to {dtype, shape, data_offsets}, plus __metadata__
    the rest  the tensors, back to back, without gaps or overlaps

A header may come from an untrusted source. Its length, nesting depth and number of values are bounded, every tensor
must lie within the file on disk, and no tensor is read before these checks. The seal is stored in `__metadata__`. It is
the SHA-256 of the length and the header, with zeros in place of the seal itself. The header of a sealed file contains
the SHA-256 of every tensor, so the seal covers the whole file.
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
from reprlib import Repr
from typing import TYPE_CHECKING, Any, NamedTuple

from kfacpack.errors import BundleError
from kfacpack.format.hub_client import commit_of_copy, header_descriptor, local_copy
from kfacpack.format.reference import FileLocation, Reference, is_reference, locate

if TYPE_CHECKING:
    from collections.abc import Iterable


class SealKeys(NamedTuple):
    """A kind of sealed file: its metadata keys, its features, and descriptions of it for error messages."""

    manifest: str
    """Metadata key of the manifest."""
    seal: str
    """Metadata key of the seal."""
    kind: str
    """Name of this kind of file."""
    usage: str
    """Sentence that names the commands for this kind of file. It is shown if another kind was expected."""
    features: frozenset[str] = frozenset()
    """Features that files of this kind may require and that this version of kfacpack supports."""


MANIFEST_KEY = "kfac"
SEAL_KEY = "kfac.sha256"
BUNDLE = SealKeys(
    MANIFEST_KEY,
    SEAL_KEY,
    "bundle",
    "Bundles are merged by `kfacpack merge`, shown by `kfacpack inspect` and used by `kfacpack train --reg`",
    frozenset({"metric"}),
)
VECTOR = SealKeys(
    "kfacpack.vector",
    "kfacpack.vector.sha256",
    "task vector",
    "Task vectors are added by `kfacpack add`, shown by `kfacpack inspect` and used by `kfacpack eval --vector`",
    frozenset({"factors", "remainders", "sparse"}),
)
KINDS = (BUNDLE, VECTOR)
UNSEALED = "0" * 64


def seal(header: bytes, stored: str = UNSEALED) -> str:
    """Computes the seal of a header.

    Args:
        header: The length prefix and the header, as bytes.
        stored: The seal that `header` contains, as 64 hexadecimal digits. It is replaced by zeros before hashing.

    Returns:
        The SHA-256 as 64 hexadecimal digits.
    """
    return sha256(header.replace(stored.encode(), UNSEALED.encode(), 1)).hexdigest()


MAX_HEADER_BYTES = 8 * 2**20
MAX_JSON_VALUES = 2**18
MAX_DIMENSION = 2**40
_MAX_DIGITS = 1000
_CHUNK = 2**20

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
"""Size of one element in bytes, by safetensors dtype."""

NOT_SAFETENSORS = "Expected a safetensors file; pickles and other formats are never loaded"

MAGIC_BYTES = {
    b"PK\x03\x04": "looks like an archive made by torch.save or zip",
    b"\x80": "looks like a pickle",
    b"version https://git-lfs": "is a Git LFS pointer, not the file itself",
    b"<": "looks like a web page",
}
"""Descriptions of files that are often mistaken for safetensors files, keyed by the first bytes of the file."""


DOWNLOAD_AGAIN = "The file is incomplete or damaged: download it again from its publisher"


def download_again(path: str | os.PathLike[str]) -> str:
    """Returns the advice to download a damaged file again, for error messages.

    If the file is on the Hub, the advice names the command that downloads it.
    """
    if is_reference(path):
        return f"The cached copy is incomplete or damaged: run `kfacpack pull {os.fspath(path)}` to download it again"
    return DOWNLOAD_AGAIN


Spec = tuple[str, tuple[int, ...]]
"""The safetensors dtype and the shape of a tensor."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's entry in a header: dtype, shape and position in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """Position of the first byte of the tensor, counted from the start of the file."""
    stop: int
    """Position after the last byte of the tensor, counted from the start of the file."""

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.stop - self.start


class Container:
    """An open safetensors file. The header is read when the file is opened, tensors when they are accessed.

    The file stays open. Later accesses therefore read the file that was checked, even if another file has been renamed
    over it. If the file is modified in place, the next access raises an error.

    Attributes:
        path: Location of the file.
        nbytes: Size of the file in bytes.
        header: The length prefix and the header, verbatim.
        metadata: The header's `__metadata__`.
        commit: Commit of the file on the Hub, or None if the file is local or `path` has `header_only` set.

    Args:
        path: A path or an `hf://` reference.

    Raises:
        BundleError: If the file cannot be read or its header is invalid.
        HubError: If a reference cannot be fetched.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = locate(path)
        try:
            self._descriptor, self.commit = _open_descriptor(self.path)
            weakref.finalize(self, os.close, self._descriptor)
            if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                folder = stat.S_ISDIR(os.fstat(self._descriptor).st_mode)
                raise BundleError(path, "is a folder; expected a file" if folder else "is not a regular file")
            self._state = self._file_state()
            self.nbytes = os.fstat(self._descriptor).st_size
            self.header = _read_header(self.path, self._descriptor, self.nbytes)
        except OSError as error:
            raise BundleError(path, error.strerror or str(error)) from error
        except ValueError as error:
            raise BundleError(path, str(error)) from error
        self._entries, self.metadata = header_entries(self.path, self.header)

    def _file_state(self) -> tuple[int, int]:
        """Returns the size and the modification time of the file, which reveal whether the file has changed."""
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """The dtype, shape and position of each tensor, by name.

        The entries of the header are checked on first access, so that an unsupported format version is reported before
        an invalid entry.
        """
        specs = tensor_specs(self.path, self._entries, len(self.header), self.nbytes)
        self._entries = {}  # saves memory when many bundles are open
        return specs

    def bytes_of(self, name: str) -> memoryview:
        """Maps a tensor's bytes into memory.

        Args:
            name: Name of the tensor.

        Returns:
            The bytes as a private copy-on-write mapping: writing to it does not change the file.

        Raises:
            BundleError: If the file has been modified since it was opened, or cannot be read.
        """
        spec = self.tensors[name]
        self._require_unchanged(name)
        if not spec.nbytes:
            return memoryview(b"")
        start = spec.start - spec.start % mmap.ALLOCATIONGRANULARITY
        try:
            mapped = mmap.mmap(self._descriptor, spec.stop - start, offset=start, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise self._unreadable(name, str(error)) from error
        return memoryview(mapped)[spec.start - start :]

    def read(self, name: str, start: int, stop: int) -> bytearray:
        """Returns a copy of part of a tensor's bytes. For small parts, this is cheaper than mapping the tensor.

        Args:
            name: Name of the tensor.
            start: Index of the first byte to read, counted from the start of the tensor.
            stop: Index at which to stop reading. The byte at this index is not read.

        Raises:
            BundleError: If the file has been modified since it was opened, or cannot be read.
        """
        self._require_unchanged(name)
        data = bytearray(stop - start)
        position, done = self.tensors[name].start + start, 0
        try:
            while done < len(data):
                count = _read_at(self._descriptor, memoryview(data)[done:], position + done)
                if not count:
                    break
                done += count
        except OSError as error:
            raise self._unreadable(name, str(error)) from error
        if done < len(data):
            raise self._unreadable(name, f"expected {len(data)} bytes, got {done}")
        return data

    def file_digest(self) -> str:
        """Returns the SHA-256 of the whole file as 64 hexadecimal digits.

        Raises:
            BundleError: If the file has been modified since it was opened, or cannot be read.
        """
        content, buffer, position = sha256(), memoryview(bytearray(_CHUNK)), 0
        try:
            while count := _read_at(self._descriptor, buffer, position):
                content.update(buffer[:count])
                position += count
        except OSError as error:
            raise BundleError(self.path, f"cannot be read: {error}", None, download_again(self.path)) from error
        self._require_unchanged()
        return content.hexdigest()

    def _unreadable(self, name: str, reason: str) -> BundleError:
        return BundleError(self.path, f"cannot be read: {reason}", f"tensor {name!r}", download_again(self.path))

    def _require_unchanged(self, name: str | None = None) -> None:
        if self._file_state() != self._state:
            problem = "the file has been modified in place since it was opened"
            where = f"tensor {name!r}" if name else None
            remedy = "Open the file again. To replace a file that is open, write a new file and rename it"
            raise BundleError(self.path, problem, where, remedy)


def _open_descriptor(path: FileLocation) -> tuple[int, str | None]:
    """Opens a file. Returns its descriptor, and its commit if the file is a cached copy from the Hub."""
    if isinstance(path, Reference) and path.header_only:
        return header_descriptor(path, MAX_HEADER_BYTES), None
    local = local_copy(path) if isinstance(path, Reference) else path
    commit = commit_of_copy(path, local) if isinstance(path, Reference) else None
    # Without O_NONBLOCK, opening a pipe would block until another process writes to it.
    return os.open(local, os.O_RDONLY | os.O_NONBLOCK), commit


def _read_at(descriptor: int, target: memoryview, position: int) -> int:
    """Reads bytes of a file, starting at `position`, into `target`. Returns the number of bytes that were read."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [target], position)
    # Systems without preadv, such as macOS.
    part = os.pread(descriptor, len(target), position)
    target[: len(part)] = part
    return len(part)


def json_value_bound(text: bytes) -> int:
    """Returns an upper bound on the number of list items and object members in a JSON document, without parsing it."""
    return sum(map(text.count, (b",", b"[", b"{")))


def first_duplicate(values: Iterable[str]) -> str | None:
    """Returns the first value that occurs a second time, or None if all values are distinct."""
    seen: set[str] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None


def parse_json(
    path: FileLocation, text: bytes, where: str, remedy: str | None = None, *, nulls: bool = False
) -> dict[str, Any]:
    """Parses a JSON object from an untrusted file. The number of values and the nesting depth are limited.

    Args:
        path: The file that contains the JSON object, for error messages.
        text: The JSON object, encoded in UTF-8.
        where: The part of the file that contains the object, such as "header", for error messages.
        remedy: Advice to the user if the JSON is invalid. By default, the advice is to download the file again.
        nulls: Whether keys may have the value null, as in the config files of other libraries.

    Returns:
        The object. Its keys are unique, its numbers are finite and, unless `nulls` is set, no key has the value null.

    Raises:
        BundleError: If `text` is not a valid JSON object, or if it contains too many values.
    """
    if json_value_bound(text) > MAX_JSON_VALUES:
        raise BundleError(path, f"contains more than {MAX_JSON_VALUES} JSON values", where)

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            raise ValueError(f"duplicate key {first_duplicate(key for key, _ in pairs)!r}")
        if not nulls and (null_keys := [key for key, value in pairs if value is None]):
            raise ValueError(f"the key {null_keys[0]!r} is null, which is not allowed")
        return members

    def finite(number: str) -> float:
        if not isfinite(float(number)):
            raise ValueError(f"{number} is not a finite number")
        return float(number)

    def integer(number: str) -> int:
        if len(number) > _MAX_DIGITS:
            raise ValueError(f"the integer {number[:20]}… has {len(number)} digits, expected at most {_MAX_DIGITS}")
        return int(number)

    try:
        value = json.loads(
            text.decode(), object_pairs_hook=members, parse_constant=finite, parse_float=finite, parse_int=integer
        )
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BundleError(path, f"invalid JSON: {problem}", where, remedy or download_again(path)) from error
    if not isinstance(value, dict):
        raise BundleError(path, f"expected a JSON object, got {type(value).__name__}", where=where)
    return value


def _read_header(path: FileLocation, descriptor: int, nbytes: int) -> bytes:
    """Reads the header of a file. Returns the length prefix and the header as unmodified bytes."""
    prefix = os.pread(descriptor, 8, 0)
    if len(prefix) < 8:
        raise BundleError(path, f"is too short: expected at least 8 bytes, got {nbytes}", remedy=download_again(path))
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        start = os.pread(descriptor, 32, 0)
        other_format = next(
            (description for magic, description in MAGIC_BYTES.items() if start.startswith(magic)), None
        )
        too_long = f"its header would have {length} bytes, but at most {MAX_HEADER_BYTES} are allowed"
        problem = other_format or f"is not a safetensors file: {too_long}"
        raise BundleError(path, problem, None, NOT_SAFETENSORS)
    if 8 + length > nbytes:
        problem = f"needs {8 + length} bytes, including its length prefix, but the file ends at byte {nbytes}"
        raise BundleError(path, problem, where="header", remedy=download_again(path))
    header = prefix + os.pread(descriptor, length, 8)
    if header[8:9] != b"{":
        raise BundleError(path, "does not begin with '{'", "header", NOT_SAFETENSORS)
    return header


def _metadata(path: FileLocation, metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BundleError(path, "is not a JSON object whose values are strings", where="header: __metadata__")
    return metadata


def header_entries(path: FileLocation, header: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """Parses the header of a safetensors file.

    Args:
        path: The file that contains the header, for error messages.
        header: The length prefix and the header.

    Returns:
        The entries of the tensors by name, and the metadata.

    Raises:
        BundleError: If the header is invalid.
    """
    entries = parse_json(path, header[8:], "header")
    return entries, _metadata(path, entries.pop("__metadata__", {}))


def tensor_specs(path: FileLocation, entries: dict[str, Any], start: int, nbytes: int) -> dict[str, TensorSpec]:
    """Returns the dtype, shape and position of each tensor, by name.

    The tensors must fill the file without gaps, from byte `start` to the end of the file at byte `nbytes`.
    """
    tensors = {name: _tensor_spec(path, name, entry, start) for name, entry in entries.items()}
    position, previous = start, "the header"
    for name, spec in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if spec.start != position:
            problem = f"starts at byte {spec.start}, expected byte {position}, immediately after {previous}"
            raise BundleError(path, problem, where=f"tensor {name!r}")
        if spec.stop > nbytes:
            problem = f"ends at byte {spec.stop}, but the file ends at byte {nbytes}"
            raise BundleError(path, problem, where=f"tensor {name!r}", remedy=download_again(path))
        position, previous = spec.stop, repr(name)
    if position != nbytes:
        problem = f"ends at byte {nbytes}, but should end at byte {position}, immediately after {previous}"
        raise BundleError(path, problem, remedy=download_again(path))
    return tensors


def _tensor_spec(path: FileLocation, name: str, entry: Any, base: int) -> TensorSpec:
    def natural(value: Any) -> bool:
        return type(value) is int and 0 <= value <= MAX_DIMENSION

    def invalid(problem: str) -> BundleError:
        return BundleError(path, problem, where=f"tensor {name!r}")

    if not isinstance(entry, dict):
        raise invalid(f"expected an object, got {type(entry).__name__}")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise invalid(f"unknown dtype {short_repr(dtype)}, expected one of {', '.join(ITEM_BYTES)}")
    if not isinstance(shape, list) or len(shape) > 8 or not all(map(natural, shape)):
        raise invalid(f"invalid shape {short_repr(shape)}, expected at most 8 integers from 0 to {MAX_DIMENSION}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(natural, offsets)):
        raise invalid(f"invalid data_offsets {short_repr(offsets)}, expected two integers from 0 to {MAX_DIMENSION}")
    start, stop = offsets
    if stop - start != prod(shape) * ITEM_BYTES[dtype]:
        needed = prod(shape) * ITEM_BYTES[dtype]
        raise invalid(f"{dtype} of shape {shape} needs {needed} bytes, but its data_offsets span {stop - start} bytes")
    return TensorSpec(dtype, tuple(shape), base + start, base + stop)


_REPR = Repr()
_REPR.maxlist = _REPR.maxdict = 10
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 80


def short_repr(value: Any) -> str:
    """Returns a representation of at most 80 characters for a JSON value of any size and nesting depth."""
    text = _REPR.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
