"""Where a data set lies: a folder, or a repository on the Hub. Both have paths, and files when they are needed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Protocol

from kfacpack.errors import HubError, KfacpackError, first_line, printable
from kfacpack.hub.files.client import client, speaking
from kfacpack.hub.files.download import digest_of_file
from kfacpack.hub.files.reference import read_address
from kfacpack.tasks.layout import DEEPEST, EXPECTED

CONVERTED = "refs/convert/parquet"
"""Where the Hub keeps its own parquet copy of data that is stored otherwise."""
CONFIG = re.compile(r"[\w.-]+")
FORM = "hf://datasets/OWNER/REPO, with @REVISION and /CONFIG behind it if need be"


class Place(Protocol):
    @property
    def name(self) -> str:
        """What a user would call it."""

    @property
    def source(self) -> str:
        """What a manifest calls it: nothing of this machine."""

    @property
    def revision(self) -> str | None:
        """The commit, where there is one."""

    @property
    def expected(self) -> str:
        """What should have been found, or where to get it."""

    @property
    def at_hand(self) -> bool:
        """Whether the files are on this machine before anybody asks for them."""

    def paths(self) -> list[str]:
        """Of all files, with slashes, from the place on, at most three deep."""

    def file(self, path: str) -> Path:
        """The file at a path, on this machine."""

    def digest(self, path: str) -> str:
        """What tells the file's bytes from any others."""


class Folder:
    revision = None
    expected = EXPECTED
    at_hand = True

    def __init__(self, folder: Path):
        self._folder = folder
        if not folder.is_dir():
            raise KfacpackError(f"{folder}: {'is no folder' if folder.exists() else 'no such folder'}; {EXPECTED}")

    @property
    def name(self) -> str:
        return str(self._folder)

    @property
    def source(self) -> str:
        return self._folder.resolve().name

    def paths(self) -> list[str]:
        try:
            found = list(_below(self._folder, DEEPEST))
        except OSError as error:
            raise KfacpackError(f"{self._folder}: cannot be read: {error.strerror}") from error
        if odd := [path for path in found if not path.isascii() and path.encode(errors="ignore").decode() != path]:
            raise KfacpackError(
                f"{self._folder}: the name {printable(odd[0])} is not UTF-8, which data sets are; rename it"
            )
        return found

    def file(self, path: str) -> Path:
        return self._folder / path

    def digest(self, path: str) -> str:
        """Of all bytes: a size stays as it was when pixels change, and a date changes by copying. A run reads them
        anyway, and takes longer to decode them."""
        try:
            return digest_of_file(self.file(path))
        except OSError as error:
            raise KfacpackError(f"{self.file(path)}: cannot be read: {error.strerror}") from error


class Repository:
    """Of data sets. Its files are listed when they are first asked for, and fetched one by one into the Hub's cache.

    Without a network, what the cache has is all there is.
    """

    at_hand = False

    def __init__(self, repository: str, revision: str | None = None, config: str | None = None):
        """`config` is for the remedies in errors."""
        self.source = repository
        self._asked, self._config = revision, config
        self._offline: str | None = None

    @property
    def name(self) -> str:
        return f"hf://datasets/{self.source}" + (f"@{self._asked}" if self._asked else "")

    @property
    def revision(self) -> str:
        return self._found[0]

    @property
    def expected(self) -> str:
        if self._offline is None:
            return "expected train-*.parquet and test-*.parquet, there, in data/ or in the folder of a config"
        told = f"the Hub cannot be reached ({self._offline}), and this is all that its cache here has"
        return f"{told}; {self._otherwise}"

    def paths(self) -> list[str]:
        return self._found[1]

    def file(self, path: str) -> Path:
        from huggingface_hub import hf_hub_download

        place = f"{self.name}: {path}"
        with speaking(place, self.source, self.revision, kind="dataset", otherwise=self._otherwise):
            return Path(hf_hub_download(self.source, path, repo_type="dataset", revision=self.revision))

    def digest(self, path: str) -> str:
        """A commit's files do not change, so that nothing has to be fetched."""
        return f"{self.revision}:{path}"

    @cached_property
    def _found(self) -> tuple[str, list[str]]:
        """The commit, and the paths there."""
        from huggingface_hub.errors import RevisionNotFoundError

        try:
            with speaking(self.name, self.source, self._asked, kind="dataset", otherwise=self._otherwise):
                told = client().dataset_info(self.source, revision=self._asked)
        except HubError as error:
            if self._asked == CONVERTED and isinstance(error.__cause__, RevisionNotFoundError):
                problem = "is not parquet, and the Hub has no parquet copy of it"
                remedy = "Store it as parquet (datasets.Dataset.push_to_hub does), or download it and give --data DIR"
                raise HubError(self.name, problem, remedy) from error
            kept = self._kept() if error.unreachable else None
            if kept is None:
                raise
            self._offline = first_line(error.__cause__)
            return kept.name, list(_below(kept, DEEPEST))
        paths = [each.rfilename for each in told.siblings or ()]
        if self._asked is None and not any(path.endswith(".parquet") for path in paths):
            other = Repository(self.source, CONVERTED, self._config)
            return other._found
        return str(told.sha), paths

    def _kept(self) -> Path | None:
        """The snapshot in the Hub's cache."""
        from huggingface_hub import constants

        folder = Path(constants.HF_HUB_CACHE) / f"datasets--{self.source.replace('/', '--')}"
        for revision in (self._asked,) if self._asked else ("main", CONVERTED):
            ref = folder / "refs" / revision
            commit = ref.read_text().strip() if ref.is_file() else revision
            if (snapshot := folder / "snapshots" / commit).is_dir() and any(_below(snapshot, DEEPEST)):
                return snapshot
        return None

    @property
    def _otherwise(self) -> str:
        part = f" --include '{self._config}/*'" if self._config else ""
        revision = f" --revision {self._asked}" if self._asked else ""
        command = f"hf download {self.source} --repo-type dataset{revision}{part} --local-dir DIR"
        return f"where there is a network: {command}. Then give that folder: --data DIR"


def is_address(said: str) -> bool:
    """Whether it is meant for a data set on the Hub, and not for a folder."""
    return said.startswith("hf:/")


def place_of(data: str | os.PathLike[str]) -> tuple[Place, str | None]:
    """What `--data` names; and the config, if it names one."""
    said = os.fspath(data)
    if not is_address(said):
        return Folder(Path(said)), None
    address = read_address(said.rstrip("/"))
    config = address.path if address else None
    if address is None or address.kind != "dataset" or not (config is None or CONFIG.fullmatch(config)):
        raise KfacpackError(f"{printable(said)}: is no address of a data set; expected {FORM}")
    return Repository(address.repository, address.revision, config), config


def _below(folder: Path, depth: int, start: str = "") -> Iterator[str]:
    """Paths of files; what is hidden is left out."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if not entry.is_dir():
                yield start + entry.name
            elif depth > 1:
                yield from _below(Path(entry.path), depth - 1, f"{start}{entry.name}/")
