"""Locations of files: local paths, and references to files on the Hub.

A reference has the form `hf://[datasets/]owner/repo[@revision]/file`, as in huggingface_hub's file system.
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
    """Expands `~` and `~user` at the beginning of a path.

    Args:
        path: A path as written by the user.

    Returns:
        The expanded path.

    Raises:
        KfacpackError: If the home directory cannot be determined, for example because the user does not exist.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        problem = "the home directory of this user cannot be determined"
        raise KfacpackError(f"{printable(os.fspath(path))}: {problem}. Write the path in full") from error


SCHEME = "hf://"
EXPECTED = "Expected hf://owner/repo/FILE or hf://owner/repo@revision/FILE"

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
REPOSITORY = re.compile(rf"{_NAME}/{_NAME}")
COMMIT = re.compile(r"[0-9a-f]{40}")
_ADDRESS = re.compile(
    # Spaces, kernels and buckets contain no bundles, and none of these words is a valid owner name.
    rf"hf://(?:(?P<kind>models|datasets)/)?(?!(?:models|datasets|spaces|kernels|buckets)/)"
    rf"(?P<repository>{REPOSITORY.pattern})"
    # Two kinds of revisions may contain slashes; in all others a slash is written as %2F.
    r"(?:@(?P<revision>refs/pr/[0-9]+|refs/convert/[\w.-]+|[^/]+))?(?:/(?P<path>.+))?"
)

RepositoryKind = Literal["model", "dataset"]


class Address(NamedTuple):
    """The parts of `hf://[datasets/]owner/repo[@revision][/path]`."""

    kind: RepositoryKind
    repository: str
    revision: str | None
    path: str | None
    """Path of a file or folder in the repository; None for the repository itself."""


def parse_address(text: str) -> Address | None:
    """Parses an address on the Hub.

    Args:
        text: The address. `hf:/` with a single slash is accepted because `Path` collapses the two slashes.

    Returns:
        The parts of the address, or None if `text` is not an address.
    """
    match = _ADDRESS.fullmatch(SCHEME + text.removeprefix("hf:").lstrip("/"))
    if match is None or not text.startswith("hf:/"):
        return None
    revision = unquote(match["revision"]) if match["revision"] else None
    return Address("dataset" if match["kind"] == "datasets" else "model", match["repository"], revision, match["path"])


@dataclass(frozen=True)
class Reference(os.PathLike[str]):
    """A reference to a file in a repository on the Hub. Readers accept it in place of a path.

    `str(reference)` has the form `hf://[datasets/]owner/repo[@revision]/file`.

    Raises:
        HubError: If `file` is not a valid path in a repository.
    """

    repository: str
    """Name of the repository, OWNER/NAME."""
    file: str
    """Path of the file in the repository."""
    revision: str | None = None
    """A branch, a tag or a commit; None for the repository's main branch."""
    kind: RepositoryKind = "model"
    header_only: bool = False
    """Whether to read, and therefore download, only the header of the file."""

    def __post_init__(self) -> None:
        if any(part in ("", ".", "..") for part in self.file.split("/")) or "\\" in self.file:
            raise HubError(str(self), f"{self.file!r} is not a valid path of a file in a repository", EXPECTED)

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Parses a reference of the form `hf://[datasets/]owner/repo[@revision]/file`.

        Args:
            text: The reference.

        Returns:
            The parsed reference.

        Raises:
            HubError: If `text` does not name a file on the Hub.
        """
        address = parse_address(text)
        if not address:
            raise HubError(text, "is not a valid reference to a file on the Hub", EXPECTED)
        if not address.path:
            raise HubError(text, "names a repository, but no file in it", EXPECTED)
        return cls(address.repository, address.path, address.revision, address.kind)

    @property
    def name(self) -> str:
        """Name of the file, without folders."""
        return PurePosixPath(self.file).name

    @property
    def header(self) -> Reference:
        """A copy of this reference with `header_only` set."""
        return replace(self, header_only=True)

    def __str__(self) -> str:
        kind = "datasets/" if self.kind == "dataset" else ""
        at = f"@{self.revision.replace('/', '%2F')}" if self.revision else ""
        return f"{SCHEME}{kind}{self.repository}{at}/{self.file}"

    def __fspath__(self) -> str:
        return str(self)


FileLocation = Path | Reference
"""A local file or a file on the Hub."""


def is_reference(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is an `hf://` reference."""
    text = os.fspath(path)
    # Path collapses the two slashes into one.
    return text.startswith(SCHEME) or (isinstance(path, PurePath) and text.startswith("hf:/"))


def locate(path: str | os.PathLike[str]) -> FileLocation:
    """Converts a path or an `hf://` reference to a `Path` or a `Reference`.

    Args:
        path: A path or a reference, as an object or as a string.

    Returns:
        A `Reference` if `path` names a file on the Hub, otherwise a `Path`.

    Raises:
        HubError: If the string begins with `hf://` but is not a valid reference.
        KfacpackError: If `path` is neither a path nor a string, or is empty.
    """
    if isinstance(path, Reference):
        return path
    if not isinstance(path, str | os.PathLike) or path == "":
        found = "an empty string" if path == "" else type(path).__name__
        raise KfacpackError(f"expected a path or hf://OWNER/REPO/FILE, got {found}")
    if is_reference(path):
        return Reference.parse(os.fspath(path))
    return Path(path)


def header_of(path: str | os.PathLike[str]) -> FileLocation:
    """Returns the location of a file. If the file is on the Hub, the location has `header_only` set.

    Args:
        path: A path or a reference, as an object or as a string.
    """
    location = locate(path)
    return location.header if isinstance(location, Reference) else location
