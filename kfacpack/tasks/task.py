"""The task interface (named splits of labelled examples), class splits, and the selection of examples.

A class split `NAME@k/n` is the k-th of n parts of a task, as in class-incremental learning. The classes of the task are
divided into n consecutive groups of about the same size, and the k-th part consists of the examples of the k-th group.
Classes, labels and heads are those of the whole task. The task vectors of all parts therefore have the same head, and
the sum of several task vectors can be evaluated on the union of their classes. Training on a part uses only the logits
of its own classes; evaluation uses all logits.
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
"""Inputs by key, without the label: {"image": PIL.Image}, or strings, such as {"premise": "…", "hypothesis": "…"}."""

COMPLETION_COLUMNS = ("prompt", "completion")
"""Columns of a task whose examples are prompts with completions and have no class labels."""


@dataclass(frozen=True)
class DataOrigin:
    """The origin of a split's examples, as recorded in manifests."""

    dataset: str
    """Name of the dataset."""
    split: str
    """Name of the split."""
    license: str | None = None
    """License of the data, if known."""
    revision: str | None = None
    """Commit of the repository that contains the data; None if the data is not from a repository."""


class Split(Protocol):
    """A split of a task: labelled examples in a fixed order."""

    source: DataOrigin
    """The origin of the examples."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...

    def label(self, index: int) -> int:
        """Returns the class of an example as an index into the task's `classes`.

        Args:
            index: Index of the example in the split.
        """
        ...


class Task(Protocol):
    """A dataset with named splits of labelled examples."""

    @property
    def name(self) -> str:
        """Name of the task."""
        ...

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes; None if the data has no class labels."""
        ...

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        ...

    @property
    def sizes(self) -> Mapping[str, int]:
        """Number of examples in each split."""
        ...

    @property
    def templates(self) -> tuple[str, ...]:
        """Prompts for CLIP's text tower, with {} in place of the class name; empty for text tasks."""
        ...

    @property
    def source(self) -> str:
        """Origin of the data, as recorded in manifests."""
        ...

    @property
    def license(self) -> str | None:
        """License of the data; None if it is unknown."""
        ...

    def notices(self, model: str) -> tuple[str, ...]:
        """Returns notes for the user, such as a note that the data differs from a public dataset of the same name.

        Args:
            model: Name of the model with which the task is used.
        """
        ...

    def listing(self, split: str) -> list[tuple[str, str]]:
        """Returns the path and a content digest of each file of a split.

        The list is empty for embedded tasks, whose examples change only with the version of kfacpack.

        Args:
            split: Name of the split.
        """
        ...

    def split(self, name: str) -> Split:
        """Returns a split of the task by name.

        Args:
            name: Name of the split, one of `splits`.

        Raises:
            KfacpackError: If there is no such split, or it cannot be read.
        """
        ...


class ClassSplitName(NamedTuple):
    """The components of the name of a class split, `NAME@k/n`."""

    whole: str
    """Name of the whole task."""
    k: int
    """Number of the part, starting at 1."""
    n: int
    """Number of parts."""


def parse_class_split(name: str) -> ClassSplitName | None:
    """Parses the name of a class split, `NAME@k/n`; returns None if the name contains no @.

    Raises:
        KfacpackError: If the text after the @ is not k/n with 1 <= k <= n, or NAME is itself a class split.
    """
    whole, at, part = name.rpartition("@")
    if not at:
        return None
    match = CLASS_SPLIT.fullmatch(part)
    if match is None or not whole or int(match[1]) > int(match[2]):
        problem = "is not a class split; expected NAME@k/n with 1 <= k <= n"
        raise KfacpackError(f"{printable(name)!r} {problem}, such as {printable(whole) or 'dtd'}@1/5")
    if base_task_name(whole) != whole:
        remedy = "Divide the whole task into more parts instead"
        raise KfacpackError(f"{printable(name)!r}: {printable(whole)} is already a class split. {remedy}")
    return ClassSplitName(whole, int(match[1]), int(match[2]))


@dataclass(frozen=True)
class ClassSplitTask:
    """A task restricted to the k-th of n groups of its classes. Implements `Task`.

    Raises:
        KfacpackError: If the classes are unknown, or a part would have fewer than two classes.
    """

    whole: Task
    """The whole task."""
    k: int
    """Number of the part, starting at 1."""
    n: int
    """Number of parts."""

    def __post_init__(self) -> None:
        name, classes = printable(self.name), self.whole.classes
        if not classes:
            raise KfacpackError(f"{name}: the class names are unknown, so the task cannot be divided by classes")
        if len(classes) < 2 * self.n:
            problem = (
                f"{len(classes)} class{'es' * (len(classes) != 1)} cannot be divided into {self.n} "
                f"part{'s' * (self.n != 1)}: "
                "at least one part would have fewer than two classes"
            )
            limit = len(classes) // 2
            remedy = f"Use at most {limit} part{'s' * (limit != 1)}" if limit else "The task cannot be divided"
            raise KfacpackError(f"{name}: {problem}. {remedy}")

    @property
    def name(self) -> str:
        """Name of the part, `NAME@k/n`."""
        return f"{self.whole.name}@{self.k}/{self.n}"

    @property
    def own_classes(self) -> range:
        """Classes of the part, as indices into `classes`."""
        count = len(self.whole.classes or ())
        return range((self.k - 1) * count // self.n, self.k * count // self.n)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of all classes of the whole task."""
        return self.whole.classes

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        return self.whole.splits

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Number of examples of the part in each split."""
        return {name: len(self._view(name)) for name in self.splits}

    @property
    def templates(self) -> tuple[str, ...]:
        """Prompt templates of the whole task."""
        return self.whole.templates

    @property
    def source(self) -> str:
        """Origin of the data."""
        return self.whole.source

    @property
    def license(self) -> str | None:
        """License of the data."""
        return self.whole.license

    def notices(self, model: str) -> tuple[str, ...]:
        """Returns the notes for the user about the whole task."""
        return self.whole.notices(model)

    def listing(self, split: str) -> list[tuple[str, str]]:
        """Returns the path and a content digest of each file of a split of the whole task."""
        return self.whole.listing(split)

    def split(self, name: str) -> ClassSplitView:
        """Returns the examples of a split that have one of the part's classes.

        Raises:
            KfacpackError: If the split has no examples of the part's classes.
        """
        view = self._view(name)
        if not len(view):
            # If few examples were held out for validation, none of them may belong to this part.
            own = [(self.whole.classes or ())[k] for k in self.own_classes]
            names = printable(", ".join([*own[:3], "…"] if len(own) > 3 else own))
            problem = f"split {printable(name)!r} has no examples of the part's classes ({names})"
            raise KfacpackError(f"{printable(self.name)}: {problem}. Use more examples or fewer parts")
        return view

    def _view(self, name: str) -> ClassSplitView:
        return ClassSplitView(self.whole.split(name), self.own_classes)


class ClassSplitView:
    """A view of a split that contains only the examples of some classes. Order and labels are unchanged."""

    def __init__(self, whole: Split, classes: range):
        """Selects the examples of some classes.

        Args:
            whole: Split of the whole task.
            classes: Classes to keep.
        """
        self.source = whole.source
        self._whole = whole
        self._indices = [number for number in range(len(whole)) if whole.label(number) in classes]

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Example:
        return self._whole[self._indices[index]]

    def label(self, index: int) -> int:
        """Returns the class of an example as an index into the whole task's `classes`."""
        return self._whole.label(self._indices[index])


def parent_task(task: Task) -> Task:
    """Returns the whole task of a class split, or any other task unchanged."""
    return task.whole if isinstance(task, ClassSplitTask) else task


def own_classes(task: Task) -> range | None:
    """Returns the classes to which training on a class split is restricted, or None for any other task."""
    return task.own_classes if isinstance(task, ClassSplitTask) else None


def has_completions(task: Task) -> bool:
    """Returns whether the examples of a task are prompts with completions rather than examples with class labels."""
    if task.classes is not None:
        return False
    split = task.split(task.splits[0])
    return bool(len(split)) and set(split[0]) == set(COMPLETION_COLUMNS)


def parse_count(text: str, size: int) -> int:
    """Parses a number of examples.

    Args:
        text: A number (`"256"`), a percentage (`"30%"`) or `"all"`.
        size: Number of available examples. Larger numbers in `text` are reduced to this number.

    Returns:
        A number from 1 to `size`.

    Raises:
        KfacpackError: If the text is invalid, or there are no examples.
    """
    if size < 1:
        raise KfacpackError("the data has no examples")
    if text == "all":
        return size
    share = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)%", text)
    if share and 0 < float(share[1]) <= 100:
        return max(1, round(size * float(share[1]) / 100))
    if re.fullmatch(r"[1-9][0-9]{0,12}", text):
        return min(int(text), size)
    expected = "expected a number such as 256, a percentage such as 30%, or 'all'"
    raise KfacpackError(f"invalid number of examples {text!r}; {expected}")


def sample_indices(size: int, count: int, seed: int) -> list[int]:
    """Draws `count` distinct indices below `size` and returns them in increasing order."""
    # The counter selects a random stream other than that of the probes.
    generator = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 1, 0]))
    return sorted(generator.choice(size, count, replace=False, shuffle=False).tolist())


def batched(items: Sequence[int], batch_size: int) -> Iterator[Sequence[int]]:
    """Yields consecutive groups of at most `batch_size` items.

    Raises:
        KfacpackError: If `batch_size` is not positive.
    """
    if batch_size < 1:
        raise KfacpackError(f"invalid batch size {batch_size}; expected at least 1")
    for start in range(0, len(items), batch_size):
        yield items[start : start + batch_size]


VALIDATION_SHARE, MAX_VALIDATION = 10, 5000
"""One in ten training examples is held out for validation, but at most 5000 examples."""


def validation_indices(size: int) -> list[int]:
    """Chooses the training examples to hold out for validation, as in the task arithmetic papers.

    The `size` examples are divided into equal intervals, and one example is drawn from each interval, so that each
    class is represented roughly in proportion to its size, whether the examples are sorted by class or shuffled.

    Returns:
        Indices of the chosen examples in increasing order. Their number is a tenth of `size`, but at most 5000.
    """
    count = min(size // VALIDATION_SHARE, MAX_VALIDATION)
    edges = [k * size // count for k in range(count + 1)] if count else []
    generator = np.random.Generator(np.random.Philox(key=0, counter=[0, 0, 2, 0]))
    return [int(generator.integers(start, stop)) for start, stop in pairwise(edges)]
