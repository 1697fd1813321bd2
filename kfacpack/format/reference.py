"""Paths as users write them.

What names a file on the Hub: hf://owner/repo[@revision]/file, as huggingface_hub's own file system has it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path, PurePath, PurePosixPath
from typing import Literal, NamedTuple
from urllib.parse import unquote

from kfacpack.errors import HubError, KfacpackError, printable


def expand_user(path: str | os.PathLike[str]) -> Path:
    """With the folder that ~ or ~user stands for."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        problem = "no such directory: nobody here is called that"
        raise KfacpackError(f"{printable(os.fspath(path))}: {problem}. Write the path in full") from error


SCHEME = "hf://"
EXPECTED = "expected hf://owner/repo/FILE or hf://owner/repo@revision/FILE"

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
REPOSITORY = re.compile(rf"{_NAME}/{_NAME}")
COMMIT = re.compile(r"[0-9a-f]{40}")
_WHOLE = re.compile(
    # Spaces and the like hold no bundles, and are no owners either.
    rf"hf://(?:(?P<kind>models|datasets)/)?(?!(?:models|datasets|spaces|kernels|buckets)/)"
    rf"(?P<repository>{REPOSITORY.pattern})"
    # Of revisions with a slash, these two kinds are known by their looks; any other has it written as %2F.
    r"(?:@(?P<revision>refs/pr/[0-9]+|refs/convert/[\w.-]+|[^/]+))?(?:/(?P<path>.+))?"
)

RepositoryKind = Literal["model", "dataset"]


class Address(NamedTuple):
    """What hf://[datasets/]owner/repo[@revision][/path] says; the path is that of a file or a folder."""

    kind: RepositoryKind
    repository: str
    revision: str | None
    path: str | None


def read_address(text: str) -> Address | None:
    """None for what is no address. Behind `hf:` one slash will do: a Path has lost the other."""
    found = _WHOLE.fullmatch(SCHEME + text.removeprefix("hf:").lstrip("/"))
    if found is None or not text.startswith("hf:/"):
        return None
    revision = unquote(found["revision"]) if found["revision"] else None
    return Address("dataset" if found["kind"] == "datasets" else "model", found["repository"], revision, found["path"])


@dataclass(frozen=True)
class Reference(os.PathLike[str]):
    """A file in a repository. Where paths are taken it is one, and reads as the user wrote it."""

    repository: str
    file: str
    revision: str | None = None
    """A branch, a tag or a commit; None for the repository's main branch."""
    kind: RepositoryKind = "model"
    header_only: bool = False
    """Whether whoever opens it will look at the header alone, so that nothing else has to be fetched."""

    def __post_init__(self) -> None:
        if any(part in ("", ".", "..") for part in self.file.split("/")) or "\\" in self.file:
            raise HubError(str(self), f"{self.file!r} is not the path of a file in a repository", EXPECTED)

    @classmethod
    def parse(cls, text: str) -> Reference:
        found = read_address(text)
        if not found:
            raise HubError(text, "is not the name of a file on the Hub", EXPECTED)
        if not found.path:
            raise HubError(text, "names a repository, and no file in it", EXPECTED)
        return cls(found.repository, found.path, found.revision, found.kind)

    @property
    def name(self) -> str:
        """The file's own name."""
        return PurePosixPath(self.file).name

    @property
    def header(self) -> Reference:
        return replace(self, header_only=True)

    def __str__(self) -> str:
        kind = "datasets/" if self.kind == "dataset" else ""
        at = f"@{self.revision.replace('/', '%2F')}" if self.revision else ""
        return f"{SCHEME}{kind}{self.repository}{at}/{self.file}"

    def __fspath__(self) -> str:
        return str(self)


FileLocation = Path | Reference
"""Where a file is."""


def is_reference(path: str | os.PathLike[str]) -> bool:
    text = os.fspath(path)
    # A Path has lost one of the two slashes.
    return text.startswith(SCHEME) or (isinstance(path, PurePath) and text.startswith("hf:/"))


def locate(path: str | os.PathLike[str]) -> FileLocation:
    """A file's name, understood."""
    if isinstance(path, Reference):
        return path
    if is_reference(path):
        return Reference.parse(os.fspath(path))
    return Path(path)


def header_of(path: str | os.PathLike[str]) -> FileLocation:
    """The same file, of which only the header will be looked at."""
    place = locate(path)
    return place.header if isinstance(place, Reference) else place
