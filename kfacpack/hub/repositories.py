"""A repository on the Hub: which files of ours it has, and how to name it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, overload

from kfacpack.errors import BundleError, HubError
from kfacpack.hub.files.client import client, speaking
from kfacpack.hub.files.reference import REPOSITORY, Reference
from kfacpack.hub.items import ENDINGS, Item

_PLAIN = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*")
"""Names of files that can be shown, typed and put into a folder as they are; anyone may have chosen them."""
_NAMED = re.compile(rf"(?:hf://(?:models/)?)?({REPOSITORY.pattern})(?:@(.+))?/?")


@dataclass(frozen=True)
class Stored:
    """One file of a repository."""

    name: str
    nbytes: int
    sha256: str | None
    """None for small files in git itself."""
    git: str
    """The id of its git blob."""


@dataclass(frozen=True)
class Repository:
    name: str
    commit: str
    private: bool
    files: tuple[Stored, ...]

    def reference(self, file: str) -> Reference:
        """A file, at the commit that was looked at."""
        return Reference(self.name, file, self.commit)

    @property
    def candidates(self) -> list[Stored]:
        """Files that may be bundles or vectors, by their names."""
        return [file for file in self.files if file.name.endswith(ENDINGS) and _PLAIN.fullmatch(file.name)]

    def item(self, file: str) -> Item | None:
        """What a file is, by its header, which is all that is fetched; None for one that is not ours."""
        try:
            return Item.of(self.reference(file), file)
        except BundleError:
            return None


def parse_repository(text: str) -> tuple[str, str | None]:
    """owner/repo[@revision], with hf:// before it or without."""
    found = _NAMED.fullmatch(text)
    if not found:
        raise HubError(text, "is not the name of a repository on the Hub", "Expected owner/repo or owner/repo@revision")
    return found[1], found[2].replace("%2F", "/") if found[2] else None


@overload
def look_at(name: str, revision: str | None, *, missing_ok: Literal[False] = False) -> Repository: ...
@overload
def look_at(name: str, revision: str | None, *, missing_ok: Literal[True]) -> Repository | None: ...
def look_at(name: str, revision: str | None, *, missing_ok: bool = False) -> Repository | None:
    """What the Hub says of a repository; with `missing_ok`, None for one that is not there, or not for you to see."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    with speaking(name, name, revision):
        try:
            found = client().model_info(name, revision=revision, files_metadata=True)
        except RepositoryNotFoundError as error:
            if missing_ok and not isinstance(error, GatedRepoError):
                return None
            raise
    files = tuple(
        Stored(each.rfilename, each.size or 0, each.lfs.sha256 if each.lfs else None, each.blob_id or "")
        for each in found.siblings or ()
    )
    return Repository(name, found.sha or "", bool(found.private), files)
