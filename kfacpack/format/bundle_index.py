"""Bundles that are stored in several files: an index, `NAME.kfac.index.json`, and shards.

Each shard is itself a bundle that contains some of the blocks. The index lists the shards with their digests and
contains the header that the bundle would have as a single file. A bundle therefore has the same manifest and the same
digest whether it is stored in one file or in several. The index is written after all shards and then renamed into
place. The name of each shard contains the beginning of its digest, so that a new bundle does not overwrite the shards
of an old one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from kfacpack.errors import BundleError, HubError
from kfacpack.format.container import (
    MAX_HEADER_BYTES,
    SEAL_KEY,
    Container,
    TensorSpec,
    download_again,
    header_entries,
    parse_json,
    short_repr,
    tensor_specs,
)
from kfacpack.format.hub_client import commit_of_copy, local_copy
from kfacpack.format.reference import FileLocation, Reference, locate
from kfacpack.format.writer import write_atomically

INDEX_SUFFIX = ".kfac.index.json"
SHARD_SUFFIX = ".kfac.shard"
INDEX_VERSION = "1.3"
MAX_INDEX_BYTES = 4 * MAX_HEADER_BYTES
"""Maximum size of an index in bytes.

An index may be larger than a header because it contains a header as a JSON string with escaped quotes.
"""


class ShardEntry(NamedTuple):
    """A shard's entry in an index."""

    file: str
    """File name of the shard, which is in the same folder as the index."""
    nbytes: int
    """Size of the shard in bytes."""
    sha256: str
    """The seal of the shard: a SHA-256 digest that identifies its content."""


def is_index(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path ends with the suffix of an index, `.kfac.index.json`."""
    return os.fspath(path).endswith(INDEX_SUFFIX)


def open_container(path: str | os.PathLike[str]) -> Container:
    """Opens a safetensors file, or a bundle that is stored in several files.

    Args:
        path: A path or an `hf://` reference. For a bundle in several files, the path or reference of its index.

    Raises:
        BundleError: If a file cannot be read or is invalid.
        HubError: If a reference cannot be fetched.
    """
    location = locate(path)
    if is_index(location):
        return ShardedContainer(location)
    if isinstance(location, Path) and not location.exists() and (index := index_path(location)).is_file():
        raise BundleError(path, "no such file", None, f"The bundle is stored in several files: pass its index, {index}")
    return Container(location)


def index_path(path: Path) -> Path:
    """Returns the path of a bundle's index, given the path that the bundle would have as a single file."""
    return path.with_name(path.name.removesuffix(".kfac") + INDEX_SUFFIX)


class ShardedContainer(Container):
    """A bundle that is stored in several files and is read like a single file.

    Args:
        path: Location of the index. If this is a reference with `header_only` set, the shards are not opened.

    Raises:
        BundleError: If the index is invalid, or if a shard is missing, damaged or part of another bundle.
        HubError: If a file on the Hub cannot be fetched.
    """

    def __init__(self, path: FileLocation):
        self.path = path
        local = local_copy(replace(path, header_only=False)) if isinstance(path, Reference) else path
        self.commit = commit_of_copy(path, local) if isinstance(path, Reference) else None
        index = read_index(path, local)
        text = index["header"].encode("utf-8", "replace")
        self.header = len(text).to_bytes(8, "little") + text
        self._entries, self.metadata = header_entries(path, self.header)
        self.shards = shards_of(path, index)
        self.nbytes = sum(shard.nbytes for shard in self.shards)
        self._containers: dict[str, Container] = {}
        self._header_only = isinstance(path, Reference) and path.header_only
        if not self._header_only:
            for shard in self.shards:
                container = self._open(shard)
                self._containers.update(dict.fromkeys(container.tensors, container))

    def _open(self, shard: ShardEntry) -> Container:
        try:
            container = Container(self.location(shard))
        except (BundleError, HubError) as error:
            problem = f"the shard {shard.file} cannot be opened: {error.problem}"
            remedy = f"Put all shards of the bundle ({len(self.shards)} in total) into the same folder as the index"
            if isinstance(error, HubError):
                remedy = error.remedy
            elif error.remedy:  # the shard exists, but is damaged
                remedy = download_again(self.path)
            raise BundleError(self.path, problem, None, remedy) from error
        if container.nbytes != shard.nbytes or container.metadata.get(SEAL_KEY) != shard.sha256:
            digest = container.metadata.get(SEAL_KEY)
            expected = f"expected {shard.nbytes} bytes and digest {shard.sha256[:16]}"
            found = f"got {container.nbytes} bytes and {f'digest {digest[:16]}' if digest else 'no digest'}"
            problem = f"the shard {shard.file} belongs to another bundle or is damaged: {expected}, {found}"
            raise BundleError(self.path, problem, None, download_again(self.path))
        return container

    def location(self, shard: ShardEntry) -> FileLocation:
        """Returns the location of a shard, which is in the same folder as the index."""
        return _beside(self.path, shard.file, self.commit)

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """The dtype and shape of each tensor, and its position in a shard, by name.

        If the shards have not been opened, the positions are those that the tensors would have in a single file.
        """
        end = max((entry["data_offsets"][1] for entry in self._entries.values() if _has_offsets(entry)), default=0)
        specs = tensor_specs(self.path, self._entries, len(self.header), len(self.header) + end)
        if self._header_only:
            return specs
        if unlisted := self._containers.keys() - specs.keys():
            problem = f"a shard contains the tensor {min(unlisted)!r}, which the header in the index does not list"
            raise BundleError(self.path, problem)
        stored = {}
        for name, spec in specs.items():
            if name not in self._containers:
                raise BundleError(self.path, "is in none of the shards", f"tensor {name!r}", download_again(self.path))
            stored[name] = self._containers[name].tensors[name]
            if (stored[name].dtype, stored[name].shape) != (spec.dtype, spec.shape):
                found = f"has dtype {stored[name].dtype} and shape {list(stored[name].shape)} in its shard"
                raise BundleError(
                    self.path, f"{found}, expected {spec.dtype} and {list(spec.shape)}", f"tensor {name!r}"
                )
        return stored

    def bytes_of(self, name: str) -> memoryview:
        """Maps a tensor's bytes into memory; see `Container.bytes_of`."""
        return self._containers[name].bytes_of(name)

    def read(self, name: str, start: int, stop: int) -> bytearray:
        """Returns a copy of part of a tensor's bytes; see `Container.read`."""
        return self._containers[name].read(name, start, stop)

    def file_digest(self) -> str:
        """Returns the digest of the bundle, which covers all of its files."""
        return self.metadata[SEAL_KEY]


def files_of(path: str | os.PathLike[str]) -> list[FileLocation]:
    """Returns the locations of all files that make up a bundle or task vector. If there is an index, it comes last.

    Args:
        path: A path or an `hf://` reference.

    Raises:
        BundleError: If an index is invalid.
        HubError: If an index cannot be fetched.
    """
    location = locate(path)
    if not is_index(location):
        return [location]
    local = local_copy(replace(location, header_only=False)) if isinstance(location, Reference) else location
    commit = commit_of_copy(location, local) if isinstance(location, Reference) else None
    shards = shards_of(location, read_index(location, local))
    return [*(_beside(location, shard.file, commit) for shard in shards), location]


def _beside(index: FileLocation, file: str, commit: str | None) -> FileLocation:
    """Returns the location of a file in the same folder as an index.

    On the Hub, the location has the revision `commit` or, if that is None, the revision of the index.
    """
    if not isinstance(index, Reference):
        return index.with_name(file)
    folder = index.file.rpartition("/")[0]
    name = f"{folder}/{file}" if folder else file
    return replace(index, file=name, revision=commit or index.revision, header_only=False)


def _has_offsets(entry: Any) -> bool:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    return isinstance(offsets, list) and len(offsets) == 2 and type(offsets[1]) is int


def read_index(path: FileLocation, local: Path) -> dict[str, Any]:
    """Reads an index and checks its version and header.

    Args:
        path: Location of the index, for error messages.
        local: Path of the index on the local disk.

    Returns:
        The content of the index.

    Raises:
        BundleError: If the file cannot be read or is not a valid index.
    """
    try:
        with local.open("rb") as stream:
            text = stream.read(MAX_INDEX_BYTES + 1)
    except OSError as error:
        raise BundleError(path, error.strerror or str(error)) from error
    if len(text) > MAX_INDEX_BYTES:
        raise BundleError(path, f"is larger than {MAX_INDEX_BYTES} bytes, the maximum size of an index")
    index = parse_json(path, text, "index")
    version = index.get("version")
    if not isinstance(version, str) or version.partition(".")[0] != INDEX_VERSION.partition(".")[0]:
        problem = f"unsupported index version {short_repr(version)}, expected 1.x"
        raise BundleError(path, problem, "index: version", "Upgrade kfacpack to read this file")
    if not isinstance(index.get("header"), str) or not index["header"].startswith("{"):
        raise BundleError(
            path, "is not a string that contains the header of a bundle", "index: header", download_again(path)
        )
    return index


def shards_of(path: FileLocation, index: dict[str, Any]) -> tuple[ShardEntry, ...]:
    """Returns the shards that an index lists.

    Args:
        path: Location of the index, for error messages.
        index: Content of the index.

    Raises:
        BundleError: If the list of shards is missing or empty, or if an entry is invalid.
    """
    entries = index.get("shards")
    if not isinstance(entries, list) or not entries:
        problem = f"expected a list of at least one shard, got {str(entries)[:80]}"
        raise BundleError(path, problem, "index: shards", download_again(path))
    shards = []
    for entry in entries:
        file, nbytes, digest = (
            entry.get(key) if isinstance(entry, dict) else None for key in ("file", "bytes", "sha256")
        )
        plain = isinstance(file, str) and file.isprintable() and not set(file) & set("/\\") and file.strip(".")
        if not plain or type(nbytes) is not int or not isinstance(digest, str) or len(digest) != 64:
            expected = "expected the keys 'file' (a file name without a folder), 'bytes' and 'sha256'"
            problem = f"{expected}, got {str(entry)[:80]}"
            raise BundleError(path, problem, "index: shards", download_again(path))
        shards.append(ShardEntry(str(file), nbytes, digest))
    return tuple(shards)


def write_index(path: Path, header: bytes, parts: list[tuple[Path, str]]) -> None:
    """Stores bundles as shards and writes their index atomically.

    An existing index with the same path is replaced. Shards that only the old index lists are removed.

    Args:
        path: The index to write.
        header: The length prefix and the sealed header that the bundle would have as a single file.
        parts: Paths and digests of the bundles to store as shards, in the order of the index. The files are linked or
            copied.

    Raises:
        BundleError: If a file cannot be written.
    """
    old: set[str] = set()
    stem, shards = path.name.removesuffix(INDEX_SUFFIX), []
    # An index from an untrusted source may list any file. Therefore only files named as below are removed.
    own_name = re.compile(rf"{re.escape(stem)}-\d{{5}}-of-\d{{5}}-[0-9a-f]{{8}}{re.escape(SHARD_SUFFIX)}")
    with suppress(BundleError):
        old = {shard.file for shard in shards_of(path, read_index(path, path)) if own_name.fullmatch(shard.file)}
    new: list[Path] = []
    try:
        for number, (part, digest) in enumerate(parts, start=1):
            name = f"{stem}-{number:05d}-of-{len(parts):05d}-{digest[:8]}{SHARD_SUFFIX}"
            nbytes = part.stat().st_size
            if not (shard := path.with_name(name)).exists():
                new.append(shard)
            _link_or_copy(part, shard)
            shards.append({"file": name, "bytes": nbytes, "sha256": digest})
        index = {"version": INDEX_VERSION, "header": header[8:].decode(), "shards": shards}
        write_atomically(path, json.dumps(index, indent=1).encode())
    except BaseException as error:
        for shard in new:
            shard.unlink(missing_ok=True)
        if isinstance(error, OSError):
            problem = f"a shard could not be written: {error.strerror or error}"
            raise BundleError(path, problem, None, "Nothing was changed") from error
        raise
    for name in old - {shard["file"] for shard in shards}:
        path.with_name(name).unlink(missing_ok=True)


def _link_or_copy(source: Path, target: Path) -> None:
    """Creates a hard link to a file, or a copy if links are not supported.

    An existing target is replaced. Its name contains its digest, so it should already have the same content.
    """
    temporary = target.with_name(f".{target.name}.partial")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:  # another file system, or one without hard links
        try:
            shutil.copyfile(source, temporary)
        except BaseException:  # for example, because the disk is full
            temporary.unlink(missing_ok=True)
            raise
    temporary.replace(target)
