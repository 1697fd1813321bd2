"""A task in a folder of the user's: parquet files as the Hub lays them out, or pictures in a folder per class."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kfacpack.errors import KfacpackError, printable
from kfacpack.tasks.base import Example, Origin
from kfacpack.tasks.columns import Columns, find_columns

EXPECTED = (
    "expected train-*.parquet and test-*.parquet, there or in data/, or pictures in CLASS/ or in train/CLASS/ and "
    "test/CLASS/"
)
PICTURES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
TEMPLATES = ("a photo of a {}.",)
SHARD = re.compile(r"(.+?)(-\d+-of-\d+)?\.parquet")


class LocalTask:
    """Splits are found by looking at names; files are opened when a split is asked for."""

    def __init__(self, name: str, folder: Path):
        self.name = name
        self.folder = folder
        try:
            if not folder.is_dir():
                raise KfacpackError(f"{folder}: {'is no folder' if folder.exists() else 'no such folder'}; {EXPECTED}")
            self._shards = _shards(folder)
            self._pictures = {} if self._shards else _pictures(folder)
        except OSError as error:
            raise KfacpackError(f"{folder}: cannot be read: {error.strerror}") from error
        if not self.splits:
            found = ", ".join(sorted(each.name for each in folder.iterdir())[:5]) or "nothing"
            raise KfacpackError(f"{folder}: found {printable(found)}; {EXPECTED}")

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._shards or self._pictures)

    @cached_property
    def classes(self) -> tuple[str, ...] | None:
        if self._pictures:
            return tuple(sorted({file.parent.name for files in self._pictures.values() for file in files}))
        return self._columns.classes

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        if self._pictures:
            return {split: len(files) for split, files in self._pictures.items()}
        return {split: self._rows(split) for split in self._shards}

    @property
    def templates(self) -> tuple[str, ...]:
        return TEMPLATES if self._pictures or "image" in self._columns.inputs else ()

    @property
    def source(self) -> str:
        return self.folder.resolve().name

    @property
    def license(self) -> str | None:
        return None

    @cached_property
    def _columns(self) -> Columns:
        first = next(iter(self._shards.values()))[0]
        return find_columns(_looked_into(first)[0], first)

    def _rows(self, split: str) -> int:
        return sum(_looked_into(file)[1] for file in self._shards[split])

    def split(self, name: str) -> LocalSplit:
        if name not in self.splits:
            raise KfacpackError(
                f"{self.folder}: no split {printable(name)!r}; there are {', '.join(self.splits)}. {EXPECTED}"
            )
        data = self._read_pictures(name) if self._pictures else self._read_shards(name)
        columns = find_columns(data.features, self.folder)
        if columns.classes != self.classes:
            raise KfacpackError(f"{self.folder}: the classes of {name!r} are not those of {self.splits[0]!r}")
        return LocalSplit(data, columns, Origin(dataset=self.source, split=name), self._pictures.get(name))

    def _read_shards(self, name: str) -> Any:
        import datasets

        if not self._rows(name):
            raise KfacpackError(f"{self.folder}: split {name!r} has no examples")
        files = [escape(str(file)) for file in self._shards[name]]
        # datasets reads an Arrow copy that it maps into memory. The mapping outlives the file's name, so the copy's
        # disk space is free again when the data is let go, or when the process is killed.
        with _no_progress_bars(), TemporaryDirectory(prefix="kfacpack-") as copies:
            try:
                return datasets.load_dataset("parquet", data_files={name: files}, split=name, cache_dir=copies)
            except Exception as error:  # Arrow's, datasets' and the system's errors have no common base
                cause = str(error.__cause__ or error).splitlines()[0]
                raise KfacpackError(f"{self.folder}: split {name!r} cannot be read: {printable(cause)}") from error

    def _read_pictures(self, name: str) -> Any:
        import datasets

        classes, files = list(self.classes or ()), self._pictures[name]
        labels = [classes.index(file.parent.name) for file in files]
        features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=classes))
        return datasets.Dataset.from_dict({"image": [str(file) for file in files], "label": labels}, features)


class LocalSplit:
    def __init__(self, data: Any, columns: Columns, source: Origin, files: Sequence[Path] | None):
        """`files`: the picture of each example, where each has one."""
        self.source = source
        self._files = files
        self._columns = columns
        self._data = data
        self._examples = data.select_columns(list(columns.inputs.values()))

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Example:
        try:
            row = self._examples[index]
        except (OSError, SyntaxError, ValueError) as error:  # all that Pillow raises
            raise KfacpackError(f"{self._place(index)}: its picture cannot be read: {error}") from error
        example = {column: row[stored] for column, stored in self._columns.inputs.items()}
        if empty := [column for column, value in example.items() if value is None]:
            raise KfacpackError(f"{self._place(index)}: {empty[0]!r} is null; leave such rows out")
        return example

    def label(self, index: int) -> int:
        if self._columns.label is None:
            raise KfacpackError(f"{self.source.dataset}: there is no column of class labels")
        label = self._labels[index]
        classes = self._columns.classes
        if label is None or label < 0 or (classes is not None and label >= len(classes)):
            raise KfacpackError(f"{self._place(index)}: its label is {label}, which is no class; leave such rows out")
        return int(label)

    @cached_property
    def _labels(self) -> list[int | None]:
        return list(self._data[self._columns.label])

    def _place(self, index: int) -> str:
        if self._files:
            return str(self._files[index])
        return f"{self.source.dataset}, split {self.source.split!r}, row {index}"


def _shards(folder: Path) -> dict[str, list[Path]]:
    """Split -> its files, train first."""
    files: dict[str, list[Path]] = {}
    for file in sorted([*folder.glob("*.parquet"), *folder.glob("data/*.parquet")]):
        if match := SHARD.fullmatch(file.name):
            files.setdefault(match[1], []).append(file)
    return dict(sorted(files.items(), key=lambda item: item[0] != "train"))


def _pictures(folder: Path) -> dict[str, list[Path]]:
    """Split -> its pictures; without folders for splits, all of them are `train`."""

    def below(pattern: str) -> list[Path]:
        return sorted(file for file in folder.glob(pattern) if file.suffix.lower() in PICTURES)

    splits: dict[str, list[Path]] = {}
    for file in below("*/*/*"):
        splits.setdefault(file.parts[-3], []).append(file)
    if not splits and (files := below("*/*")):
        splits["train"] = files
    return dict(sorted(splits.items(), key=lambda item: item[0] != "train"))


def _looked_into(file: Path) -> tuple[Any, int]:
    """The columns that a parquet file declares, with the Hub's types if it has them; and how many rows it has."""
    import datasets
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as opened:
            return datasets.Features.from_arrow_schema(opened.schema_arrow), opened.metadata.num_rows
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise KfacpackError(f"{file}: is no parquet file that can be read: {printable(problem)}") from error


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
