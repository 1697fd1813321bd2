"""What a task is to us: named splits of examples, and the classes its labels stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Example = Mapping[str, Any]
"""A column's name -> its value, without the label: {"image": PIL.Image}, or strings, such as premise and hypothesis."""


@dataclass(frozen=True)
class Origin:
    """Where a split's examples come from, in the words of a manifest's source."""

    dataset: str
    split: str
    license: str | None = None
    revision: str | None = None
    """The commit of the data's repository."""


class Split(Protocol):
    """Examples in a fixed order."""

    source: Origin

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...

    def label(self, index: int) -> int:
        """The class of an example, an index into the task's `classes`."""


class Task(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The classes' names, if they are known."""

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits there are."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """How many examples each split has."""

    @property
    def templates(self) -> tuple[str, ...]:
        """Prompts with {} where a class's name goes, as CLIP's text tower takes them; none for a task of texts."""

    @property
    def source(self) -> str:
        """Where the data comes from, in words."""

    @property
    def license(self) -> str | None:
        """Under which terms the data may be used, if they are known."""

    def notices(self, model: str) -> tuple[str, ...]:
        """What a person who uses it with a model of this name should be told, lest they mistake it for other data."""

    def listing(self, split: str) -> list[tuple[str, str]]:
        """The files that a split's examples are in, and what tells their bytes from others.

        None for a task of the package, whose examples change with the version.
        """

    def split(self, name: str) -> Split: ...
