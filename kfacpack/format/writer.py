"""Writes bundles and other files atomically. If the process dies while writing, the old file is left intact.

Sealed files are written deterministically, tensor by tensor. The positions of all tensors follow from their dtypes and
shapes, and every SHA-256 has 64 digits, so the length of the header is known before any tensor is written. Tensors may
be written in any order, in chunks of any size. The header is written last; then the file is synced and renamed.
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
    json_value_bound,
    seal,
)
from kfacpack.format.reference import is_reference
from kfacpack.format.schema import check_consistency

if TYPE_CHECKING:
    from kfacpack.format.manifest import Manifest


ABANDONED_AFTER = 3600
"""Number of seconds without a change after which an unfinished file counts as abandoned."""


class SealedManifest(Protocol):
    """The methods of a manifest that the writer calls."""

    def with_digests(self, digests: Mapping[str, str]) -> SealedManifest:
        """Returns a copy of the manifest with the SHA-256 of each tensor filled in."""

    def model_dump(self, *, mode: str, exclude_none: bool) -> dict[str, Any]:
        """Returns the manifest as plain JSON values."""


class TensorWriter(Protocol):
    """A function that appends bytes to a tensor in the file that is being written."""

    def __call__(self, name: str, data: memoryview) -> None:
        """Appends `data` to the tensor `name`."""


@contextlib.contextmanager
def write_bundle(
    path: str | os.PathLike[str], manifest: Manifest, tensors: Mapping[str, Spec]
) -> Iterator[TensorWriter]:
    """Writes a bundle atomically.

    Args:
        path: The file to write.
        manifest: The manifest. Its digests are replaced by those of the written bytes.
        tensors: Dtype and shape of every tensor by name.

    Yields:
        A function that appends bytes to a tensor. All bytes of all tensors must be written inside the context.

    Raises:
        BundleError: If the manifest does not match the tensors, or the file cannot be written.
        ValueError: If a tensor was not written completely.
    """
    check_consistency(Path(path), manifest, tensor_offsets(tensors))
    with write_sealed(path, manifest, tensors, BUNDLE) as write:
        yield write


@contextlib.contextmanager
def write_sealed(
    path: str | os.PathLike[str], manifest: SealedManifest, tensors: Mapping[str, Spec], keys: SealKeys
) -> Iterator[TensorWriter]:
    """Writes a sealed file of any kind atomically. The caller must check that the manifest matches the tensors.

    Args:
        path: The file to write.
        manifest: The manifest. Its digests are replaced by those of the written bytes.
        tensors: Dtype and shape of every tensor by name.
        keys: The kind of sealed file.

    Yields:
        A function that appends bytes to a tensor.

    Raises:
        BundleError: If the file cannot be written.
        ValueError: If a tensor was not written completely.
    """
    header = _header(path, manifest, tensors, dict.fromkeys(tensors, UNSEALED), keys)
    specs = tensor_offsets(tensors, start=len(header))

    # One chunk is hashed and written while the caller prepares the next. At most one chunk is pending.
    with replace_atomically(path) as descriptor, ThreadPoolExecutor(max_workers=1) as background:
        pending: Future[None] | None = None
        written = dict.fromkeys(tensors, 0)
        hashes = {name: sha256() for name in tensors}

        def store(name: str, data: memoryview, position: int) -> None:
            hashes[name].update(data)
            _write_at(descriptor, data, position)

        def write(name: str, data: memoryview) -> None:
            nonlocal pending
            if pending is not None:
                pending.result()
            pending = background.submit(store, name, data, specs[name].start + written[name])
            written[name] += data.nbytes

        yield write
        if pending is not None:
            pending.result()
        _require_complete(specs, written)
        digests = {name: content.hexdigest() for name, content in hashes.items()}
        _write_at(descriptor, memoryview(_sealed(_header(path, manifest, tensors, digests, keys))), 0)


@contextlib.contextmanager
def write_plain(
    path: str | os.PathLike[str], tensors: Mapping[str, Spec], metadata: Mapping[str, str]
) -> Iterator[TensorWriter]:
    """Atomically writes a safetensors file that has no manifest and no seal.

    Args:
        path: The file to write.
        tensors: Dtype and shape of every tensor by name.
        metadata: The header's `__metadata__`.

    Yields:
        A function that appends bytes to a tensor.

    Raises:
        BundleError: If the file cannot be written.
        ValueError: If a tensor was not written completely.
    """
    header = _frame_header(path, tensors, metadata, [], "file")
    specs = tensor_offsets(tensors, start=len(header))
    with replace_atomically(path) as descriptor:
        written = dict.fromkeys(tensors, 0)

        def write(name: str, data: memoryview) -> None:
            _write_at(descriptor, data, specs[name].start + written[name])
            written[name] += data.nbytes

        _write_at(descriptor, memoryview(header), 0)
        yield write
        _require_complete(specs, written)


def _require_complete(specs: Mapping[str, TensorSpec], written: Mapping[str, int]) -> None:
    for name, spec in specs.items():
        if written[name] != spec.nbytes:
            raise ValueError(f"tensor {name!r}: expected {spec.nbytes} bytes, got {written[name]}")


def bundle_digest(
    manifest: SealedManifest, tensors: Mapping[str, Spec], digests: Mapping[str, str], keys: SealKeys = BUNDLE
) -> str:
    """Computes the digest that a sealed file would have, without writing it.

    Args:
        manifest: The manifest.
        tensors: Dtype and shape of every tensor by name.
        digests: SHA-256 of every tensor by name.
        keys: The kind of sealed file.

    Returns:
        The digest of the file.
    """
    return seal(_header(keys.kind, manifest, tensors, digests, keys))


def sealed_header(
    path: str | os.PathLike[str], manifest: Manifest, tensors: Mapping[str, Spec], digests: Mapping[str, str]
) -> bytes:
    """Returns the length prefix and the sealed header of a bundle, without writing the bundle.

    Args:
        path: The file, for error messages.
        manifest: The manifest.
        tensors: Dtype and shape of every tensor by name.
        digests: SHA-256 of every tensor by name.

    Raises:
        BundleError: If the manifest does not match the tensors, or the header would be too large.
    """
    check_consistency(Path(path), manifest, tensor_offsets(tensors))
    return _sealed(_header(path, manifest, tensors, digests, BUNDLE))


def _sealed(header: bytes) -> bytes:
    return header.replace(UNSEALED.encode(), seal(header).encode(), 1)


def bundle_size(manifest: Manifest, tensors: Mapping[str, Spec]) -> int:
    """Computes the size in bytes that a bundle would have. The values of the tensors are not needed.

    Args:
        manifest: The manifest.
        tensors: Dtype and shape of every tensor by name.
    """
    header = _header("bundle", manifest, tensors, dict.fromkeys(tensors, UNSEALED), BUNDLE)
    return max((spec.stop for spec in tensor_offsets(tensors, start=len(header)).values()), default=len(header))


@contextlib.contextmanager
def replace_atomically(path: str | os.PathLike[str]) -> Iterator[int]:
    """Writes a file atomically. The file appears under its name only when the context ends without an exception.

    Args:
        path: The file to write. An existing file is replaced and its permissions are kept.

    Yields:
        A file descriptor to write to.

    Raises:
        BundleError: If the file cannot be written. An existing file is left unchanged.
    """
    target = _target(path)
    prefix = f".{sha256(os.fsencode(target.name)).hexdigest()[:16]}"
    temporary = target.parent / f"{prefix}.{secrets.token_hex(8)}.partial"
    try:
        descriptor, is_named = _open_temporary(temporary)
        try:
            if target.exists():
                os.fchmod(descriptor, stat.S_IMODE(target.stat().st_mode))
            yield descriptor
            os.fsync(descriptor)
            if not is_named:
                _link(descriptor, temporary)
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
    _remove_abandoned(target.parent.glob(f"{prefix}.*.partial"))


def _target(path: str | os.PathLike[str]) -> Path:
    """Resolves symbolic links in a path and checks that a regular file can be written there."""
    if is_reference(path):
        problem, remedy = (
            "could not be written: it is on the Hub",
            "Write a local file, then upload it with kfacpack push",
        )
        raise BundleError(path, problem, None, remedy)
    try:
        target = Path(path).resolve()
        if target.is_symlink():  # since Python 3.13, resolve() raises no error for a loop of links
            raise RuntimeError(f"Symlink loop from {str(path)!r}")
        is_special = target.exists() and not target.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL, a deleted working directory
        raise BundleError(path, f"could not be written: {error}") from error
    if is_special or not target.name:
        raise BundleError(path, "could not be written: it is a directory or a special file, expected a regular file")
    return target


def _open_temporary(path: Path) -> tuple[int, bool]:
    """Opens a temporary file for writing. Returns its descriptor and whether the file already has the name `path`.

    If the system supports unnamed files, the file has no name until it is complete. A killed process then leaves no
    file behind, unless it is killed between linking and renaming.
    """
    if hasattr(os, "O_TMPFILE") and Path("/proc/self/fd").exists():
        with contextlib.suppress(OSError):
            # Either the file system lacks support, or the same error occurs again below and is reported there.
            return os.open(path.parent, os.O_TMPFILE | os.O_RDWR, 0o666), False
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666), True


def _link(descriptor: int, path: Path) -> None:
    """Links an unnamed temporary file to a path."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        # Only with a folder's descriptor does Python call linkat, which follows /proc's link to the unnamed file.
        os.link(f"/proc/self/fd/{descriptor}", path.name, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def _remove_abandoned(paths: Iterable[Path]) -> None:
    """Removes old temporary files that were left behind by interrupted attempts to write the same target."""
    for path in paths:
        with contextlib.suppress(OSError):  # another writer may have removed it in the meantime
            if time.time() - path.stat().st_ctime > ABANDONED_AFTER:
                path.unlink()


def _sync_folder(folder: Path) -> None:
    """Syncs a folder so that a rename in it survives a crash. Errors are ignored: not all file systems support this."""
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
    """Computes the positions of tensors in a file.

    Args:
        tensors: Dtype and shape of every tensor by name.
        start: Position of the first tensor in bytes.

    Returns:
        Dtype, shape and position of every tensor by name. Tensors with larger elements come first, so that each tensor
        is aligned to its element size without padding.
    """
    specs = {}
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -ITEM_BYTES[item[1][0]]):
        stop = start + prod(shape) * ITEM_BYTES[dtype]
        specs[name] = TensorSpec(dtype, shape, start, stop)
        start = stop
    return specs


def _header(
    path: str | os.PathLike[str],
    manifest: SealedManifest,
    tensors: Mapping[str, Spec],
    digests: Mapping[str, str],
    keys: SealKeys,
) -> bytes:
    """Returns the length prefix and the header of a sealed file, with zeros in place of the seal."""
    text = _compact_json(manifest.with_digests(digests).model_dump(mode="json", exclude_none=True))
    return _frame_header(path, tensors, {keys.seal: UNSEALED, keys.manifest: text}, [text], keys.kind)


def _frame_header(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Spec],
    metadata: Mapping[str, str],
    texts: Iterable[str],
    kind: str,
) -> bytes:
    """Returns the length prefix and the header, after checking that the header is within the limits for headers.

    The header is padded to a multiple of eight bytes. The limit on the number of JSON values also applies to each of
    `texts`, the JSON documents in the metadata.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    for name, spec in tensor_offsets(tensors).items():
        offsets = [spec.start, spec.stop]
        entries[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
    body = _compact_json(entries).encode("ascii")
    body += b" " * (-len(body) % 8)
    values = max(map(json_value_bound, (body, *(text.encode() for text in texts))))
    if len(body) > MAX_HEADER_BYTES or values > MAX_JSON_VALUES:
        size = f"{len(body)} bytes and {values} JSON values"
        limits = f"{MAX_HEADER_BYTES} bytes and {MAX_JSON_VALUES} JSON values"
        problem = f"its header would have {size}, but at most {limits} are allowed"
        raise BundleError(path, problem, None, f"Split the content into several {kind}s")
    return len(body).to_bytes(8, "little") + body


def _compact_json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a small file atomically. If the process dies, the old file is left intact.

    Args:
        path: The file to write.
        data: Content of the file.

    Raises:
        BundleError: If the file cannot be written.
    """
    with replace_atomically(path) as descriptor, os.fdopen(descriptor, "wb", closefd=False) as stream:
        stream.write(data)
