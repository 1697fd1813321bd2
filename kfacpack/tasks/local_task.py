"""Pictures whose pixels have more than eight bits.

A split of a task in files: its examples, read when they are asked for.

A task in files: parquet as the Hub lays it out, or pictures in a folder per class; in a folder, or on the Hub.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kfacpack.errors import KfacpackError, first_line, printable
from kfacpack.tasks import data_files
from kfacpack.tasks.columns import IMAGE, Columns, RequestedColumns, find_columns, is_image
from kfacpack.tasks.data_files import Splits, declared_features, image_files, missing_shards, shards
from kfacpack.tasks.data_sources import DataSource, LocalFolder
from kfacpack.tasks.published import VALIDATION, PublishedTask
from kfacpack.tasks.task import DataOrigin, Example, validation_indices

if TYPE_CHECKING:
    from PIL.Image import Image


WHITE = 2**16 - 1
SIXTEEN_BITS = ("PNG", "PPM")
"""Formats whose numbers have at most as many, though Pillow holds them in more."""


def eight_bit(picture: Image) -> Image:
    """The same picture, with grey of 16 bits scaled to 8; a ValueError for numbers of which nobody says what is white.

    Pillow's own conversion to RGB cuts such pixels off at 255, which turns the whole picture white.
    """
    if picture.mode not in ("I", "F") and not picture.mode.startswith("I;16"):
        return picture
    from PIL import Image

    if picture.mode == "F" or (picture.mode == "I" and picture.format not in SIXTEEN_BITS):
        kind = "floating-point" if picture.mode == "F" else "32-bit"
        raise ValueError(f"its pixels are {kind} numbers, expected 8 or 16 bits; store it as PNG or JPEG")
    made = Image.fromarray((np.asarray(picture) // (WHITE // 255)).astype(np.uint8))
    made.format = picture.format
    return made


class LocalSplit:
    def __init__(
        self,
        data: Any,
        columns: Columns,
        source: DataOrigin,
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
            example = {column: row[stored] for column, stored in self._columns.inputs.items()}
            if example.get(IMAGE) is not None:
                example[IMAGE] = eight_bit(example[IMAGE])
        except Exception as error:  # what Pillow raises has no common base: sizes, damaged EXIF, broken files
            raise KfacpackError(f"{self._place(index)}: its picture cannot be read: {first_line(error)}") from error
        if empty := [column for column, value in example.items() if value is None]:
            raise KfacpackError(f"{self._place(index)}: {empty[0]!r} is null; leave such rows out")
        return example

    def label(self, index: int) -> int:
        if self._columns.label is None:
            remedy = "--columns says which of texts or whole numbers to take: label=COLUMN"
            raise KfacpackError(f"{self.source.dataset}: there is no column of class labels. {remedy}")
        label = self._labels[self._rows[index]]
        if label not in self._classes:
            said = printable(str(label))
            raise KfacpackError(f"{self._place(index)}: its label is {said}, which is no class; leave such rows out")
        return self._classes[label]

    @cached_property
    def _classes(self) -> dict[Any, int]:
        """What the label's column holds -> the class."""
        classes = self._columns.values or range(len(self._columns.classes or ()))
        return {value: number for number, value in enumerate(classes)}

    @cached_property
    def _labels(self) -> list[Any]:
        return list(self._data[self._columns.label])

    def _place(self, index: int) -> str:
        row = self._rows[index]
        return str(self._files[row]) if self._files else f"{self.source.dataset}, split {self._stored!r}, row {row}"


CARD = "README.md"
TEMPLATES = ("a photo of a {}.",)


class LocalTask:
    """Splits are found by looking at names; files are opened, or fetched, when a split is asked for.

    There is always a split `validation` where there is `train`, unless that has fewer than ten examples: the data's
    own (it may be called valid, val or dev), or else a tenth of `train`, at most 5000, always the same ones; `train`
    is then the rest.

    Of a published task, its definition says which split serves as which, what the columns are, how classes are called
    in a prompt, and whether rows without a label are left out.
    """

    def __init__(
        self,
        name: str,
        data: DataSource | str | os.PathLike[str],
        definition: PublishedTask | None = None,
        columns: RequestedColumns | None = None,
        config: str | None = None,
    ):
        """`columns`: instead of the definition's, or of those found by type. `config`: likewise."""
        self.name = name
        self.place: DataSource = LocalFolder(Path(data)) if isinstance(data, str | os.PathLike) else data
        self.definition = definition
        self._listings: dict[str, list[tuple[str, str]]] = {}
        self._wanted = columns or (definition.wanted if definition else None)
        asked = config is not None
        self._config = config = config or (definition.config if definition else None)
        paths = self.place.paths()
        self._shards = self._arranged(shards(paths, config, self.place.name, asked=asked))
        by_class = not self._shards and self.place.at_hand  # thousands of pictures are not fetched one by one
        self._pictures = self._arranged(image_files(paths, self.place.name)) if by_class else {}
        if not self._found:
            found = ", ".join(sorted({path.split("/")[0] for path in paths})[:5]) or "nothing"
            raise KfacpackError(f"{self.place.name}: found {printable(found)}; {self.place.expected}")

    @property
    def _found(self) -> Splits:
        """Split -> its files, of those splits that have files of their own."""
        return self._shards or self._pictures

    def _arranged(self, stored: Splits) -> Splits:
        """Train first; the first of the names that a split may have is that split.

        A definition says which these are, and leaves all other splits alone; else only `validation` has several.
        """
        serving = self.definition.serving if self.definition else {"validation": VALIDATION}
        taken = {ours: next((name for name in names if name in stored), None) for ours, names in serving.items()}
        splits = {ours: stored[name] for ours, name in taken.items() if name is not None}
        if self.definition is None:
            splits |= {name: files for name, files in stored.items() if name not in taken.values()}
        return dict(sorted(splits.items(), key=lambda item: item[0] != "train"))

    @property
    def splits(self) -> tuple[str, ...]:
        own = tuple(self._found)
        return (own[0], "validation", *own[1:]) if self._held_out else own

    @cached_property
    def classes(self) -> tuple[str, ...] | None:
        stored = self._stored_classes
        return self.definition.words(stored) if self.definition and stored is not None else stored

    @cached_property
    def _stored_classes(self) -> tuple[str, ...] | None:
        """By the names that they have in the files."""
        if self._pictures:
            return tuple(sorted({path.split("/")[-2] for files in self._pictures.values() for path in files}))
        return tuple(map(str, self._values)) if self._columns.by_value else self._columns.classes

    @cached_property
    def _values(self) -> tuple[Any, ...]:
        """The classes of a label that has no type of its own: all that it is in `train`."""
        found = {value for value in self._read_labels(self._first) if not _unlabelled(value)}
        if not found:
            raise KfacpackError(f"{self.place.name}: column {printable(str(self._columns.label))!r} holds no label")
        return tuple(sorted(found))

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        return {split: len(self._taken(split)) for split in self.splits}

    @property
    def templates(self) -> tuple[str, ...]:
        if not self._pictures and IMAGE not in self._columns.inputs:
            return ()
        return self.definition.templates if self.definition else TEMPLATES

    @property
    def source(self) -> str:
        return self.place.source

    @property
    def license(self) -> str | None:
        return self.definition.license if self.definition else None

    def notices(self, model: str) -> tuple[str, ...]:
        return () if self._pictures else tuple(f"{printable(self.name)}: {said}" for said in self._said())

    def _said(self) -> Iterator[str]:
        columns = self._columns
        if columns.by_type:
            taken = printable(", ".join(columns.inputs.values()))
            yield f"its columns have other names than those that are known; taken by their types: {taken}"
        # Of a task that is known, texts are its classes' names; numbers are none, but where it is about numbers.
        if columns.by_value and (self.definition is None or not any(isinstance(each, str) for each in self._values)):
            values = printable(", ".join(self._stored_classes or ()))
            yield f"{len(self._values)} classes, the values of column {columns.label!r} in {self._first}: {values}"
        for split, files in self._shards.items():
            if missing := missing_shards(files):
                yield f"of {split}, {len(files) + missing} files, {missing} {'is' if missing == 1 else 'are'} not here"
        if self._drops:
            left = {split: self._rows(split) - len(self._kept(split)) for split in self._shards}
            if any(left.values()):
                counts = ", ".join(f"{count:,} of {split}" for split, count in left.items())
                yield f"rows without a label are left out: {counts}"

    @property
    def _first(self) -> str:
        """The split that says what the columns and classes are: `train`, if there is one."""
        return next(iter(self._found))

    @property
    def _drops(self) -> bool:
        return self.definition is not None and self.definition.drops_unlabelled

    @cached_property
    def _columns(self) -> Columns:
        file = self.place.file(self._shards[self._first][0])
        return find_columns(self._declared or data_files.read_schema(file)[0], str(file), self._wanted)

    @cached_property
    def _declared(self) -> Any | None:
        """The columns' types as the data's card has them, if the files have none of the Hub's and the same columns."""
        file = self.place.file(self._shards[self._first][0])
        if CARD not in self.place.paths() or data_files.has_hf_metadata(file):
            return None
        text = self.place.file(CARD).read_text(encoding="utf-8", errors="replace")
        found = declared_features(text, self._config)
        return found if found and set(found) == set(data_files.read_schema(file)[0]) else None

    def _rows(self, split: str) -> int:
        """How many examples are in its files."""
        if self._pictures:
            return len(self._pictures[split])
        return sum(data_files.read_schema(self.place.file(path))[1] for path in self._shards[split])

    def _kept(self, split: str) -> Sequence[int]:
        """Which examples of a split's files are examples of the task."""
        if not self._drops or self._pictures:
            return range(self._rows(split))
        return [row for row, value in enumerate(self._read_labels(split)) if not _unlabelled(value)]

    def _read_labels(self, split: str) -> list[Any]:
        column = self._columns.label
        files = [self.place.file(path) for path in self._shards[split]] if column else []
        return [value for file in files for value in data_files.column(file, str(column))]

    @cached_property
    def _held_out(self) -> Sequence[int]:
        """Which examples of `train` are those of `validation`, by their place among those that are kept."""
        if "train" not in self._found or "validation" in self._found:
            return ()
        return validation_indices(len(self._kept("train")))

    def _taken(self, name: str) -> Sequence[int]:
        """Which examples of its files are in a split."""
        if name not in ("train", "validation") or not self._held_out:
            return self._kept(name)
        kept, held = self._kept("train"), set(self._held_out)
        return [row for place, row in enumerate(kept) if (place in held) == (name == "validation")]

    def listing(self, split: str) -> list[tuple[str, str]]:
        """Paths are from the folder on."""
        stored = split if split in self._found else "train"
        if stored not in self._listings:
            self._listings[stored] = [(path, self.place.digest(path)) for path in self._found[stored]]
        return self._listings[stored]

    def split(self, name: str) -> LocalSplit:
        # What has files of its own is there without a look at any other split's, which would have to be fetched.
        if name not in self._found and name not in self.splits:
            there = ", ".join(self.splits)
            raise KfacpackError(f"{self.place.name}: no split {printable(name)!r}; there are {there}. {self._expected}")
        stored = name if name in self._found else "train"
        data = self._read_pictures(stored) if self._pictures else self._read_shards(stored)
        columns = find_columns(data.features, self.place.name, None if self._pictures else self._wanted)
        if columns.by_value:
            columns = replace(columns, values=self._values)
        elif columns.classes != self._stored_classes:
            raise KfacpackError(f"{self.place.name}: the classes of {name!r} are not those of {self._first!r}")
        if IMAGE in columns.inputs and not is_image(data.features[columns.inputs[IMAGE]]):
            import datasets

            data = data.cast_column(columns.inputs[IMAGE], datasets.Image())
        origin = DataOrigin(self.source, name, self.license, self.place.revision)
        files = [self.place.file(path) for path in self._pictures.get(stored, ())]
        return LocalSplit(data, columns, origin, self._taken(name), stored, files or None)

    @property
    def _expected(self) -> str:
        return self.place.expected[0].upper() + self.place.expected[1:]

    def _read_shards(self, name: str) -> Any:
        if not self._rows(name):
            raise KfacpackError(f"{self.place.name}: split {name!r} has no examples")
        files = [self.place.file(path) for path in self._shards[name]]
        return data_files.read_rows(files, name, self._declared, self.place.name)

    def _read_pictures(self, name: str) -> Any:
        import datasets

        classes, paths = list(self._stored_classes or ()), self._pictures[name]
        number = {each: k for k, each in enumerate(classes)}
        labels = [number[path.split("/")[-2]] for path in paths]
        features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=classes))
        files = [str(self.place.file(path)) for path in paths]
        return datasets.Dataset.from_dict({"image": files, "label": labels}, features)


def _unlabelled(value: Any) -> bool:
    """Data sets write a label that is not known as -1, as a dash, or not at all."""
    return value is None or value in ("", "-", -1)
