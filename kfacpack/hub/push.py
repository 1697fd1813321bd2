"""Uploads to and downloads from the Hub: `kp.push`, `from_pretrained`, `save_pretrained` and `push_to_hub`.

`push` verifies bundles and task vectors and uploads them with a model card. The other functions implement the methods
of `Curvature` and `TaskVector` that have the same names.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha1
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from kfacpack.curvature.curvature import Curvature, load
from kfacpack.errors import BundleError, HubError, KfacpackError, printable
from kfacpack.format.bundle_index import files_of
from kfacpack.format.container import first_duplicate
from kfacpack.format.hub_client import digest_of_file, hub_api, hub_errors, local_copy
from kfacpack.format.reference import Reference, is_reference, parse_address
from kfacpack.hub.card import card_for
from kfacpack.hub.repository import (
    SUFFIXES,
    Artifact,
    HubRepository,
    RepositoryFile,
    inspect_repository,
    parse_repository,
)
from kfacpack.vectors.task_vector import TaskVector

if TYPE_CHECKING:
    from kfacpack.format.reader import CheckProgress


CARD = "README.md"
_SAFE_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")


@dataclass(frozen=True)
class PushedFile:
    """A file that was passed to `push`. Unchanged files are not uploaded."""

    item: Artifact
    unchanged: bool
    """Whether the repository already contained a file with the same name and content."""


@dataclass(frozen=True)
class PushResult:
    """The result of a push, or of a dry run."""

    repository: str
    revision: str | None
    files: tuple[PushedFile, ...]
    card: str
    """Text of the model card."""
    card_changed: bool
    creates: bool
    """Whether the push creates the repository."""
    commit: str | None
    """Id of the new commit; None for a dry run, or if there was nothing to upload."""


def push(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    repository: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    license: str | None = None,
    base_model: str | None = None,
    dry_run: bool = False,
    on_progress: CheckProgress = lambda check, done, total: None,
) -> PushResult:
    """Verifies files and uploads them with a model card in one commit.

    The repository is created if it does not exist. Files that the repository already has are not uploaded again, so
    that an interrupted push can be repeated. If a card exists, its text outside the generated part is kept.

    Args:
        files: Paths of bundles and task vectors. The shards of a bundle are uploaded with its index.
        repository: Name of the repository, `owner/repo`.
        private: Whether a newly created repository is private.
        revision: Branch to commit to; created if it does not exist. Defaults to the main branch.
        message: Commit message. Defaults to a message that lists the uploaded files.
        license: License identifier for the card's metadata, in the Hub's notation.
        base_model: Hub id of the base model for the card's metadata.
        dry_run: Whether to verify the files and create the card without uploading anything.
        on_progress: Called with the name of a check, the number of checked items and the total number of items.

    Returns:
        The files, the model card and the id of the commit.

    Raises:
        KfacpackError: If there are no files, or if their names are invalid or not unique.
        BundleError: If a file is neither a bundle nor a task vector.
        VerificationError: If a check on a file fails.
        HubError: If the repository cannot be read or written.

    Example:
        >>> kp.push(["cars.kfac", "cars.safetensors"], "owner/repo", license="apache-2.0")
    """
    name, at = parse_repository(repository)
    if at:
        remedy = "Pass the repository without @revision, and pass the branch as revision (--revision)"
        raise HubError(repository, "the repository name contains @revision, which a push does not accept", remedy)
    paths = [files] if isinstance(files, str | os.PathLike) else list(files)
    items = [(path, _open_artifact(path)) for path in paths]
    if not items:
        raise KfacpackError("nothing to push: expected at least one file")
    if duplicate := first_duplicate(item.name for _, item in items):
        problem = f"two files have the name {duplicate}, but names must be unique in a repository"
        raise KfacpackError(f"{problem}; rename one of them")
    for path, item in items:
        item.require_valid(path, on_progress)
    existing, branch_missing = _inspect_target(name, revision)
    if private and existing and not existing.private:
        problem = "is a public repository; the option `private` applies only to new repositories"
        raise HubError(name, problem, "Change the visibility in the repository's settings on the Hub")
    stored = {file.name: file for file in existing.files} if existing else {}
    pushed = tuple(PushedFile(item, _is_unchanged(Path(path), stored.get(item.name))) for path, item in items)
    old_card = _existing_card(existing)
    card = card_for(
        name,
        _all_items(existing, [item for _, item in items]),
        old_card,
        revision=revision,
        license=license,
        base_model=base_model,
    )
    planned = PushResult(name, revision, pushed, card, card != old_card, existing is None, None)
    unchanged = not planned.card_changed and all(file.unchanged for file in pushed)
    if dry_run or (existing and unchanged and not branch_missing):
        return planned
    commit = _upload(planned, [path for path, _ in items], existing, private, branch_missing, message)
    return replace(planned, commit=commit)


def _open_artifact(path: str | os.PathLike[str]) -> Artifact:
    if is_reference(path):
        raise KfacpackError(f"{os.fspath(path)}: is already on the Hub; expected a local file")
    name = Path(path).name
    if not _SAFE_NAME.fullmatch(name) or not name.endswith(SUFFIXES):
        endings = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        expected = "expected an ASCII letter or digit, followed only by letters, digits and -_.+"
        problem = f"invalid file name; {expected}, and the ending {endings}"
        raise KfacpackError(f"{printable(os.fspath(path))}: {problem}. Rename the file")
    return Artifact.of(path, name)


def _inspect_target(name: str, revision: str | None) -> tuple[HubRepository | None, bool]:
    """Returns the repository, or None if it does not exist, and whether the branch `revision` is missing."""
    try:
        return inspect_repository(name, revision, missing_ok=True), False
    except HubError as error:
        from huggingface_hub.errors import RevisionNotFoundError

        if revision is None or not isinstance(error.__cause__, RevisionNotFoundError):
            raise
        # A new branch starts from main.
        return inspect_repository(name, None, missing_ok=True), True


def _is_unchanged(path: Path, stored: RepositoryFile | None) -> bool:
    """Returns whether a local file has the same bytes as the file on the Hub.

    The Hub records the SHA-256 of large files and git's blob id of small ones.
    """
    if stored is None or stored.nbytes != path.stat().st_size:
        return False
    if stored.sha256:
        return digest_of_file(path) == stored.sha256
    data = path.read_bytes()
    return sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest() == stored.git


def _existing_card(repository: HubRepository | None) -> str | None:
    if repository is None or all(file.name != CARD for file in repository.files):
        return None
    # Read as bytes to preserve the user's line endings.
    return local_copy(repository.reference(CARD)).read_bytes().decode("utf-8-sig", "replace")


def _all_items(repository: HubRepository | None, new: Sequence[Artifact]) -> list[Artifact]:
    """Returns the bundles and task vectors that the repository will contain, sorted by name."""
    names = {item.name for item in new}
    existing = (
        [repository.item(file.name) for file in repository.candidates if file.name not in names] if repository else []
    )
    return sorted([*new, *filter(None, existing)], key=lambda item: item.name)


def _upload(
    planned: PushResult,
    paths: Sequence[str | os.PathLike[str]],
    repository: HubRepository | None,
    private: bool,
    branch_missing: bool,
    message: str | None,
) -> str:
    """Creates the repository and branch if necessary, commits, and returns the commit id."""
    from huggingface_hub import CommitOperationAdd

    name, revision = planned.repository, planned.revision
    new = [(path, file.item) for path, file in zip(paths, planned.files, strict=True) if not file.unchanged]
    operations = [CommitOperationAdd(Path(file).name, os.fspath(file)) for path, _ in new for file in files_of(path)]
    if planned.card_changed:
        operations.append(CommitOperationAdd(CARD, planned.card.encode()))
    message = message or (f"Add {', '.join(item.name for _, item in new)}" if new else "Update the model card")
    with hub_errors(name, name, revision):
        if planned.card_changed:
            _validate(name, planned.card)  # before anything is created
        hub = hub_api()
        if repository is None:
            hub.create_repo(name, private=private)
        if revision and (branch_missing or (repository is None and revision != "main")):
            hub.create_branch(name, branch=revision, exist_ok=True)
        # The parent is the inspected commit, so that concurrent changes are not overwritten.
        parent = repository.commit if repository and not branch_missing else None
        commit = hub.create_commit(name, operations, commit_message=message, revision=revision, parent_commit=parent)
    return commit.oid


def _validate(name: str, card: str) -> None:
    """Sends the card to the Hub for validation, and raises an error if the Hub rejects it.

    `ModelCard.validate` is not used, because versions of huggingface_hub before 2.2 send the card to huggingface.co
    even if HF_ENDPOINT names another server.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session, hf_raise_for_status

    url, body = f"{constants.ENDPOINT}/api/validate-yaml", {"repoType": "model", "content": card}
    response = get_session().post(url, json=body, headers={"Accept": "text/plain"})
    if response.status_code == 400:
        problem = f"the Hub rejects the card: {_rejection(response.text)}"
        raise HubError(name, problem, "Nothing was uploaded. Check the license and the base model")
    hf_raise_for_status(response)


def _rejection(answer: str) -> str:
    """Extracts the error messages from the Hub's response, which is JSON or plain text."""
    try:
        return "; ".join(error["message"] for error in json.loads(answer)["errors"])
    except (ValueError, KeyError, TypeError):
        return " ".join(answer.split())


T = TypeVar("T")


@dataclass(frozen=True)
class PretrainedFormat:
    """The default file name and the load function for one kind of artifact (curvatures or task vectors)."""

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
    """Uploads an artifact and a model card to a Hub repository, which is created if it does not exist.

    Args:
        artifact: The curvature or task vector to upload.
        repo_id: Name of the repository, `owner/repo`.
        filename: Name of the file in the repository. Defaults to `curvature.kfac` or `vector.safetensors`.
        revision: Branch to commit to; created if it does not exist. Defaults to the main branch.
        private: Whether a newly created repository is private.
        commit_message: Commit message. Defaults to a message that lists the uploaded files.
        license: License identifier for the card's metadata.
        base_model: Hub id of the base model for the card's metadata.

    Returns:
        The files, the model card and the id of the commit.

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
            `vector.safetensors`. If this default file does not exist, the only suitable file is loaded.

    Returns:
        The artifact. Its tensors are read when they are first used.

    Raises:
        KfacpackError: If the source does not exist or contains no suitable file, or if several files are suitable.
        HubError: If the repository cannot be read.
    """
    storage = _format_of(cls)
    load_from = _load_local if not is_reference(source) and Path(source).exists() else _load_from_hub
    artifact: T = load_from(os.fspath(source), revision, filename, storage)
    return artifact


def _load_local(source: str, revision: str | None, filename: str | None, storage: PretrainedFormat) -> Any:
    path = Path(source)
    if revision is not None:
        raise KfacpackError(
            f"{printable(source)}: is a local path, so revision {revision!r} does not apply; omit revision"
        )
    if path.is_dir():
        return storage.load(path / (filename or _find_local(path, storage)))
    if filename is not None:
        raise KfacpackError(f"{printable(source)}: is a file; pass its directory, or omit filename")
    return storage.load(path)


def _load_from_hub(source: str, revision: str | None, filename: str | None, storage: PretrainedFormat) -> Any:
    address = parse_address(source)
    if address and address.path:
        if filename is not None:
            raise KfacpackError(f"{printable(source)}: is the address of a file; pass the repository, or omit filename")
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
    # The default name is tried first. This requires no listing, and works offline if the file is in the cache.
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
    """Returns the default file name if this file exists, otherwise the name of the directory's only suitable file."""
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
        raise KfacpackError(f"{printable(source)}: contains no {what} file; expected a file such as {storage.filename}")
    listed = printable(", ".join(names))
    problem = f"contains {len(names)} {what} files"
    raise KfacpackError(f"{printable(source)}: {problem}; pass one of them as filename: {listed}")


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
