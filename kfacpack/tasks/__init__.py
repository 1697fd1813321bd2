"""Tasks by name: a task is one line here, one of those on the Hub, or data of the user's."""

from __future__ import annotations

import os
from collections.abc import Callable

from kfacpack.errors import KfacpackError, printable
from kfacpack.tasks.base import Example, Origin, Split, Task
from kfacpack.tasks.columns import read_columns
from kfacpack.tasks.embedded import digits, emblems, faces, hebrew, materials, mnist, syllabics, weaves
from kfacpack.tasks.local import LocalTask
from kfacpack.tasks.parts import Part, part_name
from kfacpack.tasks.places import Repository, place_of
from kfacpack.tasks.published import PUBLISHED, Published

__all__ = ["PUBLISHED", "TASKS", "Example", "Origin", "Published", "Split", "Task", "load_task"]

TASKS: dict[str, Callable[[], Task]] = {
    "digits": digits.load,
    "mnist": mnist.load,
    "materials": materials.load,
    "faces": faces.load,
    "hebrew": hebrew.load,
    "syllabics": syllabics.load,
    "emblems": emblems.load,
    "weaves": weaves.load,
}
"""The tasks that the package brings. Loading one makes or reads no data yet."""


def load_task(name: str, data: str | os.PathLike[str] | None = None, columns: str | None = None) -> Task:
    """The task of that name; its data is what is registered for it, or what `data` names: a folder, or
    hf://datasets/OWNER/REPO[@REVISION][/CONFIG].

    `columns`, such as "image=IMG,label=Y", says what the data's columns are. Of a task that is published, all that is
    known of it holds for a copy in a folder as well. NAME@k/n is the k-th of n parts of a task, by classes. Nothing is
    read of the data yet but the names of its files.
    """
    if part := part_name(name):
        return Part(load_task(part.whole, data, columns), part.k, part.n)
    definition = PUBLISHED[name]() if name in PUBLISHED else None
    wanted = read_columns(columns) if columns is not None else None
    if data is not None:
        place, config = place_of(data)
        return LocalTask(name, place, definition, wanted, config)
    if wanted is not None:
        raise KfacpackError("--columns is about data of your own: say where it is, --data DIR")
    if name in TASKS:
        return TASKS[name]()
    if definition is not None:
        place = Repository(definition.repository, definition.revision, definition.config)
        return LocalTask(name, place, definition)
    there = f"those are {', '.join(TASKS)}, and on the Hub {', '.join(PUBLISHED)}"
    remedy = "With --data DIR any name will do: DIR holds train-*.parquet and test-*.parquet, or pictures by class"
    raise KfacpackError(f"{printable(name)!r} is no registered task ({there}). {remedy}")
