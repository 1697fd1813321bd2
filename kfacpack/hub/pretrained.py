"""`from_pretrained`, `save_pretrained` and `push_to_hub` of curvatures and task vectors.

The functions follow the conventions of huggingface_hub: a source is a local directory or a repository id, and an
artifact is stored under a default file name, `curvature.kfac` or `vector.safetensors`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from kfacpack.curvature.curvature import Curvature, load
from kfacpack.errors import BundleError, HubError, KfacpackError, printable
from kfacpack.format.reference import Reference, is_reference, parse_address
from kfacpack.hub.artifacts import SUFFIXES, Artifact
from kfacpack.hub.push import PushResult, push
from kfacpack.hub.repository import inspect_repository, parse_repository
from kfacpack.vectors.task_vector import TaskVector

T = TypeVar("T")


@dataclass(frozen=True)
class PretrainedFormat:
    """How one class of artifact is stored in a directory or repository."""

    kind: Literal["bundle", "vector"]
    filename: str
    """Default file name."""
    load: Callable[[str | os.PathLike[str]], Any]


_FORMATS: dict[type, PretrainedFormat] = {
    Curvature: PretrainedFormat("bundle", "curvature.kfac", load),
    TaskVector: PretrainedFormat("vector", "vector.safetensors", TaskVector.load),
}


def save_pretrained(
    artifact: Curvature | TaskVector, directory: str | os.PathLike[str], *, filename: str | None = None
) -> Path:
    """Saves an artifact to a directory, which is created if it does not exist.

    Args:
        artifact: The curvature or task vector to save.
        directory: Target directory.
        filename: Name of the file in the directory. Defaults to `curvature.kfac` or `vector.safetensors`.

    Returns:
        The path of the file.

    Raises:
        KfacpackError: If `directory` is an existing file, or `filename` contains a path separator.
    """
    folder = Path(directory)
    if folder.exists() and not folder.is_dir():
        raise KfacpackError(f"{printable(str(folder))}: expected a directory, got a file")
    name = _filename(type(artifact), filename)
    folder.mkdir(parents=True, exist_ok=True)
    artifact.save(folder / name)
    return folder / name


def push_to_hub(
    artifact: Curvature | TaskVector,
    repo_id: str,
    *,
    filename: str | None = None,
    revision: str | None = None,
    private: bool = False,
    commit_message: str | None = None,
    license: str | None = None,
    base_model: str | None = None,
) -> PushResult:
    """Uploads an artifact and a model card to a repository on the Hub, which is created if it does not exist.

    Args:
        artifact: The curvature or task vector to upload.
        repo_id: Repository, `owner/repo`.
        filename: Name of the file in the repository. Defaults to `curvature.kfac` or `vector.safetensors`.
        revision: Branch to commit to; created if it does not exist. Defaults to the main branch.
        private: Whether a newly created repository is private.
        commit_message: Commit message. Defaults to the names of the uploaded files.
        license: License identifier for the card's metadata.
        base_model: Hub id of the base model for the card's metadata.

    Returns:
        A description of the upload, including the commit id.

    Raises:
        HubError: If the repository cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="kfacpack-push-") as directory:
        path = save_pretrained(artifact, directory, filename=filename)
        return push(
            path,
            repo_id,
            private=private,
            revision=revision,
            message=commit_message,
            license=license,
            base_model=base_model,
        )


def from_pretrained(
    cls: type[T], source: str | os.PathLike[str], revision: str | None = None, filename: str | None = None
) -> T:
    """Loads an artifact from a local file or directory, or from the Hub.

    Args:
        cls: `Curvature` or `TaskVector`.
        source: A local directory or file, a repository (`owner/repo`, `owner/repo@revision`), or a file in a repository
            (`hf://owner/repo@revision/file`). An existing local path takes precedence over a repository.
        revision: Branch, tag or commit of the repository. Defaults to the main branch.
        filename: Name of the file in the directory or repository. Defaults to `curvature.kfac` or
            `vector.safetensors`; if there is no such file, to the only file of this kind.

    Returns:
        The artifact. Its tensors are read when they are used.

    Raises:
        KfacpackError: If the source does not exist, or if it contains no file of this kind, or several.
        HubError: If the repository cannot be read.
    """
    storage = _format_of(cls)
    load_from = _load_local if not is_reference(source) and Path(source).exists() else _load_from_hub
    artifact: T = load_from(os.fspath(source), revision, filename, storage)
    return artifact


def _load_local(source: str, revision: str | None, filename: str | None, storage: PretrainedFormat) -> Any:
    path = Path(source)
    if revision is not None:
        raise KfacpackError(f"{printable(source)}: is a local path, which has no revision {revision!r}")
    if path.is_dir():
        return storage.load(path / (filename or _find_local(path, storage)))
    if filename is not None:
        raise KfacpackError(f"{printable(source)}: is a file; pass its directory, or leave out filename")
    return storage.load(path)


def _load_from_hub(source: str, revision: str | None, filename: str | None, storage: PretrainedFormat) -> Any:
    address = parse_address(source)
    if address and address.path:
        if filename is not None:
            raise KfacpackError(f"{printable(source)}: names a file; pass the repository, or leave out filename")
        reference = Reference.parse(source)
        return storage.load(replace(reference, revision=_one_revision(source, reference.revision, revision)))
    try:
        repository, own_revision = parse_repository(source)
    except HubError as error:
        expected = "an existing file or directory, owner/repo, or hf://owner/repo@revision/file"
        raise KfacpackError(f"{printable(source)}: no such file or repository; expected {expected}") from error
    revision = _one_revision(source, own_revision, revision)
    if filename is not None:
        return storage.load(Reference(repository, filename, revision))
    # The default name is tried first: it needs no listing, and is found in the cache without a network.
    try:
        return storage.load(Reference(repository, storage.filename, revision))
    except HubError as error:
        from huggingface_hub.errors import EntryNotFoundError

        if error.unreachable or not isinstance(error.__cause__, EntryNotFoundError):
            raise
    listing = inspect_repository(repository, revision)
    artifacts = ((file.name, listing.item(file.name)) for file in listing.candidates)
    names = [name for name, artifact in artifacts if artifact is not None and artifact.kind == storage.kind]
    return storage.load(Reference(repository, _only(names, source, storage), revision))


def _find_local(directory: Path, storage: PretrainedFormat) -> str:
    """Returns the name of the default file, or of the only file of this kind in a directory."""
    if (directory / storage.filename).is_file():
        return storage.filename
    files = sorted(file.name for file in directory.iterdir() if file.name.endswith(SUFFIXES) and file.is_file())
    return _only([name for name in files if _kind(directory / name) == storage.kind], str(directory), storage)


def _kind(path: Path) -> str | None:
    try:
        return Artifact.of(path, path.name).kind
    except BundleError:
        return None


def _only(names: Sequence[str], source: str, storage: PretrainedFormat) -> str:
    if len(names) == 1:
        return names[0]
    what = {"bundle": "curvature", "vector": "task vector"}[storage.kind]
    if not names:
        raise KfacpackError(f"{printable(source)}: contains no {what}; expected {storage.filename}")
    listed = printable(", ".join(names))
    raise KfacpackError(f"{printable(source)}: contains {len(names)} {what} files; pass filename, one of {listed}")


def _one_revision(source: str, first: str | None, second: str | None) -> str | None:
    if first is not None and second is not None and first != second:
        raise KfacpackError(f"{printable(source)}: names revision {first!r}, but revision={second!r} was passed")
    return first if second is None else second


def _filename(cls: type, filename: str | None) -> str:
    if filename is None:
        return _format_of(cls).filename
    if Path(filename).name != filename:
        raise KfacpackError(f"filename {filename!r}: expected a file name without directories")
    return filename


def _format_of(cls: type) -> PretrainedFormat:
    return next(_FORMATS[base] for base in cls.__mro__ if base in _FORMATS)
