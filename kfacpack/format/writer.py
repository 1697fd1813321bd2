"""Writing a bundle, or another sealed file: streaming, atomic, deterministic.

Every tensor's place follows from shapes alone and every SHA-256 is 64 digits long, so the header's length is known
before the first number is. Tensors are written to their places in whatever order they come, a part at a time; the
header is written last; then the file is synced and renamed. Who is killed half-way leaves the old file.

Small files that appear whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kfacpack.errors import BundleError
from kfacpack.format.container import (
    BUNDLE,
    ITEM_BYTES,
    MAX_HEADER_BYTES,
    MAX_JSON_VALUES,
    UNSEALED,
    SealKeys,
    Spec,
    TensorSpec,
    json_values,
    seal,
)
from kfacpack.format.reference import is_reference
from kfacpack.format.schema import check_consistency

if TYPE_CHECKING:
    from kfacpack.format.manifest import Manifest


ABANDONED_AFTER = 3600
"""Seconds without a write, after which an unfinished file is nobody's."""


class SealedManifest(Protocol):
    """A manifest, as far as writing it goes."""

    def with_digests(self, digests: Mapping[str, str]) -> SealedManifest: ...

    def model_dump(self, *, mode: str, exclude_none: bool) -> dict[str, Any]: ...


class TensorWriter(Protocol):
    """Takes the next bytes of a tensor to their place in the file."""

    def __call__(self, name: str, data: memoryview) -> None: ...


@contextlib.contextmanager
def write_bundle(
    path: str | os.PathLike[str], manifest: Manifest, tensors: Mapping[str, Spec]
) -> Iterator[TensorWriter]:
    """A context in which the bytes of every tensor in `tensors` (name -> dtype, shape) are put; it makes the file.

    The manifest's digests are filled in from the bytes that were put.
    """
    check_consistency(Path(path), manifest, tensor_offsets(tensors))
    with write_sealed(path, manifest, tensors, BUNDLE) as put:
        yield put


@contextlib.contextmanager
def write_sealed(
    path: str | os.PathLike[str], manifest: SealedManifest, tensors: Mapping[str, Spec], keys: SealKeys
) -> Iterator[TensorWriter]:
    """`write_bundle` for a file of any kind; whether the manifest fits the tensors is the caller's concern."""
    header = _header(path, manifest, tensors, dict.fromkeys(tensors, UNSEALED), keys)
    places = tensor_offsets(tensors, start=len(header))

    # One part is hashed and written while the caller prepares the next; never more than that one is waiting.
    with replace_atomically(path) as descriptor, ThreadPoolExecutor(max_workers=1) as background:
        under_way: Future[None] | None = None
        written = dict.fromkeys(tensors, 0)
        hashes = {name: sha256() for name in tensors}

        def store(name: str, data: memoryview, position: int) -> None:
            hashes[name].update(data)
            _write_at(descriptor, data, position)

        def put(name: str, data: memoryview) -> None:
            nonlocal under_way
            if under_way is not None:
                under_way.result()
            under_way = background.submit(store, name, data, places[name].start + written[name])
            written[name] += data.nbytes

        yield put
        if under_way is not None:
            under_way.result()
        _require_all(places, written)
        digests = {name: each.hexdigest() for name, each in hashes.items()}
        final = _header(path, manifest, tensors, digests, keys)
        _write_at(descriptor, memoryview(final.replace(UNSEALED.encode(), seal(final).encode(), 1)), 0)


@contextlib.contextmanager
def write_plain(
    path: str | os.PathLike[str], tensors: Mapping[str, Spec], metadata: Mapping[str, str]
) -> Iterator[TensorWriter]:
    """A context in which the bytes of every tensor are put; it makes a safetensors file without a seal."""
    header = _frame_header(path, tensors, metadata, [], "file")
    places = tensor_offsets(tensors, start=len(header))
    with replace_atomically(path) as descriptor:
        written = dict.fromkeys(tensors, 0)

        def put(name: str, data: memoryview) -> None:
            _write_at(descriptor, data, places[name].start + written[name])
            written[name] += data.nbytes

        _write_at(descriptor, memoryview(header), 0)
        yield put
        _require_all(places, written)


def _require_all(places: Mapping[str, TensorSpec], written: Mapping[str, int]) -> None:
    for name, place in places.items():
        if written[name] != place.nbytes:
            raise ValueError(f"tensor {name!r} was announced with {place.nbytes} bytes, put were {written[name]}")


def bundle_digest(
    manifest: SealedManifest, tensors: Mapping[str, Spec], digests: Mapping[str, str], keys: SealKeys = BUNDLE
) -> str:
    """The digest that the file of these will have, from each tensor's SHA-256."""
    return seal(_header(keys.kind, manifest, tensors, digests, keys))


def bundle_size(manifest: Manifest, tensors: Mapping[str, Spec]) -> int:
    """How many bytes their file will have. Digests are all of one length, so that it does not take the numbers."""
    header = _header("bundle", manifest, tensors, dict.fromkeys(tensors, UNSEALED), BUNDLE)
    return max((place.stop for place in tensor_offsets(tensors, start=len(header)).values()), default=len(header))


@contextlib.contextmanager
def replace_atomically(path: str | os.PathLike[str]) -> Iterator[int]:
    """A descriptor to write to, which becomes `path` whole, or, when anything goes wrong, not at all."""
    target = _target(path)
    partial = f".{sha256(os.fsencode(target.name)).hexdigest()[:16]}"
    temporary = target.parent / f"{partial}.{secrets.token_hex(8)}.partial"
    try:
        descriptor, named = _open_temporary(temporary)
        try:
            if target.exists():
                os.fchmod(descriptor, stat.S_IMODE(target.stat().st_mode))
            yield descriptor
            os.fsync(descriptor)
            if not named:
                _link_or_rename(descriptor, temporary)
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
    except OSError as error:
        problem = f"could not be written: {error.strerror or error}"
        raise BundleError(path, problem, None, "Nothing was changed") from error
    _sync_folder(target.parent)
    _remove_abandoned(target.parent.glob(f"{partial}.*.partial"))


def _target(path: str | os.PathLike[str]) -> Path:
    """Where a path leads, through links, if a file may be put there."""
    if is_reference(path):
        raise BundleError(path, "could not be written: it is on the Hub", None, "Write a file, then: kfacpack push")
    try:
        target = Path(path).resolve()
        special = target.exists() and not target.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL, a folder that is gone
        raise BundleError(path, f"could not be written: {error}") from error
    if special or not target.name:
        raise BundleError(path, "could not be written: it is a directory, or something else that is no file")
    return target


def _open_temporary(path: Path) -> tuple[int, bool]:
    """An open file for writing, and whether it has the name `path` already.

    Where the system can, the file has no name until it is complete, so that a killed writer leaves nothing behind,
    unless it is killed in the instant between naming and renaming.
    """
    if hasattr(os, "O_TMPFILE") and Path("/proc/self/fd").exists():
        with contextlib.suppress(OSError):
            # A failure is either for want of support by the file system or met again, and reported, just below.
            return os.open(path.parent, os.O_TMPFILE | os.O_RDWR, 0o666), False
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666), True


def _link_or_rename(descriptor: int, path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        # Only with a folder's descriptor does Python call linkat, which can follow /proc's link to the nameless file.
        os.link(f"/proc/self/fd/{descriptor}", path.name, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def _remove_abandoned(partial: Iterable[Path]) -> None:
    """What writers to the same target left when they were killed: files that nobody has written to for long."""
    for path in partial:
        with contextlib.suppress(OSError):  # another writer may have removed it meanwhile
            if time.time() - path.stat().st_ctime > ABANDONED_AFTER:
                path.unlink()


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable, on file systems that can sync a folder; it has happened either way."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_at(descriptor: int, data: memoryview, position: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, position)
        data, position = data[written:], position + written


def tensor_offsets(tensors: Mapping[str, Spec], start: int = 0) -> dict[str, TensorSpec]:
    """Where each tensor goes: wider items first, so that each is aligned to its own size without padding."""
    places = {}
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -ITEM_BYTES[item[1][0]]):
        stop = start + prod(shape) * ITEM_BYTES[dtype]
        places[name] = TensorSpec(dtype, shape, start, stop)
        start = stop
    return places


def _header(
    path: str | os.PathLike[str],
    manifest: SealedManifest,
    tensors: Mapping[str, Spec],
    digests: Mapping[str, str],
    keys: SealKeys,
) -> bytes:
    """Length prefix and header, not sealed yet; padded so that the tensors start at a multiple of eight."""
    said = _compact(manifest.with_digests(digests).model_dump(mode="json", exclude_none=True))
    return _frame_header(path, tensors, {keys.seal: UNSEALED, keys.manifest: said}, [said], keys.kind)


def _frame_header(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Spec],
    metadata: Mapping[str, str],
    texts: Iterable[str],
    kind: str,
) -> bytes:
    """Length prefix and header; `texts` are those of the metadata that are JSON, and bounded themselves."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    for name, place in tensor_offsets(tensors).items():
        offsets = [place.start, place.stop]
        entries[name] = {"dtype": place.dtype, "shape": list(place.shape), "data_offsets": offsets}
    body = _compact(entries).encode("ascii")
    body += b" " * (-len(body) % 8)
    values = max(json_values(each) for each in (body, *(text.encode() for text in texts)))
    if len(body) > MAX_HEADER_BYTES or values > MAX_JSON_VALUES:
        found = f"{len(body)} bytes and {values} values"
        problem = f"its header would have {found}, at most {MAX_HEADER_BYTES} and {MAX_JSON_VALUES} are allowed"
        raise BundleError(path, problem, None, f"Save less in one {kind}")
    return len(body).to_bytes(8, "little") + body


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Who is killed half-way leaves the old file."""
    with replace_atomically(path) as descriptor, os.fdopen(descriptor, "wb", closefd=False) as stream:
        stream.write(data)
