"""Data files that an installed package carries, read where they lie: importing it would take seconds.

What a data set's card, README.md, says of its columns, where its parquet files do not say it themselves.

Where a data set's splits are: parquet files as the Hub lays them out, or pictures in a folder for each class.

Everything here looks at names alone: paths from the folder or repository on, with slashes, at most three deep.

Parquet files as the Hub lays them out: what they say of their columns, and their rows.
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

from kfacpack.errors import KfacpackError, first_line, printable

T = TypeVar("T")
READ_ERRORS = (OSError, EOFError, SyntaxError, ValueError, zlib.error)
"""What gzip, numpy and Pillow raise."""


@dataclass(frozen=True)
class PackageData:
    distribution: str
    """The name that pip knows."""
    module: str
    tested: str
    """A version that is known to carry the data."""

    @property
    def version(self) -> str:
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return "of unknown version"

    @property
    def remedy(self) -> str:
        return f"pip install --force-reinstall --no-deps {self.distribution}=={self.tested}"

    def read(self, path: str, decode: Callable[[bytes], T]) -> T:
        """What `decode` makes of the bytes of a file in the package."""
        file = self.file(path)
        try:
            return decode(file.read_bytes())
        except READ_ERRORS as error:
            problem = f"cannot be read: {getattr(error, 'strerror', None) or error or type(error).__name__}"
            raise KfacpackError(f"{file}: {problem}. It belongs to {self}; restore it: {self.remedy}") from error

    def file(self, path: str) -> Path:
        """Where a file of the package lies."""
        found = find_spec(self.module)
        if found is None or not found.submodule_search_locations:
            raise KfacpackError(
                f"the data comes with {self.distribution}, which is not installed: pip install {self.distribution}"
            )
        return Path(found.submodule_search_locations[0]) / path

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


METADATA = re.compile(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", re.DOTALL)


def declared_features(text: str, config: str | None) -> Any | None:
    """The columns' types under `dataset_info`, of a config where there are several; None without any."""
    import datasets
    import yaml

    found = METADATA.match(text)
    try:
        said = yaml.safe_load(found[1]) if found else None
        infos = said.get("dataset_info") if isinstance(said, Mapping) else None
        every = [infos] if isinstance(infos, Mapping) else infos or []
        named = {each.get("config_name", "default"): each for each in every}
        info = next(iter(named.values())) if len(named) == 1 else named.get(config or "default")
        features = info.get("features") if info else None
        return datasets.Features._from_yaml_list(features) if features else None
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError):
        return None  # a card is written for people: what is wrong there is no reason not to read the data


EXPECTED = (
    "expected train-*.parquet and test-*.parquet, there, in data/ or in the folder of a config, or pictures in CLASS/ "
    "or in train/CLASS/ and test/CLASS/"
)
MAX_DEPTH = 3
IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
SPLITS = ("train", "validation", "valid", "val", "dev", "test")
"""What a folder of files is called that is a split, and no config or class."""
SHARD = re.compile(r"(.+?)(-(?P<number>\d+)-of-(?P<count>\d+)(-[0-9a-f]{16})?)?\.parquet")
"""train-00000-of-00002.parquet; older files have a hash behind the number."""
NUMBERED = re.compile(r"\d+\.parquet")
"""The Hub's own conversion has CONFIG/SPLIT/0000.parquet."""

Splits = dict[str, list[str]]
"""A split's name -> the paths of its files."""


def natural_order(paths: Iterable[str]) -> list[str]:
    """Folder by folder, by name."""
    return sorted(paths, key=lambda path: path.split("/"))


def shards(paths: Iterable[str], config: str | None, where: str, *, asked: bool = False) -> Splits:
    """The parquet files of a config, by split; none if there are no parquet files.

    Those that lie in no config's folder, or in that of one called default, are of any config; but of none that was
    `asked` for by name, lest a slip of the pen be answered with other data. `where` is for errors.
    """
    found: dict[str | None, Splits] = {}
    for path in natural_order(paths):
        *folders, name = path.split("/")
        match = SHARD.fullmatch(name)
        if not match:
            continue
        if folders[:1] == ["data"]:
            folders = folders[1:]
        # A config may be called test, too: there, the files have the names of splits.
        in_split = folders and folders[-1] in SPLITS and (match[1] == folders[-1] or match[1] not in SPLITS)
        split = folders.pop() if folders and (NUMBERED.fullmatch(name) or in_split) else match[1]
        if len(folders) < 2:
            found.setdefault(folders[0] if folders else None, {}).setdefault(split, []).append(path)
    return _of_config(found, config, where, asked) if found else {}


def _of_config(found: Mapping[str | None, Splits], config: str | None, where: str, asked: bool) -> Splits:
    for each in (config,) if asked and config not in (None, "default") else (config, None, "default"):
        if each in found:
            return found[each]
    if config is None and len(found) == 1:
        return next(iter(found.values()))
    names = sorted(name for name in found if name is not None)
    problem = f"there is no config {printable(config)!r}" if config else "there are several configs"
    if not names:
        raise KfacpackError(f"{where}: {problem}; its files are of none. Leave it out: --data {where}")
    there = printable(", ".join(names))
    raise KfacpackError(f"{where}: {problem}; there are {there}. Say which: --data {where}/{printable(names[0])}")


def missing_shards(files: Iterable[str]) -> int:
    """How many of a split's files are not there, by the numbers in the names of those that are."""
    named = [match for path in files if (match := SHARD.fullmatch(path.split("/")[-1])) and match["count"]]
    counts = {match["count"] for match in named}
    return max(0, int(counts.pop()) - len(named)) if len(counts) == 1 else 0


def image_files(paths: Iterable[str], where: str) -> Splits:
    """The pictures by split; without folders for splits, all of them are `train`. `where` is for errors."""
    seen = [path for path in natural_order(paths) if path.lower().endswith(IMAGE_SUFFIXES)]
    splits: Splits = {}
    for path in seen:
        if path.count("/") == 2:
            splits.setdefault(path.split("/")[0], []).append(path)
    flat = [path for path in seen if path.count("/") == 1]
    if flat and not splits and {path.split("/")[0] for path in flat} <= set(SPLITS):
        problem = f"{printable(flat[0])!r} is in the folder of a split, and in none of a class"
        raise KfacpackError(f"{where}: {problem}; {EXPECTED}")
    return splits or ({"train": flat} if flat else {})


def read_schema(file: Path) -> tuple[Any, int]:
    """The columns that a parquet file declares, with the Hub's types if it has them; and how many rows it has."""
    import datasets
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as opened:
            return datasets.Features.from_arrow_schema(opened.schema_arrow), opened.metadata.num_rows
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        raise KfacpackError(f"{file}: is no parquet file that can be read: {first_line(error)}") from error


def has_hf_metadata(file: Path) -> bool:
    """Whether a parquet file has the Hub's types, such as the names of classes, in its metadata."""
    import pyarrow
    from pyarrow import parquet

    try:
        return b"huggingface" in (parquet.read_schema(file).metadata or {})
    except (pyarrow.ArrowException, OSError):
        return True  # what is wrong with it is told where it is read


def column(file: Path, name: str) -> list[Any]:
    import pyarrow
    from pyarrow import parquet

    try:
        return list(parquet.read_table(file, columns=[name]).column(name).to_pylist())
    except (pyarrow.ArrowException, OSError, KeyError) as error:
        raise KfacpackError(f"{file}: its column {printable(name)!r} cannot be read: {first_line(error)}") from error


def read_rows(files: Sequence[Path], split: str, features: Any | None, place: str) -> Any:
    """All rows of the files, as datasets has them; `features` are their types, where the files do not say them."""
    import datasets

    # datasets reads an Arrow copy that it maps into memory. The mapping outlives the file's name, so the copy's
    # disk space is free again when the data is let go, or when the process is killed.
    with _no_progress_bars(), TemporaryDirectory(prefix="kfacpack-") as copies:
        try:
            found = {split: [escape(str(file)) for file in files]}
            return datasets.load_dataset("parquet", data_files=found, split=split, cache_dir=copies, features=features)
        except Exception as error:  # Arrow's, datasets' and the system's errors have no common base
            cause = first_line(error.__cause__ or error)
            raise KfacpackError(f"{place}: split {split!r} cannot be read: {cause}") from error


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    import datasets

    hidden = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not hidden:
            datasets.enable_progress_bars()
