"""`kp.push`: bundles and task vectors to the Hub, verified first, with a card made of what they say of themselves."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha1
from pathlib import Path

from kfacpack.errors import HubError, KfacpackError, printable
from kfacpack.format.container import refuse_duplicate_keys
from kfacpack.format.hub_client import digest_of_file, hub_api, hub_errors, local_copy
from kfacpack.format.reference import is_reference
from kfacpack.hub.artifacts import SUFFIXES, Artifact, FileProgress
from kfacpack.hub.card import card_for
from kfacpack.hub.repository import HubRepository, RepositoryFile, inspect_repository, parse_repository

CARD = "README.md"
_SAFE = re.compile(r"[A-Za-z0-9][\w.+-]*")


@dataclass(frozen=True)
class PushedFile:
    item: Artifact
    there: bool
    """Whether the repository has had these very bytes under this name."""


@dataclass(frozen=True)
class PushResult:
    """What a push did, or, dry, would do."""

    repository: str
    revision: str | None
    files: tuple[PushedFile, ...]
    card: str
    card_changed: bool
    creates: bool
    """Whether the repository was not there before."""
    commit: str | None
    """None where there was nothing to do, or nothing was to be done."""


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
    progress: FileProgress = lambda check, done, total: None,
) -> PushResult:
    """Verify files, then publish them with their card in one commit; the repository is made if it is not there.

    `private`: of a repository that is made. `revision`: a branch, made if it is not there. `license` and `base_model`:
    for the card's metadata, in the Hub's words. What the repository has already is not sent again, so that a push that
    was cut off goes on where it was. The card's text outside our two comments stays. `dry_run` looks, and sends
    nothing.
    """
    name, at = parse_repository(repository)
    if at:
        raise HubError(repository, "a push goes to a branch", "Give the repository alone, and the branch as revision")
    paths = [files] if isinstance(files, str | os.PathLike) else list(files)
    items = [(path, _item(path)) for path in paths]
    if not items:
        raise KfacpackError("there is nothing to push: give at least one file")
    if twice := refuse_duplicate_keys(item.name for _, item in items):
        raise KfacpackError(f"two files are called {twice}, and would be one in the repository; rename one of them")
    for path, item in items:
        item.require_sound(path, progress)
    found, branch_missing = _inspect_target(name, revision)
    if private and found and not found.private:
        raise HubError(name, "is public already, and --private is for one that is made", "Change it in its settings")
    there = {file.name: file for file in found.files} if found else {}
    sent = tuple(PushedFile(item, _is_unchanged(Path(path), there.get(item.name))) for path, item in items)
    existing = _existing_card(found)
    card = card_for(
        name,
        _all_items(found, [item for _, item in items]),
        existing,
        revision=revision,
        license=license,
        base_model=base_model,
    )
    planned = PushResult(name, revision, sent, card, card != existing, found is None, None)
    if dry_run or (found and not planned.card_changed and all(each.there for each in sent) and not branch_missing):
        return planned
    commit = _send(planned, [path for path, _ in items], found, private, branch_missing, message)
    return PushResult(name, revision, sent, card, planned.card_changed, planned.creates, commit)


def _item(path: str | os.PathLike[str]) -> Artifact:
    if is_reference(path):
        raise KfacpackError(f"{os.fspath(path)}: is on the Hub already; a push takes files")
    file = Path(path).name
    if not _SAFE.fullmatch(file) or not file.endswith(SUFFIXES):
        problem = "expected letters, digits and -_.+, and .kfac or .safetensors at the end"
        raise KfacpackError(f"{printable(os.fspath(path))}: its name will be used in addresses; {problem}. Rename it")
    return Artifact.of(path, file)


def _inspect_target(name: str, revision: str | None) -> tuple[HubRepository | None, bool]:
    """The repository, if it is there, and whether the branch is not."""
    try:
        return inspect_repository(name, revision, missing_ok=True), False
    except HubError as error:
        from huggingface_hub.errors import RevisionNotFoundError

        if revision is None or not isinstance(error.__cause__, RevisionNotFoundError):
            raise
        # A branch begins as main is.
        return inspect_repository(name, None, missing_ok=True), True


def _is_unchanged(path: Path, stored: RepositoryFile | None) -> bool:
    """Whether the Hub has these very bytes: it knows large files by their SHA-256, small ones by git's own id."""
    if stored is None or stored.nbytes != path.stat().st_size:
        return False
    if stored.sha256:
        return digest_of_file(path) == stored.sha256
    data = path.read_bytes()
    return sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest() == stored.git


def _existing_card(found: HubRepository | None) -> str | None:
    if found is None or all(file.name != CARD for file in found.files):
        return None
    # As bytes, so that the user's line ends stay what they are.
    return local_copy(found.reference(CARD)).read_bytes().decode("utf-8-sig", "replace")


def _all_items(found: HubRepository | None, new: Sequence[Artifact]) -> list[Artifact]:
    """What the repository will hold: the new files, and those of ours that it has, by name."""
    names = {item.name for item in new}
    others = [found.item(file.name) for file in found.candidates if file.name not in names] if found else []
    return sorted([*new, *filter(None, others)], key=lambda item: item.name)


def _send(
    planned: PushResult,
    paths: Sequence[str | os.PathLike[str]],
    found: HubRepository | None,
    private: bool,
    branch_missing: bool,
    message: str | None,
) -> str:
    from huggingface_hub import CommitOperationAdd

    name, revision = planned.repository, planned.revision
    new = [(path, each.item) for path, each in zip(paths, planned.files, strict=True) if not each.there]
    operations = [CommitOperationAdd(item.name, os.fspath(path)) for path, item in new]
    if planned.card_changed:
        operations.append(CommitOperationAdd(CARD, planned.card.encode()))
    words = message or (f"Add {', '.join(item.name for _, item in new)}" if new else "Bring the card up to date")
    with hub_errors(name, name, revision):
        if planned.card_changed:
            _validate(name, planned.card)  # before anything is made
        hub = hub_api()
        if found is None:
            hub.create_repo(name, private=private)
        if revision and (branch_missing or (found is None and revision != "main")):
            hub.create_branch(name, branch=revision, exist_ok=True)
        # On the commit that was looked at, so that nobody else's files and words are lost.
        parent = found.commit if found and not branch_missing else None
        made = hub.create_commit(name, operations, commit_message=words, revision=revision, parent_commit=parent)
    return made.oid


def _validate(name: str, card: str) -> None:
    """By the Hub's own rules, which the Hub applies."""
    from huggingface_hub import ModelCard

    try:
        ModelCard(card).validate()
    except ValueError as error:
        raise HubError(
            name, f"the Hub refuses the card: {_commit_message(str(error))}", "Nothing was sent. See --license"
        ) from error


def _commit_message(answer: str) -> str:
    """The words in what the Hub answers, which is JSON or plain text."""
    try:
        return "; ".join(each["message"] for each in json.loads(answer)["errors"])
    except (ValueError, KeyError, TypeError):
        return " ".join(answer.split())
