"""What is known of a data set before any of it is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kfacpack.tasks.columns import Wanted
from kfacpack.tasks.holding import held_out
from kfacpack.tasks.published.words import plain

VALIDATION = ("validation", "valid", "val", "dev")
OWN = {"train": ("train",), "validation": VALIDATION, "test": ("test",)}
HIDDEN = {"train": ("train",), "test": ("validation", "test")}
"""Where the labels of `test` are kept secret, `validation` serves as test, and one is held out of `train`."""


@dataclass(frozen=True)
class Published:
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
    words: Callable[[Sequence[str]], tuple[str, ...]] = plain
    """From the classes' names as they are stored to words that can stand in a sentence."""
    drops_unlabelled: bool = False
    """Whether rows without a label are left out; else they are an error."""
    gated: bool = False

    @property
    def serving(self) -> Mapping[str, tuple[str, ...]]:
        return self.splits or OWN

    @property
    def wanted(self) -> Wanted:
        return Wanted(self.inputs, self.label, required=False)

    @property
    def sizes(self) -> dict[str, int]:
        """Of the whole, as the repository has it."""
        if "validation" in self.stored:
            return dict(self.stored)
        held = len(held_out(self.stored["train"]))
        rest = {split: size for split, size in self.stored.items() if split != "train"}
        return {"train": self.stored["train"] - held, "validation": held, **rest}

    @property
    def url(self) -> str:
        return f"https://huggingface.co/datasets/{self.repository}"
