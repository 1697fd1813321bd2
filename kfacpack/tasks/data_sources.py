"""Data sources: local folders, and dataset repositories on the Hub, whose files are downloaded when needed.

This module also finds the columns of a dataset, by name or by type.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kfacpack.errors import HubError, KfacpackError, first_line, printable
from kfacpack.format.hub_client import digest_of_file, hub_api, hub_errors, snapshot
from kfacpack.format.reference import parse_address
from kfacpack.tasks.data_files import EXPECTED, MAX_DEPTH
from kfacpack.tasks.task import COMPLETION_COLUMNS

CONVERTED = "refs/convert/parquet"
"""Revision with the Hub's own parquet copy of data that is stored in another format."""
CONFIG = re.compile(r"[\w.-]+")
LOCAL_DATA = "pass a folder with the data: --data DIR (data=DIR)"
ADDRESS_FORM = "hf://datasets/OWNER/REPO, optionally followed by @REVISION and /CONFIG"


class DataSource(Protocol):
    """A folder or repository with the files of a dataset."""

    @property
    def name(self) -> str:
        """Name to show in messages: a path or an hf:// address."""
        ...

    @property
    def source(self) -> str:
        """Name to record in manifests. It does not reveal the location of the data on this machine."""
        ...

    @property
    def revision(self) -> str | None:
        """Commit of a repository; None for a folder."""
        ...

    @property
    def expected(self) -> str:
        """Description of the expected content, or of how to obtain the data, for error messages."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether all files are already on this machine."""
        ...

    def paths(self) -> list[str]:
        """Returns the relative paths, with forward slashes, of all files that are at most three levels deep."""
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
            KfacpackError: If the path is not a folder.
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
        """Name of the folder, without its parent folders."""
        return self._folder.resolve().name

    def paths(self) -> list[str]:
        """Returns the relative paths of all files that are at most three levels deep.

        Raises:
            KfacpackError: If the folder cannot be read, or a file name is not valid UTF-8.
        """
        try:
            paths = list(_walk(self._folder, MAX_DEPTH))
        except OSError as error:
            raise KfacpackError(f"{self._folder}: cannot be read: {error.strerror}") from error
        if invalid := [path for path in paths if not path.isascii() and path.encode(errors="ignore").decode() != path]:
            problem = f"the file name {printable(invalid[0])} is not valid UTF-8"
            raise KfacpackError(f"{self._folder}: {problem}; rename the file")
        return paths

    def file(self, path: str) -> Path:
        """Returns the location of a file in the folder."""
        return self._folder / path

    def digest(self, path: str) -> str:
        """Returns the digest of the content of a file.

        The size and the modification time do not identify the content: pixels can change while the size stays the same,
        and copying a file changes its modification time.
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

    Files are listed on first use and downloaded one by one into the Hub cache. Without network access, only the files
    in the cache are available.
    """

    is_local = False

    def __init__(self, repository: str, revision: str | None = None, config: str | None = None):
        """Creates a reference to a repository without accessing the Hub.

        Args:
            repository: Name of the repository, `owner/repository`.
            revision: Branch, tag or commit. None for the main branch or, if it contains no parquet files, for the Hub's
                parquet copy.
            config: Name of the config, for the download command in error messages.
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
        """Description of the expected content or, if the Hub cannot be reached, of how to obtain the data."""
        if self._offline_reason is None:
            return "expected train-*.parquet and test-*.parquet at the top level, in data/ or in a config folder"
        problem = f"the Hub cannot be reached ({self._offline_reason}), and the local cache has no other dataset files"
        return f"{problem}; {self._download_remedy}"

    def paths(self) -> list[str]:
        """Returns the paths of all files in the repository or, without network access, of the files in the cache.

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
            # The revision is requested by name, so that the cache can resolve the name without network access. If the
            # revision has changed since the files were listed, the commit is requested instead.
            with suppress(EntryNotFoundError):
                file = Path(hf_hub_download(self.source, path, repo_type="dataset", revision=revision))
                if commit in file.parts:
                    return file
            return Path(hf_hub_download(self.source, path, repo_type="dataset", revision=commit))

    def digest(self, path: str) -> str:
        """Returns the commit and the path, which identify the content. The file is therefore not downloaded."""
        return f"{self.revision}:{path}"

    @cached_property
    def _listing(self) -> _Listing:
        from huggingface_hub.errors import RevisionNotFoundError

        try:
            with self._hub_errors(self.name, self._revision):
                info = hub_api().dataset_info(self.source, revision=self._revision)
        except HubError as error:
            if self._revision == CONVERTED and isinstance(error.__cause__, RevisionNotFoundError):
                problem = "contains no parquet files, and the Hub has no parquet copy of the dataset"
                remedy = f"Upload the dataset with datasets.Dataset.push_to_hub, which writes parquet, or {LOCAL_DATA}"
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
        """Returns the folder of a cached snapshot with parquet files, or None if there is no such snapshot."""
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
        return f"on a machine with network access, run: {command}. Then pass that folder: --data DIR (data=DIR)"


def is_dataset_address(data: str) -> bool:
    """Returns whether the name of a data source is an hf:// address rather than a folder."""
    return data.startswith("hf:/")


def data_source_of(data: str | os.PathLike[str]) -> tuple[DataSource, str | None]:
    """Opens a data source by name.

    Args:
        data: A folder, or hf://datasets/OWNER/REPO[@REVISION][/CONFIG].

    Returns:
        The data source, and the name of the config, or None if the address does not contain a config.

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
    """Yields the relative paths of all files that are not hidden, at most `depth` levels deep."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if not entry.is_dir():
                yield prefix + entry.name
            elif depth > 1:
                yield from _walk(Path(entry.path), depth - 1, f"{prefix}{entry.name}/")


TEXT_TYPES = ("string", "large_string")
STORED_IMAGE_FIELDS = {"bytes", "path"}
"""Fields of an image column in a parquet file."""
LABEL = "label"
LABEL_NAMES = (LABEL, "labels")
"""Names of columns that may contain labels although their type is not ClassLabel."""
IMAGE = "image"
COLUMNS_FORM = (
    "image=COLUMN,label=COLUMN, or the text columns in order and the label, such as "
    "premise=COLUMN,hypothesis=COLUMN,label=COLUMN"
)
_REMEDY = f"Choose the columns with --columns (columns=…): {COLUMNS_FORM}"


@dataclass(frozen=True)
class RequestedColumns:
    """Columns requested by name. A column may have several possible names; the first existing name is used."""

    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Possible column names for each key of an example. If empty, input columns are found by type."""
    label: tuple[str, ...] = ()
    """Possible names of the label column. If empty, the label column is found by type."""
    required: bool = True
    """Whether to raise an error if a requested column is missing. If False, input columns are found by type instead."""


@dataclass(frozen=True)
class Columns:
    """The columns of a dataset that contain the inputs and the labels."""

    inputs: dict[str, str]
    """Name of the input column for each key of an example. The key of an image is "image"."""
    label: str | None
    """Name of the label column; None if there is no label column."""
    classes: tuple[str, ...] | None
    """Class names of a ClassLabel column. If None, the values of the label column, if there is one, are the classes."""
    values: tuple[Any, ...] | None = None
    """Distinct values of a label column without class names, in the order of the classes; None before they are read."""
    by_type: bool = False
    """Whether the input columns were found by type because requested columns were missing."""

    @property
    def by_value(self) -> bool:
        """Whether the classes are the values of the label column."""
        return self.label is not None and self.classes is None


def parse_columns(text: str) -> RequestedColumns:
    """Parses the value of `--columns`.

    Args:
        text: Comma-separated `KEY=COLUMN` pairs, such as `"image=IMG,label=Y"`.

    Returns:
        The requested columns.

    Raises:
        KfacpackError: If the text is invalid, a key occurs twice, or an image is combined with other inputs.
    """
    columns: dict[str, tuple[str, ...]] = {}
    for pair in text.split(","):
        key, equals, column = (part.strip() for part in pair.partition("="))
        if not (key and equals and column) or key in columns:
            raise KfacpackError(f"columns {printable(text)!r}: expected {COLUMNS_FORM}")
        columns[key] = (column,)
    label = columns.pop(LABEL, ())
    if IMAGE in columns and len(columns) > 1:
        problem = "an image cannot be combined with other inputs"
        raise KfacpackError(f"columns {printable(text)!r}: {problem}; expected {COLUMNS_FORM}")
    return RequestedColumns(columns, label)


def find_columns(features: Any, location: str, requested: RequestedColumns | None = None) -> Columns:
    """Finds the requested columns of a dataset by name, and other columns by type.

    The input found by type is the only image column or, if there is no image column, all text columns. The label found
    by type is the only ClassLabel column or, if there is none, a column named label or labels. If no column is
    requested and there are text columns named prompt and completion, these are the inputs, and there is no label.

    Args:
        features: `datasets.Features` of the data.
        location: File or folder, for error messages.
        requested: Columns requested by name.

    Returns:
        The columns of the inputs and of the label.

    Raises:
        KfacpackError: If a column is missing or has the wrong type, or several columns could be the input or the label.
    """
    requested = requested or RequestedColumns()
    if not (requested.inputs or requested.label) and all(name in features for name in COMPLETION_COLUMNS):
        if other := [name for name in COMPLETION_COLUMNS if not _is_text(features[name])]:
            found = f"column {other[0]!r} has type {printable(str(features[other[0]]))}"
            expected = "expected strings in the columns " + " and ".join(map(repr, COMPLETION_COLUMNS))
            raise KfacpackError(f"{location}: {found}; {expected}. {_REMEDY}")
        return Columns({name: name for name in COMPLETION_COLUMNS}, None, None)
    named = {key: _first_existing(names, features) for key, names in requested.inputs.items()}
    label = _first_existing(requested.label, features)
    missing = [names for key, names in requested.inputs.items() if named[key] is None]
    missing += [requested.label] if requested.label and label is None else []
    if missing and requested.required:
        problem = f"no column {printable(' or '.join(map(repr, missing[0])))}; available columns: {_join(features)}"
        raise KfacpackError(f"{location}: {problem}. {_REMEDY}")
    label = label or _label_by_type(features, location)
    if missing or not named:
        inputs = _inputs_by_type(features, location, label)
    else:
        inputs = {key: column for key, column in named.items() if column is not None}
        for key, column in inputs.items():
            _require_type(features, key, column, location)
    return Columns(inputs, label, _class_names(features, label, location), by_type=bool(missing))


def is_image(feature: Any) -> bool:
    """Returns whether a feature has the type `datasets.Image`."""
    import datasets

    return isinstance(feature, datasets.Image)


def is_encoded_image(feature: Any) -> bool:
    """Returns whether a feature may contain encoded images, as in parquet files that `datasets` did not write."""
    if isinstance(feature, dict):
        return "bytes" in feature
    return getattr(feature, "dtype", None) in ("binary", "large_binary")


def _label_by_type(features: Any, location: str) -> str | None:
    import datasets

    labels = [name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    if not labels:  # otherwise, a text column named label would become an input
        labels = [name for name in LABEL_NAMES if name in features and _may_be_label(features[name])][:1]
    return _only(labels, "class labels", location)


def _may_be_label(feature: Any) -> bool:
    dtype = getattr(feature, "dtype", None) or ""
    return dtype in TEXT_TYPES or dtype == "bool" or dtype.startswith(("int", "uint"))


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in TEXT_TYPES


def _inputs_by_type(features: Any, location: str, label: str | None) -> dict[str, str]:
    images = [name for name, feature in features.items() if is_image(feature)]
    images = images or [
        name for name, feature in features.items() if isinstance(feature, dict) and set(feature) == STORED_IMAGE_FIELDS
    ]
    texts = [name for name, feature in features.items() if _is_text(feature) and name != label]
    if image := _only(images, "images", location):
        return {IMAGE: image}
    if not texts:
        column = "no column" if label is None else "no column other than the label"
        problem = f"{column} contains images or strings; available columns: {_join(features) or 'none'}"
        remedy = "Expected a column of type Image or string, as written by datasets.Dataset.to_parquet"
        raise KfacpackError(f"{location}: {problem}. {remedy}")
    return {name: name for name in texts}


def _only(columns: list[str], kind: str, location: str) -> str | None:
    if len(columns) > 1:
        problem = f"{len(columns)} columns contain {kind}: {_join(columns)}; expected only one"
        raise KfacpackError(f"{location}: {problem}. {_REMEDY}")
    return columns[0] if columns else None


def _require_type(features: Any, key: str, column: str, location: str) -> None:
    feature = features[column]
    if key == IMAGE:
        is_valid, expected = is_image(feature) or is_encoded_image(feature), "images"
    else:
        is_valid, expected = _is_text(feature), "strings"
    if not is_valid:
        found = f"column {printable(column)!r} has type {printable(str(feature))}"
        raise KfacpackError(f"{location}: {found}; expected a column of {expected}. {_REMEDY}")


def _class_names(features: Any, label: str | None, location: str) -> tuple[str, ...] | None:
    import datasets

    if label is None:
        return None
    feature = features[label]
    if isinstance(feature, datasets.ClassLabel):
        return tuple(feature.names)
    if not _may_be_label(feature):
        problem = f"label column {printable(label)!r} has type {printable(str(feature))}"
        raise KfacpackError(f"{location}: {problem}; expected ClassLabel, strings or integers")
    return None


def _first_existing(names: tuple[str, ...], features: Any) -> str | None:
    return next((name for name in names if name in features), None)


def _join(names: Iterable[str]) -> str:
    return printable(", ".join(names))
