"""A task in files: parquet as the Hub lays it out, or pictures in a folder per class; in a folder, or on the Hub."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kfacpack.errors import KfacpackError, printable
from kfacpack.tasks import parquet
from kfacpack.tasks.base import Origin
from kfacpack.tasks.card import declared_features
from kfacpack.tasks.columns import IMAGE, Columns, Wanted, find_columns, is_image
from kfacpack.tasks.holding import held_out
from kfacpack.tasks.layout import Splits, lacking, pictures, shards
from kfacpack.tasks.local_split import LocalSplit
from kfacpack.tasks.places import Folder, Place
from kfacpack.tasks.published.base import VALIDATION, Published

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
        data: Place | str | os.PathLike[str],
        definition: Published | None = None,
        columns: Wanted | None = None,
        config: str | None = None,
    ):
        """`columns`: instead of the definition's, or of those found by type. `config`: likewise."""
        self.name = name
        self.place: Place = Folder(Path(data)) if isinstance(data, str | os.PathLike) else data
        self.definition = definition
        self._listings: dict[str, list[tuple[str, str]]] = {}
        self._wanted = columns or (definition.wanted if definition else None)
        asked = config is not None
        self._config = config = config or (definition.config if definition else None)
        paths = self.place.paths()
        self._shards = self._arranged(shards(paths, config, self.place.name, asked=asked))
        by_class = not self._shards and self.place.at_hand  # thousands of pictures are not fetched one by one
        self._pictures = self._arranged(pictures(paths, self.place.name)) if by_class else {}
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
            if missing := lacking(files):
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
        return find_columns(self._declared or parquet.looked_into(file)[0], str(file), self._wanted)

    @cached_property
    def _declared(self) -> Any | None:
        """The columns' types as the data's card has them, if the files have none of the Hub's and the same columns."""
        file = self.place.file(self._shards[self._first][0])
        if CARD not in self.place.paths() or parquet.says_types(file):
            return None
        text = self.place.file(CARD).read_text(encoding="utf-8", errors="replace")
        found = declared_features(text, self._config)
        return found if found and set(found) == set(parquet.looked_into(file)[0]) else None

    def _rows(self, split: str) -> int:
        """How many examples are in its files."""
        if self._pictures:
            return len(self._pictures[split])
        return sum(parquet.looked_into(self.place.file(path))[1] for path in self._shards[split])

    def _kept(self, split: str) -> Sequence[int]:
        """Which examples of a split's files are examples of the task."""
        if not self._drops or self._pictures:
            return range(self._rows(split))
        return [row for row, value in enumerate(self._read_labels(split)) if not _unlabelled(value)]

    def _read_labels(self, split: str) -> list[Any]:
        column = self._columns.label
        files = [self.place.file(path) for path in self._shards[split]] if column else []
        return [value for file in files for value in parquet.column(file, str(column))]

    @cached_property
    def _held_out(self) -> Sequence[int]:
        """Which examples of `train` are those of `validation`, by their place among those that are kept."""
        if "train" not in self._found or "validation" in self._found:
            return ()
        return held_out(len(self._kept("train")))

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
        origin = Origin(self.source, name, self.license, self.place.revision)
        files = [self.place.file(path) for path in self._pictures.get(stored, ())]
        return LocalSplit(data, columns, origin, self._taken(name), stored, files or None)

    @property
    def _expected(self) -> str:
        return self.place.expected[0].upper() + self.place.expected[1:]

    def _read_shards(self, name: str) -> Any:
        if not self._rows(name):
            raise KfacpackError(f"{self.place.name}: split {name!r} has no examples")
        files = [self.place.file(path) for path in self._shards[name]]
        return parquet.read(files, name, self._declared, self.place.name)

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
