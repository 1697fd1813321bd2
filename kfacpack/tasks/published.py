"""Definitions of published datasets: repository, columns, splits, class names and prompts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kfacpack.tasks.columns import RequestedColumns
from kfacpack.tasks.task import validation_indices

ClassNamesFn = Callable[[Sequence[str]], tuple[str, ...]]
"""Maps the class names that a dataset stores to words for prompts."""


def plain_names(stored: Sequence[str]) -> tuple[str, ...]:
    """Replaces the characters that stand for spaces in folder names, such as baseball_diamond or /c/church/outdoor."""
    return tuple(map(_plain_name, stored))


def _plain_name(name: str) -> str:
    folder = re.fullmatch(r"/[a-z]/(.+)", name)
    return (folder[1].replace("/", " ") if folder else name).replace("_", " ")


def names_from_table(names: Mapping[str, str]) -> ClassNamesFn:
    """Returns a function that looks class names up in a table.

    Args:
        names: Words by stored name. Case, spaces and punctuation are ignored. Names that are not in the table are
            converted by `plain_names`.
    """
    table = {_alphanumeric(name): words for name, words in names.items()}
    return lambda stored: tuple(table.get(_alphanumeric(name)) or _plain_name(name) for name in stored)


def _alphanumeric(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


IMAGE_COLUMNS = {"image": ("image", "img")}
"""Columns of a dataset of images."""
VALIDATION = ("validation", "valid", "val", "dev")
"""Names of a validation split."""
DEFAULT_SPLITS = {"train": ("train",), "validation": VALIDATION, "test": ("test",)}
HIDDEN_TEST_SPLITS = {"train": ("train",), "test": ("validation", "test")}
"""If the labels of `test` are not public, `validation` is used as `test`, and `train` is split for validation."""


@dataclass(frozen=True)
class PublishedTask:
    """Definition of a published dataset. Creating one neither reads nor downloads any data."""

    name: str
    """Name of the task."""
    repository: str
    """Repository on the Hub, `owner/repository`."""
    license: str | None
    """License as stated by the owners of the data; None if they state none."""
    classes: int
    """Number of classes."""
    stored: Mapping[str, int]
    """Number of examples of each split that is stored in the repository."""
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: IMAGE_COLUMNS)
    """Possible column names, by key in the example; the repository's own name comes first."""
    label: tuple[str, ...] = ("label", "labels")
    """Possible names of the label column."""
    config: str | None = None
    """Config of the repository."""
    revision: str | None = None
    """Revision of the repository; None for the main branch."""
    splits: Mapping[str, tuple[str, ...]] | None = None
    """Possible names of the stored split, by split; the first that exists is used. Other stored
    splits, such as corrupted copies of `test`, are ignored."""
    prompts: tuple[str, ...] | Callable[[], tuple[str, ...]] = ()
    """Prompt templates, with {} in place of the class name, or a function that reads them from a package."""
    words: ClassNamesFn = plain_names
    """Maps the stored class names to words for prompts."""
    drops_unlabelled: bool = False
    """Whether rows without a label are left out; otherwise they are an error."""
    gated: bool = False
    """Whether users have to accept terms on the Hub."""

    @property
    def templates(self) -> tuple[str, ...]:
        """Prompt templates, with {} in place of the class name; empty for texts."""
        return self.prompts() if callable(self.prompts) else self.prompts

    @property
    def split_names(self) -> Mapping[str, tuple[str, ...]]:
        """Possible names of the stored split, by split."""
        return self.splits or DEFAULT_SPLITS

    @property
    def requested_columns(self) -> RequestedColumns:
        """Columns to look for in a copy of the data."""
        return RequestedColumns(self.inputs, self.label, required=False)

    @property
    def sizes(self) -> dict[str, int]:
        """Number of examples of each split in the repository's data."""
        if "validation" in self.stored:
            return dict(self.stored)
        held_out = len(validation_indices(self.stored["train"]))
        others = {split: size for split, size in self.stored.items() if split != "train"}
        return {"train": self.stored["train"] - held_out, "validation": held_out, **others}

    @property
    def url(self) -> str:
        """Page of the dataset on the Hub."""
        return f"https://huggingface.co/datasets/{self.repository}"
