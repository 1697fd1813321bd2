"""Where a data set lies: a folder, or a repository on the Hub. Both have paths, and files when they are needed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

from kfacpack.errors import HubError, KfacpackError, first_line, printable
from kfacpack.format.hub_client import digest_of_file, hub_api, hub_errors, snapshot
from kfacpack.format.reference import read_address
from kfacpack.tasks.data_files import EXPECTED, MAX_DEPTH

CONVERTED = "refs/convert/parquet"
"""Where the Hub keeps its own parquet copy of data that is stored otherwise."""
CONFIG = re.compile(r"[\w.-]+")
INSTEAD = "give a folder that has the data: --data DIR"
FORM = "hf://datasets/OWNER/REPO, with @REVISION and /CONFIG behind it if need be"


class DataSource(Protocol):
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


class LocalFolder:
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
            found = list(_below(self._folder, MAX_DEPTH))
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


class _Listing(NamedTuple):
    revision: str | None
    """By its name; None for the main branch."""
    commit: str
    paths: list[str]


class DatasetRepository:
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
        return self._found.commit

    @property
    def expected(self) -> str:
        if self._offline is None:
            return "expected train-*.parquet and test-*.parquet, there, in data/ or in the folder of a config"
        told = f"the Hub cannot be reached ({self._offline}), and this is all that its cache here has"
        return f"{told}; {self._otherwise}"

    def paths(self) -> list[str]:
        return self._found.paths

    def file(self, path: str) -> Path:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import EntryNotFoundError

        named, commit, _ = self._found
        kept = try_to_load_from_cache(self.source, path, revision=commit, repo_type="dataset")
        if isinstance(kept, str):
            return Path(kept)
        with self._speaking(f"{self.name}: {path}", commit):
            # By its own name, so that the cache knows without a network what it stands for; by the commit, if that name
            # has moved on since the files were listed.
            with suppress(EntryNotFoundError):
                found = Path(hf_hub_download(self.source, path, repo_type="dataset", revision=named))
                if commit in found.parts:
                    return found
            return Path(hf_hub_download(self.source, path, repo_type="dataset", revision=commit))

    def digest(self, path: str) -> str:
        """A commit's files do not change, so that nothing has to be fetched."""
        return f"{self.revision}:{path}"

    @cached_property
    def _found(self) -> _Listing:
        from huggingface_hub.errors import RevisionNotFoundError

        try:
            with self._speaking(self.name, self._asked):
                told = hub_api().dataset_info(self.source, revision=self._asked)
        except HubError as error:
            if self._asked == CONVERTED and isinstance(error.__cause__, RevisionNotFoundError):
                problem = "is not parquet, and the Hub has no parquet copy of it"
                remedy = "Store it as parquet (datasets.Dataset.push_to_hub does), or download it and give --data DIR"
                raise HubError(self.name, problem, remedy) from error
            kept = self._kept() if error.unreachable else None
            if kept is None:
                raise
            self._offline = first_line(error.__cause__)
            return _Listing(kept.name, kept.name, list(_below(kept, MAX_DEPTH)))
        paths = [each.rfilename for each in told.siblings or ()]
        if self._asked is None and not any(path.endswith(".parquet") for path in paths):
            other = DatasetRepository(self.source, CONVERTED, self._config)
            return other._found
        return _Listing(self._asked, str(told.sha), paths)

    def _kept(self) -> Path | None:
        """The snapshot in the Hub's cache, if it has any data."""
        for revision in (self._asked,) if self._asked else (None, CONVERTED):
            kept = snapshot(self.source, revision, "dataset")
            if kept and any(path.endswith(".parquet") for path in _below(kept, MAX_DEPTH)):
                return kept
        return None

    def _speaking(self, place: str, revision: str | None) -> AbstractContextManager[None]:
        return hub_errors(place, self.source, revision, kind="dataset", otherwise=self._otherwise, instead=INSTEAD)

    @property
    def _otherwise(self) -> str:
        part = f" --include '{self._config}/*'" if self._config else ""
        revision = f" --revision {self._asked}" if self._asked else ""
        command = f"hf download {self.source} --repo-type dataset{revision}{part} --local-dir DIR"
        return f"where there is a network: {command}. Then give that folder: --data DIR"


def is_dataset_address(said: str) -> bool:
    """Whether it is meant for a data set on the Hub, and not for a folder."""
    return said.startswith("hf:/")


def data_source_of(data: str | os.PathLike[str]) -> tuple[DataSource, str | None]:
    """What `--data` names; and the config, if it names one."""
    said = os.fspath(data)
    if not is_dataset_address(said):
        return LocalFolder(Path(said)), None
    address = read_address(said.rstrip("/"))
    config = address.path if address else None
    if address is None or address.kind != "dataset" or not (config is None or CONFIG.fullmatch(config)):
        raise KfacpackError(f"{printable(said)}: is no address of a data set; expected {FORM}")
    return DatasetRepository(address.repository, address.revision, config), config


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
