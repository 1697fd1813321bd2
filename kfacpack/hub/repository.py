"""A repository on the Hub: which files of ours it has, and how to name it.

`kp.pull`: bundles and task vectors from the Hub, verified, put where they are wanted.

Which bundles and vectors there are on the Hub, by the tags and metadata of their cards.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from kfacpack.errors import BundleError, HubError, KfacpackError
from kfacpack.format.hub_client import digest_of_file, hub_api, hub_errors, local_copy
from kfacpack.format.reference import REPOSITORY, SCHEME, Reference
from kfacpack.format.writer import replace_atomically
from kfacpack.hub.artifacts import SUFFIXES, Artifact, FileProgress
from kfacpack.hub.card import BASE_TAG, TAGS, TASK_TAG
from kfacpack.hub.model_ids import model_from_option

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo


_PLAIN = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*")
"""Names of files that can be shown, typed and put into a folder as they are; anyone may have chosen them."""
_NAMED = re.compile(rf"(?:hf://(?:models/)?)?({REPOSITORY.pattern})(?:@(.+))?/?")


@dataclass(frozen=True)
class RepositoryFile:
    """One file of a repository."""

    name: str
    nbytes: int
    sha256: str | None
    """None for small files in git itself."""
    git: str
    """The id of its git blob."""


@dataclass(frozen=True)
class HubRepository:
    name: str
    commit: str
    private: bool
    files: tuple[RepositoryFile, ...]

    def reference(self, file: str) -> Reference:
        """A file, at the commit that was looked at."""
        return Reference(self.name, file, self.commit)

    @property
    def candidates(self) -> list[RepositoryFile]:
        """Files that may be bundles or vectors, by their names."""
        return [file for file in self.files if file.name.endswith(SUFFIXES) and _PLAIN.fullmatch(file.name)]

    def item(self, file: str) -> Artifact | None:
        """What a file is, by its header, which is all that is fetched; None for one that is not ours."""
        try:
            return Artifact.of(self.reference(file), file)
        except BundleError:
            return None


def parse_repository(text: str) -> tuple[str, str | None]:
    """owner/repo[@revision], with hf:// before it or without."""
    found = _NAMED.fullmatch(text)
    if not found:
        raise HubError(text, "is not the name of a repository on the Hub", "Expected owner/repo or owner/repo@revision")
    return found[1], found[2].replace("%2F", "/") if found[2] else None


@overload
def inspect_repository(name: str, revision: str | None, *, missing_ok: Literal[False] = False) -> HubRepository: ...
@overload
def inspect_repository(name: str, revision: str | None, *, missing_ok: Literal[True]) -> HubRepository | None: ...
def inspect_repository(name: str, revision: str | None, *, missing_ok: bool = False) -> HubRepository | None:
    """What the Hub says of a repository; with `missing_ok`, None for one that is not there, or not for you to see."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    with hub_errors(name, name, revision):
        try:
            found = hub_api().model_info(name, revision=revision, files_metadata=True)
        except RepositoryNotFoundError as error:
            if missing_ok and not isinstance(error, GatedRepoError):
                return None
            raise
    files = tuple(
        RepositoryFile(each.rfilename, each.size or 0, each.lfs.sha256 if each.lfs else None, each.blob_id or "")
        for each in found.siblings or ()
    )
    return HubRepository(name, found.sha or "", bool(found.private), files)


@dataclass(frozen=True)
class PullResult:
    reference: Reference
    path: Path
    item: Artifact


def pull(
    what: str | Reference,
    files: Sequence[str] = (),
    *,
    output: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: FileProgress = lambda check, done, total: None,
) -> list[PullResult]:
    """Fetch hf://owner/repo[@revision]/FILE, or of owner/repo[@revision] the files named, or all that are ours.

    Each is checked by the Hub's SHA-256 and by its own, and then put into the folder `output` (else the current one),
    or, if it is one, under that name: whole or not at all. A copy in the cache that is damaged is fetched anew. A file
    that is there and differs is replaced with `force` only.
    """
    wanted = _select_files(what, files)
    places = _targets(wanted, output)
    found = []
    for reference, place in zip(wanted, places, strict=True):
        cached = local_copy(reference, checked=True)
        item = Artifact.of(cached, reference.file)
        item.require_sound(cached, progress)
        _move_into_place(cached, place, force=force)
        found.append(PullResult(reference, place, Artifact.of(place, reference.file)))
    return found


def _select_files(what: str | Reference, files: Sequence[str]) -> list[Reference]:
    if isinstance(what, Reference) or (what.startswith(SCHEME) and what.endswith(SUFFIXES)):
        if files:
            raise KfacpackError(f"{what}: names a file already; give the repository, and the names of files after it")
        return [what if isinstance(what, Reference) else Reference.parse(what)]
    name, revision = parse_repository(what)
    if files:
        return [Reference(name, file, revision) for file in files]
    repository = inspect_repository(name, revision)
    ours = [file.name for file in repository.candidates if repository.item(file.name)]
    if not ours:
        raise HubError(what, "has neither bundles nor task vectors", "Is it the repository you meant?")
    return [Reference(name, file, revision) for file in ours]


def _targets(wanted: Sequence[Reference], output: str | os.PathLike[str] | None) -> list[Path]:
    target = Path(output) if output is not None else Path()
    if len(wanted) == 1 and output is not None and not target.is_dir() and target.suffix in SUFFIXES:
        places = [target]
    else:
        if target.exists() and not target.is_dir():
            raise KfacpackError(f"{target}: is no folder; {len(wanted)} files need one")
        places = [target / each.name for each in wanted]
    if len(set(places)) < len(places):
        raise KfacpackError("files in different folders of the repository have the same name; pull them one by one")
    return places


def _move_into_place(source: Path, place: Path, *, force: bool) -> None:
    if place.exists() and not force:
        if place.is_file() and digest_of_file(place) == digest_of_file(source):
            return
        raise KfacpackError(f"{place}: is there already, and differs; move it, or replace it with --force")
    place.parent.mkdir(parents=True, exist_ok=True)
    with (
        source.open("rb") as stream,
        replace_atomically(place) as descriptor,
        os.fdopen(descriptor, "wb", closefd=False) as target,
    ):
        shutil.copyfileobj(stream, target, 2**20)


@dataclass(frozen=True)
class SearchResult:
    """A repository with bundles or vectors."""

    repository: str
    bases: tuple[str, ...]
    tasks: tuple[str, ...]
    downloads: int
    files: tuple[RepositoryFile, ...]


def search(
    *, base_model: str | None = None, task: str | None = None, author: str | None = None, limit: int = 20
) -> list[SearchResult]:
    """Repositories whose cards say that they hold bundles or vectors, at most `limit`.

    `base_model`: as `--model` has it (ViT-B-32/openai, timm:NAME, or ViT-B-32 for any tag) or by its id on the Hub;
    `author`: a user or an organisation.
    """
    from huggingface_hub import constants

    common = [TAGS[0], *([f"{TASK_TAG}{task}"] if task else [])]
    ways = _tag_filters(base_model) if base_model else [[]]
    found: dict[str, ModelInfo] = {}
    if constants.HF_HUB_OFFLINE:
        raise HubError("search", "asks the Hub, and HF_HUB_OFFLINE is set", "Unset it", unreachable=True)
    with hub_errors("search", "search", otherwise="let HF_ENDPOINT name a mirror"):
        for way in ways:
            for each in hub_api().list_models(filter=[*common, *way], author=author, limit=limit, full=True):
                found.setdefault(each.id, each)
    return [_search_result(each) for each in list(found.values())[:limit]]


def _tag_filters(base_model: str) -> list[list[str]]:
    """The tags that say that it is this one. Whether a name is ours or an id on the Hub, it does not show."""
    name, known = model_from_option(base_model)
    return [[f"{BASE_TAG}{name}"], [f"base_model:{known}"]]


def _search_result(info: ModelInfo) -> SearchResult:
    def tagged(prefix: str) -> tuple[str, ...]:
        return tuple(tag.removeprefix(prefix) for tag in info.tags or () if tag.startswith(prefix))

    files = tuple(inspect_repository(info.id, None).candidates)
    return SearchResult(info.id, tagged(BASE_TAG), tagged(TASK_TAG), info.downloads or 0, files)
