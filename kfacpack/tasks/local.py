"""A task in a folder of the user's: parquet files as the Hub lays them out, or pictures in a folder per class."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from glob import escape
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

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


VALIDATION = ("validation", "valid", "val", "dev")
"""What a split to choose on may be called; it is `validation` to us. The first that is there is taken."""
SHARE, MOST = 10, 5000
"""Without one, a tenth of `train` takes its place, and at most so many examples: as in the task arithmetic papers."""


class LocalTask:
    """Splits are found by looking at names; files are opened when a split is asked for.

    There is always a split `validation` where there is `train`, unless that has fewer than ten examples: the folder's
    own (it may be called valid, val or dev), or else a tenth of `train`, at most 5000, always the same ones; `train`
    is then the rest.
    """

    def __init__(self, name: str, folder: Path):
        self.name = name
        self.folder = folder
        self._listings: dict[str, list[tuple[str, str]]] = {}
        try:
            if not folder.is_dir():
                raise KfacpackError(f"{folder}: {'is no folder' if folder.exists() else 'no such folder'}; {EXPECTED}")
            self._shards = _arranged(_shards(folder))
            self._pictures = {} if self._shards else _arranged(_pictures(folder))
        except OSError as error:
            raise KfacpackError(f"{folder}: cannot be read: {error.strerror}") from error
        if not self._found:
            found = ", ".join(sorted(each.name for each in folder.iterdir())[:5]) or "nothing"
            raise KfacpackError(f"{folder}: found {printable(found)}; {EXPECTED}")

    @property
    def _found(self) -> Mapping[str, Sequence[Path]]:
        """Split -> its files, of those splits that have files of their own."""
        return self._shards or self._pictures

    @property
    def splits(self) -> tuple[str, ...]:
        own = tuple(self._found)
        return (own[0], "validation", *own[1:]) if self._held_out else own

    @cached_property
    def classes(self) -> tuple[str, ...] | None:
        if self._pictures:
            return tuple(sorted({file.parent.name for files in self._pictures.values() for file in files}))
        return self._columns.classes

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        return {split: len(self._taken(split)) for split in self.splits}

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
        """How many examples are in its files."""
        if self._pictures:
            return len(self._pictures[split])
        return sum(_looked_into(file)[1] for file in self._shards[split])

    @cached_property
    def _held_out(self) -> Sequence[int]:
        """Which examples of `train` are those of `validation`, by their place there."""
        if "train" not in self._found or "validation" in self._found:
            return ()
        return _spread(self._rows("train"))

    def _taken(self, name: str) -> Sequence[int]:
        """Which examples of its files are in a split."""
        if not self._held_out or name not in ("train", "validation"):
            return range(self._rows(name))
        if name == "validation":
            return self._held_out
        held = set(self._held_out)
        return [row for row in range(self._rows("train")) if row not in held]

    def listing(self, split: str) -> list[tuple[str, str]]:
        """The files that a split's examples are in, from the folder on, with the SHA-256 of their bytes.

        All bytes are read, once: a size stays as it was when pixels change, and a date changes by copying. A run reads
        them anyway, and takes longer to decode them.
        """
        stored = split if split in self._found else "train"
        if stored not in self._listings:
            self._listings[stored] = [
                (file.relative_to(self.folder).as_posix(), _digest(file)) for file in self._found[stored]
            ]
        return self._listings[stored]

    def split(self, name: str) -> LocalSplit:
        if name not in self.splits:
            raise KfacpackError(
                f"{self.folder}: no split {printable(name)!r}; there are {', '.join(self.splits)}. {EXPECTED}"
            )
        stored = name if name in self._found else "train"
        data = self._read_pictures(stored) if self._pictures else self._read_shards(stored)
        columns = find_columns(data.features, self.folder)
        if columns.classes != self.classes:
            raise KfacpackError(f"{self.folder}: the classes of {name!r} are not those of {self.splits[0]!r}")
        origin = Origin(dataset=self.source, split=name)
        return LocalSplit(data, columns, origin, self._taken(name), stored, self._pictures.get(stored))

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
    def __init__(
        self,
        data: Any,
        columns: Columns,
        source: Origin,
        rows: Sequence[int],
        stored: str,
        files: Sequence[Path] | None,
    ):
        """`rows`: which of the data are its examples. `stored`: the split the files are of, and `files`: the picture
        of each row, where each has one."""
        self.source = source
        self._rows, self._stored, self._files = rows, stored, files
        self._columns = columns
        self._data = data
        self._examples = data.select_columns(list(columns.inputs.values()))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Example:
        try:
            row = self._examples[self._rows[index]]
        except (OSError, SyntaxError, ValueError) as error:  # all that Pillow raises
            raise KfacpackError(f"{self._place(index)}: its picture cannot be read: {error}") from error
        example = {column: row[stored] for column, stored in self._columns.inputs.items()}
        if empty := [column for column, value in example.items() if value is None]:
            raise KfacpackError(f"{self._place(index)}: {empty[0]!r} is null; leave such rows out")
        return example

    def label(self, index: int) -> int:
        if self._columns.label is None:
            raise KfacpackError(f"{self.source.dataset}: there is no column of class labels")
        label = self._labels[self._rows[index]]
        classes = self._columns.classes
        if label is None or label < 0 or (classes is not None and label >= len(classes)):
            raise KfacpackError(f"{self._place(index)}: its label is {label}, which is no class; leave such rows out")
        return int(label)

    @cached_property
    def _labels(self) -> list[int | None]:
        return list(self._data[self._columns.label])

    def _place(self, index: int) -> str:
        row = self._rows[index]
        return str(self._files[row]) if self._files else f"{self.source.dataset}, split {self._stored!r}, row {row}"


def _digest(file: Path) -> str:
    try:
        found = sha256()
        with file.open("rb") as opened:
            while chunk := opened.read(1 << 20):
                found.update(chunk)
        return found.hexdigest()
    except OSError as error:
        raise KfacpackError(f"{file}: cannot be read: {error.strerror}") from error


def _spread(size: int) -> list[int]:
    """A tenth of `size` numbers below it, rising: one drawn from each of as many equal stretches.

    So every class of examples that lie in order of their classes has its share, and those that come in turns have, too.
    """
    count = min(size // SHARE, MOST)
    edges = [k * size // count for k in range(count + 1)] if count else []
    generator = np.random.Generator(np.random.Philox(key=0, counter=[0, 0, 2, 0]))
    return [int(generator.integers(start, stop)) for start, stop in pairwise(edges)]


def _arranged(splits: Mapping[str, list[Path]]) -> dict[str, list[Path]]:
    """Train first; and the first of the names that a validation split may have is `validation`."""
    own = next((name for name in VALIDATION if name in splits), None)
    renamed = {"validation" if name == own else name: files for name, files in splits.items()}
    return dict(sorted(renamed.items(), key=lambda item: item[0] != "train"))


def _shards(folder: Path) -> dict[str, list[Path]]:
    """Split -> its files."""
    files: dict[str, list[Path]] = {}
    for file in sorted([*folder.glob("*.parquet"), *folder.glob("data/*.parquet")]):
        if match := SHARD.fullmatch(file.name):
            files.setdefault(match[1], []).append(file)
    return files


def _pictures(folder: Path) -> dict[str, list[Path]]:
    """Split -> its pictures; without folders for splits, all of them are `train`."""

    def below(pattern: str) -> list[Path]:
        return sorted(file for file in folder.glob(pattern) if file.suffix.lower() in PICTURES)

    splits: dict[str, list[Path]] = {}
    for file in below("*/*/*"):
        splits.setdefault(file.parts[-3], []).append(file)
    if not splits and (files := below("*/*")):
        splits["train"] = files
    return splits


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
