"""Data sources: a local folder, or a dataset repository on the Hub, whose files are downloaded when needed."""

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
from kfacpack.format.reference import parse_address
from kfacpack.tasks.data_files import EXPECTED, MAX_DEPTH

CONVERTED = "refs/convert/parquet"
"""Revision with the Hub's own parquet copy of data that is stored in another format."""
CONFIG = re.compile(r"[\w.-]+")
LOCAL_DATA = "pass a folder with the data: --data DIR (data=DIR)"
ADDRESS_FORM = "hf://datasets/OWNER/REPO, optionally followed by @REVISION and /CONFIG"


class DataSource(Protocol):
    """A folder or repository with the files of a dataset."""

    @property
    def name(self) -> str:
        """Name for messages: a path or an hf:// address."""
        ...

    @property
    def source(self) -> str:
        """Name for manifests, without the location on this machine."""
        ...

    @property
    def revision(self) -> str | None:
        """Commit of a repository; None for a folder."""
        ...

    @property
    def expected(self) -> str:
        """Expected content, or how to obtain the data, for errors."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether all files are on this machine already."""
        ...

    def paths(self) -> list[str]:
        """Returns the relative paths of all files, with slashes, at most three levels deep."""
        ...

    def file(self, path: str) -> Path:
        """Returns the location of a file on this machine, downloading it if necessary."""
        ...

    def digest(self, path: str) -> str:
        """Returns a string that identifies the content of a file."""
        ...


class LocalFolder:
    """A folder on this machine. Implements `DataSource`."""

    revision = None
    expected = EXPECTED
    is_local = True

    def __init__(self, folder: Path):
        """Opens a folder.

        Raises:
            KfacpackError: If there is no such folder.
        """
        self._folder = folder
        if not folder.is_dir():
            raise KfacpackError(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}; {EXPECTED}")

    @property
    def name(self) -> str:
        """Path of the folder."""
        return str(self._folder)

    @property
    def source(self) -> str:
        """Name of the folder without its location."""
        return self._folder.resolve().name

    def paths(self) -> list[str]:
        """Returns the relative paths of all files.

        Raises:
            KfacpackError: If the folder cannot be read, or a file name is not valid UTF-8.
        """
        try:
            paths = list(_walk(self._folder, MAX_DEPTH))
        except OSError as error:
            raise KfacpackError(f"{self._folder}: cannot be read: {error.strerror}") from error
        if invalid := [path for path in paths if not path.isascii() and path.encode(errors="ignore").decode() != path]:
            raise KfacpackError(f"{self._folder}: the file name {printable(invalid[0])} is not valid UTF-8; rename it")
        return paths

    def file(self, path: str) -> Path:
        """Returns the location of a file."""
        return self._folder / path

    def digest(self, path: str) -> str:
        """Returns the digest of all bytes of a file.

        Size and date are not enough: pixels can change without the size, and copying changes the date.
        """
        try:
            return digest_of_file(self.file(path))
        except OSError as error:
            raise KfacpackError(f"{self.file(path)}: cannot be read: {error.strerror}") from error


class _Listing(NamedTuple):
    revision: str | None
    """Name of the revision; None for the main branch."""
    commit: str
    paths: list[str]


class DatasetRepository:
    """A dataset repository on the Hub. Implements `DataSource`.

    Files are listed on first use and downloaded one by one into the Hub cache. Without a network, only the files in the
    cache are available.
    """

    is_local = False

    def __init__(self, repository: str, revision: str | None = None, config: str | None = None):
        """Creates a reference to a repository without making a request.

        Args:
            repository: `owner/repository`.
            revision: Branch, tag or commit; None for the main branch, or its parquet conversion.
            config: Config to name in error messages that suggest a download.
        """
        self.source = repository
        self._revision, self._config = revision, config
        self._offline_reason: str | None = None

    @property
    def name(self) -> str:
        """Address of the repository."""
        return f"hf://datasets/{self.source}" + (f"@{self._revision}" if self._revision else "")

    @property
    def revision(self) -> str:
        """Commit of the repository."""
        return self._listing.commit

    @property
    def expected(self) -> str:
        """Expected content of the repository, or how to obtain the data without the Hub."""
        if self._offline_reason is None:
            return "expected train-*.parquet and test-*.parquet at the top level, in data/ or in a config folder"
        problem = f"the Hub cannot be reached ({self._offline_reason}), and the local cache has no other files"
        return f"{problem}; {self._download_remedy}"

    def paths(self) -> list[str]:
        """Returns the paths of all files in the repository, or in the cache without a network.

        Raises:
            HubError: If the repository cannot be read and is not in the cache.
        """
        return self._listing.paths

    def file(self, path: str) -> Path:
        """Returns the location of a file in the Hub cache, downloading it if necessary.

        Raises:
            HubError: If the file cannot be downloaded.
        """
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import EntryNotFoundError

        revision, commit, _ = self._listing
        cached = try_to_load_from_cache(self.source, path, revision=commit, repo_type="dataset")
        if isinstance(cached, str):
            return Path(cached)
        with self._hub_errors(f"{self.name}: {path}", commit):
            # Download by the revision's name, so that the cache can resolve it without a network; by the commit if the
            # revision has changed since the files were listed.
            with suppress(EntryNotFoundError):
                file = Path(hf_hub_download(self.source, path, repo_type="dataset", revision=revision))
                if commit in file.parts:
                    return file
            return Path(hf_hub_download(self.source, path, repo_type="dataset", revision=commit))

    def digest(self, path: str) -> str:
        """Returns commit and path: the files of a commit never change, so nothing has to be downloaded."""
        return f"{self.revision}:{path}"

    @cached_property
    def _listing(self) -> _Listing:
        from huggingface_hub.errors import RevisionNotFoundError

        try:
            with self._hub_errors(self.name, self._revision):
                info = hub_api().dataset_info(self.source, revision=self._revision)
        except HubError as error:
            if self._revision == CONVERTED and isinstance(error.__cause__, RevisionNotFoundError):
                problem = "is not parquet, and the Hub has no parquet copy of it"
                remedy = f"Store it as parquet, as datasets.Dataset.push_to_hub does, or {LOCAL_DATA}"
                raise HubError(self.name, problem, remedy) from error
            cached = self._cached_snapshot() if error.unreachable else None
            if cached is None:
                raise
            self._offline_reason = first_line(error.__cause__)
            return _Listing(cached.name, cached.name, list(_walk(cached, MAX_DEPTH)))
        paths = [sibling.rfilename for sibling in info.siblings or ()]
        if self._revision is None and not any(path.endswith(".parquet") for path in paths):
            return DatasetRepository(self.source, CONVERTED, self._config)._listing
        return _Listing(self._revision, str(info.sha), paths)

    def _cached_snapshot(self) -> Path | None:
        """Returns the snapshot in the Hub cache, if it has any data."""
        for revision in (self._revision,) if self._revision else (None, CONVERTED):
            cached = snapshot(self.source, revision, "dataset")
            if cached and any(path.endswith(".parquet") for path in _walk(cached, MAX_DEPTH)):
                return cached
        return None

    def _hub_errors(self, target: str, revision: str | None) -> AbstractContextManager[None]:
        return hub_errors(
            target,
            self.source,
            revision,
            kind="dataset",
            offline_remedy=self._download_remedy,
            access_remedy=LOCAL_DATA,
        )

    @property
    def _download_remedy(self) -> str:
        part = f" --include '{self._config}/*'" if self._config else ""
        revision = f" --revision {self._revision}" if self._revision else ""
        command = f"hf download {self.source} --repo-type dataset{revision}{part} --local-dir DIR"
        return f"on a machine with a network, run: {command}. Then pass that folder: --data DIR (data=DIR)"


def is_dataset_address(data: str) -> bool:
    """Returns whether the name of a data source is an hf:// address rather than a folder."""
    return data.startswith("hf:/")


def data_source_of(data: str | os.PathLike[str]) -> tuple[DataSource, str | None]:
    """Opens a data source by name.

    Args:
        data: A folder, or hf://datasets/OWNER/REPO[@REVISION][/CONFIG].

    Returns:
        The source, and the config if the address has one.

    Raises:
        KfacpackError: If the address is invalid, or there is no such folder.
    """
    text = os.fspath(data)
    if not is_dataset_address(text):
        return LocalFolder(Path(text)), None
    address = parse_address(text.rstrip("/"))
    config = address.path if address else None
    if address is None or address.kind != "dataset" or not (config is None or CONFIG.fullmatch(config)):
        raise KfacpackError(f"{printable(text)}: not the address of a dataset; expected {ADDRESS_FORM}")
    return DatasetRepository(address.repository, address.revision, config), config


def _walk(folder: Path, depth: int, prefix: str = "") -> Iterator[str]:
    """Yields the relative paths of all files that are not hidden."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if not entry.is_dir():
                yield prefix + entry.name
            elif depth > 1:
                yield from _walk(Path(entry.path), depth - 1, f"{prefix}{entry.name}/")
