"""`NAME@k/n`: a task's classes in n groups, and of its examples those of the k-th. Class-incremental learning.

The groups are consecutive and as even as can be. `classes` stays that of the whole task, and so labels and heads do:
vectors of the parts have the same head, and their sum is tested on the union of the classes. In training, an example is
told apart from the group's own classes alone; in evaluation, from all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from kfacpack.bundle.task_names import WHICH, whole_name
from kfacpack.errors import KfacpackError, printable
from kfacpack.tasks.base import Example, Split, Task


class PartName(NamedTuple):
    whole: str
    k: int
    n: int


def part_name(name: str) -> PartName | None:
    """What NAME@k/n says; None for a name without @."""
    whole, at, which = name.rpartition("@")
    if not at:
        return None
    match = WHICH.fullmatch(which)
    if match is None or not whole or int(match[1]) > int(match[2]):
        problem = "expected which part of how many behind the @, the first of them 1"
        raise KfacpackError(f"{printable(name)!r}: {problem}, such as {printable(whole) or 'dtd'}@1/5")
    if whole_name(whole) != whole:
        remedy = "Divide the whole into more parts instead"
        raise KfacpackError(f"{printable(name)!r}: {printable(whole)} is a part already. {remedy}")
    return PartName(whole, int(match[1]), int(match[2]))


@dataclass(frozen=True)
class Part:
    """A `Task`."""

    whole: Task
    k: int
    n: int

    def __post_init__(self) -> None:
        where, classes = printable(self.name), self.whole.classes
        if not classes:
            raise KfacpackError(f"{where}: the names of its classes are not known, so that they cannot be divided")
        if len(classes) < 2 * self.n:
            problem = f"{len(classes)} classes in {self.n} parts leave one with fewer than two to tell apart"
            most = len(classes) // 2
            remedy = f"It has {most} part{'s' * (most != 1)} at most" if most else "It cannot be divided"
            raise KfacpackError(f"{where}: {problem}. {remedy}")

    @property
    def name(self) -> str:
        return f"{self.whole.name}@{self.k}/{self.n}"

    @property
    def own_classes(self) -> range:
        """The group, as indices into `classes`."""
        count = len(self.whole.classes or ())
        return range((self.k - 1) * count // self.n, self.k * count // self.n)

    @property
    def classes(self) -> tuple[str, ...] | None:
        return self.whole.classes

    @property
    def splits(self) -> tuple[str, ...]:
        return self.whole.splits

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        return {name: len(self._examples(name)) for name in self.splits}

    @property
    def templates(self) -> tuple[str, ...]:
        return self.whole.templates

    @property
    def source(self) -> str:
        return self.whole.source

    @property
    def license(self) -> str | None:
        return self.whole.license

    def notices(self, model: str) -> tuple[str, ...]:
        return self.whole.notices(model)

    def listing(self, split: str) -> list[tuple[str, str]]:
        return self.whole.listing(split)

    def split(self, name: str) -> PartSplit:
        found = self._examples(name)
        if not len(found):
            # Where few examples were held out for validation, a part may have none of them.
            own = [(self.whole.classes or ())[k] for k in self.own_classes]
            called = printable(", ".join([*own[:3], "…"] if len(own) > 3 else own))
            problem = f"split {printable(name)!r} has no example of its classes ({called})"
            raise KfacpackError(f"{printable(self.name)}: {problem}. More examples, or fewer parts, would have")
        return found

    def _examples(self, name: str) -> PartSplit:
        return PartSplit(self.whole.split(name), self.own_classes)


class PartSplit:
    """The examples of some classes, in the order of the whole; labels are the whole's."""

    def __init__(self, whole: Split, classes: range):
        self.source = whole.source
        self._whole = whole
        self._numbers = [number for number in range(len(whole)) if whole.label(number) in classes]

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Example:
        return self._whole[self._numbers[index]]

    def label(self, index: int) -> int:
        return self._whole.label(self._numbers[index])


def whole_of(task: Task) -> Task:
    return task.whole if isinstance(task, Part) else task


def own_classes(task: Task) -> range | None:
    """The classes that an example of a part is told apart from in training; None for a task that is no part: all."""
    return task.own_classes if isinstance(task, Part) else None
