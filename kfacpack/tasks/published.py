"""From names of classes as data sets store them to words that can stand in a sentence.

What is known of a data set before any of it is there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kfacpack.tasks.columns import RequestedColumns
from kfacpack.tasks.task import validation_indices

ClassNamesFn = Callable[[Sequence[str]], tuple[str, ...]]


def plain_names(stored: Sequence[str]) -> tuple[str, ...]:
    """As they are, but for what folders have in the place of a space: baseball_diamond, /c/church/outdoor."""
    return tuple(map(_plain_name, stored))


def _plain_name(name: str) -> str:
    folder = re.fullmatch(r"/[a-z]/(.+)", name)
    return (folder[1].replace("/", " ") if folder else name).replace("_", " ")


def names_from_table(known: Mapping[str, str]) -> ClassNamesFn:
    """By a table; capitals, spaces and signs do not matter. What is not in it is left as it is."""
    table = {_only_letters(name): words for name, words in known.items()}
    return lambda stored: tuple(table.get(_only_letters(name)) or _plain_name(name) for name in stored)


def _only_letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


VALIDATION = ("validation", "valid", "val", "dev")
OWN_SPLITS = {"train": ("train",), "validation": VALIDATION, "test": ("test",)}
HIDDEN_TEST_SPLITS = {"train": ("train",), "test": ("validation", "test")}
"""Where the labels of `test` are kept secret, `validation` serves as test, and one is held out of `train`."""


@dataclass(frozen=True)
class PublishedTask:
    name: str
    repository: str
    license: str | None
    """As the data set's owners state it; none where they do not."""
    classes: int
    stored: Mapping[str, int]
    """Our splits that have files of their own in the repository -> how many examples."""
    inputs: Mapping[str, tuple[str, ...]]
    """An example's key -> what its column may be called, the repository's own name first."""
    label: tuple[str, ...] = ("label", "labels")
    config: str | None = None
    revision: str | None = None
    splits: Mapping[str, tuple[str, ...]] | None = None
    """Our splits -> what a split that serves as such may be called; the first that is there is taken. Others, such as
    corrupted copies of `test`, are left alone."""
    templates: tuple[str, ...] = ()
    words: Callable[[Sequence[str]], tuple[str, ...]] = plain_names
    """From the classes' names as they are stored to words that can stand in a sentence."""
    drops_unlabelled: bool = False
    """Whether rows without a label are left out; else they are an error."""
    gated: bool = False

    @property
    def serving(self) -> Mapping[str, tuple[str, ...]]:
        return self.splits or OWN_SPLITS

    @property
    def wanted(self) -> RequestedColumns:
        return RequestedColumns(self.inputs, self.label, required=False)

    @property
    def sizes(self) -> dict[str, int]:
        """Of the whole, as the repository has it."""
        if "validation" in self.stored:
            return dict(self.stored)
        held = len(validation_indices(self.stored["train"]))
        rest = {split: size for split, size in self.stored.items() if split != "train"}
        return {"train": self.stored["train"] - held, "validation": held, **rest}

    @property
    def url(self) -> str:
        return f"https://huggingface.co/datasets/{self.repository}"
