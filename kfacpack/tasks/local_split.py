"""A split of a task in files: its examples, read when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from kfacpack.errors import KfacpackError, first_line, printable
from kfacpack.tasks.base import Example, Origin
from kfacpack.tasks.columns import IMAGE, Columns
from kfacpack.tasks.depth import eight_bit


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
