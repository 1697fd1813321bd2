"""`kp.push`: verifies bundles and task vectors and uploads them to the Hub, with a model card."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha1
from pathlib import Path
from typing import TYPE_CHECKING

from kfacpack.errors import HubError, KfacpackError, printable
from kfacpack.format.bundle_index import files_of
from kfacpack.format.container import first_duplicate
from kfacpack.format.hub_client import digest_of_file, hub_api, hub_errors, local_copy
from kfacpack.format.reference import is_reference
from kfacpack.hub.artifacts import SUFFIXES, Artifact
from kfacpack.hub.card import card_for
from kfacpack.hub.repository import HubRepository, RepositoryFile, inspect_repository, parse_repository

if TYPE_CHECKING:
    from kfacpack.format.reader import CheckProgress


CARD = "README.md"
_SAFE_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")


@dataclass(frozen=True)
class PushedFile:
    """One file of a push."""

    item: Artifact
    unchanged: bool
    """Whether the repository already had the same bytes under this name."""


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
    """Whether the repository did not exist before."""
    commit: str | None
    """Id of the commit; None for a dry run, or if nothing had changed."""


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
    that an interrupted push can be repeated. Text of an existing card outside of the two marker comments is kept.

    Args:
        files: Paths of bundles and task vectors. The shards of a bundle are uploaded with its index.
        repository: Repository, `owner/repo`.
        private: Whether a newly created repository is private.
        revision: Branch to commit to; created if it does not exist. Defaults to the main branch.
        message: Commit message. Defaults to the names of the uploaded files.
        license: License identifier of the Hub for the card's metadata.
        base_model: Hub id of the base model for the card's metadata.
        dry_run: Whether to prepare everything without uploading.
        on_progress: Called as the verification advances.

    Returns:
        The files, the card and the commit.

    Raises:
        KfacpackError: If there are no files, or if their names are not usable.
        BundleError: If a file is neither a bundle nor a task vector.
        VerificationError: If a check on a file fails.
        HubError: If the repository cannot be read or written.

    Example:
        >>> kp.push(["cars.kfac", "cars.safetensors"], "owner/repo", license="apache-2.0")
    """
    name, at = parse_repository(repository)
    if at:
        raise HubError(repository, "a push takes no @revision", "Pass the repository alone, and a branch as revision")
    paths = [files] if isinstance(files, str | os.PathLike) else list(files)
    items = [(path, _open_artifact(path)) for path in paths]
    if not items:
        raise KfacpackError("nothing to push: expected at least one file")
    if duplicate := first_duplicate(item.name for _, item in items):
        raise KfacpackError(f"two files have the name {duplicate}, which must be unique in a repository; rename one")
    for path, item in items:
        item.require_valid(path, on_progress)
    existing, branch_missing = _inspect_target(name, revision)
    if private and existing and not existing.private:
        raise HubError(name, "is a public repository; only new ones can be made private here", "Change its settings")
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
        problem = f"the file name is part of a URL; expected letters, digits and -_.+, ending in {endings}"
        raise KfacpackError(f"{printable(os.fspath(path))}: {problem}. Rename it")
    return Artifact.of(path, name)


def _inspect_target(name: str, revision: str | None) -> tuple[HubRepository | None, bool]:
    """Returns the repository, if it exists, and whether the branch is missing."""
    try:
        return inspect_repository(name, revision, missing_ok=True), False
    except HubError as error:
        from huggingface_hub.errors import RevisionNotFoundError

        if revision is None or not isinstance(error.__cause__, RevisionNotFoundError):
            raise
        # A new branch starts from main.
        return inspect_repository(name, None, missing_ok=True), True


def _is_unchanged(path: Path, stored: RepositoryFile | None) -> bool:
    """Returns whether the Hub has the same bytes.

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
    """Returns the bundles and task vectors that the repository will contain, by name."""
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
    """Validates the card with the Hub's own rules.

    Before huggingface_hub 2.2, `ModelCard.validate` sends this request to huggingface.co even if HF_ENDPOINT is set.
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
    """Extracts the messages from the Hub's answer, which is JSON or plain text."""
    try:
        return "; ".join(error["message"] for error in json.loads(answer)["errors"])
    except (ValueError, KeyError, TypeError):
        return " ".join(answer.split())
