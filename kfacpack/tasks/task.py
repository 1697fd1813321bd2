"""What a task is to us: named splits of examples, and the classes its labels stand for.

`NAME@k/n`: a task's classes in n groups, and of its examples those of the k-th. Class-incremental learning.

The groups are consecutive and as even as can be. `classes` stays that of the whole task, and so labels and heads do:
vectors of the parts have the same head, and their sum is tested on the union of the classes. In training, an example is
told apart from the group's own classes alone; in evaluation, from all.

Which examples are taken: as many as asked for, drawn by the seed, none twice.

Which examples of `train` are held out for `validation`, where there is none: as in the task arithmetic papers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np

from kfacpack.errors import KfacpackError, printable
from kfacpack.format.identity import CLASS_SPLIT, base_task_name

Example = Mapping[str, Any]
"""A column's name -> its value, without the label: {"image": PIL.Image}, or strings, such as premise and hypothesis."""


@dataclass(frozen=True)
class DataOrigin:
    """Where a split's examples come from, in the words of a manifest's source."""

    dataset: str
    split: str
    license: str | None = None
    revision: str | None = None
    """The commit of the data's repository."""


class Split(Protocol):
    """Examples in a fixed order."""

    source: DataOrigin

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


class ClassSplitName(NamedTuple):
    whole: str
    k: int
    n: int


def parse_class_split(name: str) -> ClassSplitName | None:
    """What NAME@k/n says; None for a name without @."""
    whole, at, which = name.rpartition("@")
    if not at:
        return None
    match = CLASS_SPLIT.fullmatch(which)
    if match is None or not whole or int(match[1]) > int(match[2]):
        problem = "expected which part of how many behind the @, the first of them 1"
        raise KfacpackError(f"{printable(name)!r}: {problem}, such as {printable(whole) or 'dtd'}@1/5")
    if base_task_name(whole) != whole:
        remedy = "Divide the whole into more parts instead"
        raise KfacpackError(f"{printable(name)!r}: {printable(whole)} is a part already. {remedy}")
    return ClassSplitName(whole, int(match[1]), int(match[2]))


@dataclass(frozen=True)
class ClassSplitTask:
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

    def split(self, name: str) -> ClassSplitView:
        found = self._examples(name)
        if not len(found):
            # Where few examples were held out for validation, a part may have none of them.
            own = [(self.whole.classes or ())[k] for k in self.own_classes]
            called = printable(", ".join([*own[:3], "…"] if len(own) > 3 else own))
            problem = f"split {printable(name)!r} has no example of its classes ({called})"
            raise KfacpackError(f"{printable(self.name)}: {problem}. More examples, or fewer parts, would have")
        return found

    def _examples(self, name: str) -> ClassSplitView:
        return ClassSplitView(self.whole.split(name), self.own_classes)


class ClassSplitView:
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


def parent_task(task: Task) -> Task:
    return task.whole if isinstance(task, ClassSplitTask) else task


def own_classes(task: Task) -> range | None:
    """The classes that an example of a part is told apart from in training; None for a task that is no part: all."""
    return task.own_classes if isinstance(task, ClassSplitTask) else None


def parse_count(asked: str, size: int) -> int:
    """'256', '30%' or 'all' of `size` examples; more than there are is all of them."""
    if size < 1:
        raise KfacpackError("the data has no examples")
    if asked == "all":
        return size
    share = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)%", asked)
    if share and 0 < float(share[1]) <= 100:
        return max(1, round(size * float(share[1]) / 100))
    if re.fullmatch(r"[1-9][0-9]{0,12}", asked):
        return min(int(asked), size)
    raise KfacpackError(f"examples {asked!r}: expected a number such as 256, a share such as 30%, or 'all'")


def sample_indices(size: int, count: int, seed: int) -> list[int]:
    """`count` different numbers below `size`, in rising order."""
    # Not the numbers that the probes of an example are made of: those begin at another place.
    generator = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 1, 0]))
    return sorted(generator.choice(size, count, replace=False, shuffle=False).tolist())


def batched(numbers: Sequence[int], batch_size: int) -> Iterator[Sequence[int]]:
    if batch_size < 1:
        raise KfacpackError(f"batch size {batch_size}: expected at least one example")
    for start in range(0, len(numbers), batch_size):
        yield numbers[start : start + batch_size]


VALIDATION_SHARE, MAX_VALIDATION = 10, 5000
"""A tenth, and at most so many."""


def validation_indices(size: int) -> list[int]:
    """A tenth of `size` numbers below it, rising: one drawn from each of as many equal stretches.

    So every class of examples that lie in order of their classes has its share, and those that come in turns have, too.
    """
    count = min(size // VALIDATION_SHARE, MAX_VALIDATION)
    edges = [k * size // count for k in range(count + 1)] if count else []
    generator = np.random.Generator(np.random.Philox(key=0, counter=[0, 0, 2, 0]))
    return [int(generator.integers(start, stop)) for start, stop in pairwise(edges)]
