"""Tasks from local files or from the Hub: parquet files, JSON Lines files, or images in class folders.

Examples are read when they are accessed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kfacpack._compat import require
from kfacpack.errors import KfacpackError, first_line, printable
from kfacpack.tasks import data_files
from kfacpack.tasks.data_files import Splits, declared_features, image_files, missing_shards, parquet_files
from kfacpack.tasks.data_sources import (
    IMAGE,
    Columns,
    DataSource,
    LocalFolder,
    RequestedColumns,
    find_columns,
    is_image,
)
from kfacpack.tasks.published_tasks import VALIDATION, PublishedTask
from kfacpack.tasks.task import DataOrigin, Example, validation_indices

if TYPE_CHECKING:
    from PIL.Image import Image


WHITE = 2**16 - 1
SIXTEEN_BITS = ("PNG", "PPM")
"""Image formats with at most 16 bits per channel, which Pillow nevertheless decodes to 32-bit integers."""


def to_8_bit(image: Image) -> Image:
    """Scales 16-bit greyscale images to 8 bits and returns other images unchanged.

    Pillow's own conversion to RGB clips 16-bit pixel values at 255, which turns the image white.

    Raises:
        ValueError: If the pixel values are floating-point or 32-bit numbers, for which the value of white is unknown.
    """
    if image.mode not in ("I", "F") and not image.mode.startswith("I;16"):
        return image
    from PIL import Image

    if image.mode == "F" or (image.mode == "I" and image.format not in SIXTEEN_BITS):
        kind = "floating-point" if image.mode == "F" else "32-bit"
        problem = f"the pixel values are {kind} numbers, expected 8-bit or 16-bit integers"
        raise ValueError(f"{problem}; store the image as PNG or JPEG")
    scaled = Image.fromarray((np.asarray(image) // (WHITE // 255)).astype(np.uint8))
    scaled.format = image.format
    return scaled


class LocalSplit:
    """A split of a `LocalTask`. Implements `Split`."""

    def __init__(
        self,
        data: Any,
        columns: Columns,
        source: DataOrigin,
        rows: Sequence[int],
        stored: str,
        files: Sequence[Path] | None,
    ):
        """Creates a split.

        Args:
            data: `datasets.Dataset` with all rows of the files.
            columns: Input and label columns.
            source: Origin of the data, as recorded in manifests.
            rows: Rows of the data that belong to the split.
            stored: Name of the split in the data, for error messages.
            files: Path of the image file of each row; None if the rows are stored in parquet or JSON Lines files.
        """
        self.source = source
        self._rows, self._stored, self._files = rows, stored, files
        self._columns = columns
        self._data = data
        self._inputs = data.select_columns(list(columns.inputs.values()))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Example:
        try:
            row = self._inputs[self._rows[index]]
            example = {key: row[column] for key, column in self._columns.inputs.items()}
            if example.get(IMAGE) is not None:
                example[IMAGE] = to_8_bit(example[IMAGE])
        except Exception as error:  # Pillow's errors for sizes, EXIF data and damaged files have no common base class
            raise KfacpackError(f"{self._location(index)}: the image cannot be read: {first_line(error)}") from error
        if empty := [key for key, value in example.items() if value is None]:
            raise KfacpackError(f"{self._location(index)}: {empty[0]!r} is null; remove rows with null values")
        return example

    def label(self, index: int) -> int:
        """Returns the class of an example as an index into the task's `classes`.

        Raises:
            KfacpackError: If there is no label column, or the label is not a class.
        """
        if self._columns.label is None:
            remedy = "Select a column of strings or integers: --columns label=COLUMN (columns='label=COLUMN')"
            raise KfacpackError(f"{self.source.dataset}: the data has no column of class labels. {remedy}")
        label = self._labels[self._rows[index]]
        if label not in self._class_of:
            text = printable(str(label))
            raise KfacpackError(f"{self._location(index)}: label {text} is not a class; remove rows with this label")
        return self._class_of[label]

    @cached_property
    def _class_of(self) -> dict[Any, int]:
        """Class index for each value of the label column."""
        values = self._columns.values or range(len(self._columns.classes or ()))
        return {value: number for number, value in enumerate(values)}

    @cached_property
    def _labels(self) -> list[Any]:
        return list(self._data[self._columns.label])

    def _location(self, index: int) -> str:
        row = self._rows[index]
        return str(self._files[row]) if self._files else f"{self.source.dataset}, split {self._stored!r}, row {row}"


CARD = "README.md"
TEMPLATES = ("a photo of a {}.",)
"""Prompt templates of image tasks that are not published tasks."""


class LocalTask:
    """A task whose examples are read from files. Implements `Task`.

    Splits are recognised by the names of files and folders. Files are opened or downloaded when a split is read. A
    stored split named valid, val or dev becomes `validation`. If the data has no validation split, a fixed tenth of
    `train`, but at most 5000 examples, is held out as `validation` and excluded from `train`. If `train` has fewer than
    ten examples, there is no `validation`.

    The definition of a published task determines the mapping of stored splits, the columns, the class names in prompts,
    and whether rows without a label are left out.
    """

    def __init__(
        self,
        name: str,
        data: DataSource | str | os.PathLike[str],
        definition: PublishedTask | None = None,
        columns: RequestedColumns | None = None,
        config: str | None = None,
    ):
        """Finds the files of a task.

        Args:
            name: Name of the task.
            data: A folder or another data source.
            definition: Definition of the task, if it is a published task.
            columns: Columns to use. Defaults to those in the definition; without a definition, they are found by type.
            config: Config to use. Defaults to the config in the definition.

        Raises:
            KfacpackError: If there are no data files.
        """
        require("datasets")
        self.name = name
        self.data_source: DataSource = LocalFolder(Path(data)) if isinstance(data, str | os.PathLike) else data
        self.definition = definition
        self._listings: dict[str, list[tuple[str, str]]] = {}
        self._requested = columns or (definition.requested_columns if definition else None)
        exact = config is not None
        self._config = config = config or (definition.config if definition else None)
        paths = self.data_source.paths()
        self._shards = self._arrange(parquet_files(paths, config, self.data_source.name, exact=exact))
        by_class = not self._shards and self.data_source.is_local  # do not download thousands of images one by one
        self._images = self._arrange(image_files(paths, self.data_source.name)) if by_class else {}
        if not self._files:
            content = ", ".join(sorted({path.split("/")[0] for path in paths})[:5]) or "nothing"
            raise KfacpackError(f"{self.data_source.name}: found {printable(content)}; {self.data_source.expected}")

    @property
    def _files(self) -> Splits:
        """File paths of each split that has its own files."""
        return self._shards or self._images

    def _arrange(self, stored: Splits) -> Splits:
        """Maps stored splits to splits of the task, with `train` first.

        If a split has several possible names, the first existing name is used. If the task has a definition, stored
        splits that the definition does not name are ignored. Otherwise, only `validation` has several possible names.
        """
        names_of = self.definition.split_names if self.definition else {"validation": VALIDATION}
        chosen = {split: next((name for name in names if name in stored), None) for split, names in names_of.items()}
        splits = {split: stored[name] for split, name in chosen.items() if name is not None}
        if self.definition is None:
            splits |= {name: files for name, files in stored.items() if name not in chosen.values()}
        return dict(sorted(splits.items(), key=lambda item: item[0] != "train"))

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        own = tuple(self._files)
        return (own[0], "validation", *own[1:]) if self._held_out else own

    @cached_property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes; None if there is no label column."""
        stored = self._stored_classes
        return self.definition.words(stored) if self.definition and stored is not None else stored

    @cached_property
    def _stored_classes(self) -> tuple[str, ...] | None:
        """Names of the classes as stored in the files, before they are mapped to words for prompts."""
        if self._images:
            return tuple(sorted({path.split("/")[-2] for files in self._images.values() for path in files}))
        return tuple(map(str, self._values)) if self._columns.by_value else self._columns.classes

    @cached_property
    def _values(self) -> tuple[Any, ...]:
        """Classes of a label column without class names: the sorted distinct values in the first split."""
        values = {value for value in self._read_labels(self._first_split) if not _is_unlabelled(value)}
        if not values:
            raise KfacpackError(
                f"{self.data_source.name}: column {printable(str(self._columns.label))!r} contains no labels"
            )
        return tuple(sorted(values))

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Number of examples in each split."""
        return {split: len(self._split_rows(split)) for split in self.splits}

    @property
    def templates(self) -> tuple[str, ...]:
        """Prompt templates, with {} in place of the class name; empty for text tasks."""
        if not self._images and IMAGE not in self._columns.inputs:
            return ()
        return self.definition.templates if self.definition else TEMPLATES

    @property
    def source(self) -> str:
        """Name of the folder or repository."""
        return self.data_source.source

    @property
    def license(self) -> str | None:
        """License of a published task, if known."""
        return self.definition.license if self.definition else None

    def notices(self, model: str) -> tuple[str, ...]:
        """Returns notes about columns found by type, classes without names, and missing files or labels."""
        return () if self._images else tuple(f"{printable(self.name)}: {notice}" for notice in self._notices())

    def _notices(self) -> Iterator[str]:
        columns = self._columns
        if columns.by_type:
            names = printable(", ".join(columns.inputs.values()))
            yield f"the expected columns are missing; the input columns were found by type: {names}"
        # In a published task, string labels are class names and need no note; integer labels need one.
        if columns.by_value and (self.definition is None or not any(isinstance(value, str) for value in self._values)):
            values = printable(", ".join(self._stored_classes or ()))
            count = len(self._values)
            subject = "the only class is the value" if count == 1 else f"the {count} classes are the values"
            yield f"{subject} of column {columns.label!r} in {self._first_split}: {values}"
        for split, files in self._shards.items():
            if missing := missing_shards(files):
                verb = "is" if missing == 1 else "are"
                yield f"{missing} of {len(files) + missing} files of split {split!r} {verb} missing"
        if self._drops_unlabelled:
            dropped = {split: self._num_rows(split) - len(self._labelled_rows(split)) for split in self._shards}
            if any(dropped.values()):
                counts = ", ".join(f"{count:,} in {split}" for split, count in dropped.items())
                yield f"rows without a label are left out: {counts}"

    @property
    def _first_split(self) -> str:
        """The split that determines the columns and classes: `train` if it exists, otherwise the first split."""
        return next(iter(self._files))

    @property
    def _drops_unlabelled(self) -> bool:
        return self.definition is not None and self.definition.drops_unlabelled

    @cached_property
    def _columns(self) -> Columns:
        file = self.data_source.file(self._shards[self._first_split][0])
        return find_columns(self._declared or data_files.read_schema(file)[0], str(file), self._requested)

    @cached_property
    def _declared(self) -> Any | None:
        """Column types from the dataset card.

        None if there is no card, if the files contain the column types, or if the card describes different columns.
        """
        file = self.data_source.file(self._shards[self._first_split][0])
        if CARD not in self.data_source.paths() or data_files.has_hf_metadata(file):
            return None
        text = self.data_source.file(CARD).read_text(encoding="utf-8", errors="replace")
        features = declared_features(text, self._config)
        return features if features and set(features) == set(data_files.read_schema(file)[0]) else None

    def _num_rows(self, split: str) -> int:
        """Returns the number of examples in the files of a split."""
        if self._images:
            return len(self._images[split])
        return sum(data_files.read_schema(self.data_source.file(path))[1] for path in self._shards[split])

    def _labelled_rows(self, split: str) -> Sequence[int]:
        """Returns the row numbers in the files of a split, except unlabelled rows if the definition drops them."""
        if not self._drops_unlabelled or self._images:
            return range(self._num_rows(split))
        return [row for row, value in enumerate(self._read_labels(split)) if not _is_unlabelled(value)]

    def _read_labels(self, split: str) -> list[Any]:
        column = self._columns.label
        files = [self.data_source.file(path) for path in self._shards[split]] if column else []
        return [value for file in files for value in data_files.read_column(file, str(column))]

    @cached_property
    def _held_out(self) -> Sequence[int]:
        """The examples of `train` held out for `validation`, as indices into the labelled rows."""
        if "train" not in self._files or "validation" in self._files:
            return ()
        return validation_indices(len(self._labelled_rows("train")))

    def _split_rows(self, name: str) -> Sequence[int]:
        """Returns the examples of a split, as row numbers in the files of the stored split."""
        if name not in ("train", "validation") or not self._held_out:
            return self._labelled_rows(name)
        rows, held_out = self._labelled_rows("train"), set(self._held_out)
        return [row for position, row in enumerate(rows) if (position in held_out) == (name == "validation")]

    def _stored_split(self, name: str) -> str:
        """Returns the name of the stored split from which the examples of a split are taken."""
        return name if name in self._files else "train"

    def listing(self, split: str) -> list[tuple[str, str]]:
        """Returns the path and a content digest of each file of a split."""
        stored = self._stored_split(split)
        if stored not in self._listings:
            self._listings[stored] = [(path, self.data_source.digest(path)) for path in self._files[stored]]
        return self._listings[stored]

    def split(self, name: str) -> LocalSplit:
        """Opens a split by name.

        Raises:
            KfacpackError: If there is no such split, its files cannot be read, or its input columns or classes
                differ from those of `train`.
        """
        # For a stored split, avoid `splits`, which may download the files of `train`.
        if name not in self._files and name not in self.splits:
            problem = f"unknown split {printable(str(name))!r}; available splits: {', '.join(self.splits)}"
            expected = self.data_source.expected[0].upper() + self.data_source.expected[1:]
            raise KfacpackError(f"{self.data_source.name}: {problem}. {expected}")
        stored = self._stored_split(name)
        data = self._read_images(stored) if self._images else self._read_shards(stored)
        columns = find_columns(data.features, self.data_source.name, None if self._images else self._requested)
        if not self._images and columns.inputs.keys() != self._columns.inputs.keys():
            inputs = (printable(", ".join(part.inputs)) for part in (columns, self._columns))
            problem = f"the input columns of split {name!r} ({next(inputs)})"
            expected = f"those of split {self._first_split!r} ({next(inputs)})"
            remedy = "Select columns that all splits have: --columns (columns=…)"
            raise KfacpackError(f"{self.data_source.name}: {problem} differ from {expected}. {remedy}")
        if columns.by_value:
            columns = replace(columns, values=self._values)
        elif columns.classes != self._stored_classes:
            problem = f"the classes of split {name!r} differ from those of split {self._first_split!r}"
            raise KfacpackError(f"{self.data_source.name}: {problem}")
        if IMAGE in columns.inputs and not is_image(data.features[columns.inputs[IMAGE]]):
            import datasets

            data = data.cast_column(columns.inputs[IMAGE], datasets.Image())
        origin = DataOrigin(self.source, name, self.license, self.data_source.revision)
        files = [self.data_source.file(path) for path in self._images.get(stored, ())]
        return LocalSplit(data, columns, origin, self._split_rows(name), stored, files or None)

    def _read_shards(self, name: str) -> Any:
        if not self._num_rows(name):
            raise KfacpackError(f"{self.data_source.name}: split {name!r} has no examples")
        files = [self.data_source.file(path) for path in self._shards[name]]
        return data_files.read_rows(files, name, self._declared, self.data_source.name)

    def _read_images(self, name: str) -> Any:
        import datasets

        classes, paths = list(self._stored_classes or ()), self._images[name]
        class_of = {stored: number for number, stored in enumerate(classes)}
        labels = [class_of[path.split("/")[-2]] for path in paths]
        features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=classes))
        files = [str(self.data_source.file(path)) for path in paths]
        return datasets.Dataset.from_dict({"image": files, "label": labels}, features)


def _is_unlabelled(value: Any) -> bool:
    """Returns whether a value denotes a missing label: datasets use null, -1, a dash or an empty string."""
    return value is None or value in ("", "-", -1)
