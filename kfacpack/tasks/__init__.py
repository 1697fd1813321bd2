"""Tasks by name: a task is one line here, or a folder of the user's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kfacpack.errors import KfacpackError, printable
from kfacpack.tasks.base import Example, Origin, Split, Task
from kfacpack.tasks.embedded import digits, emblems, faces, hebrew, materials, mnist, syllabics, weaves
from kfacpack.tasks.local import LocalTask
from kfacpack.tasks.parts import Part, part_name

__all__ = ["TASKS", "Example", "Origin", "Split", "Task", "load_task"]

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
"""The tasks whose data we know where to find. Loading one makes or reads no data yet."""


def load_task(name: str, data: str | os.PathLike[str] | None = None) -> Task:
    """The task of that name; its data is what is registered for it, or what lies in the folder `data`.

    NAME@k/n is the k-th of n parts of it, by classes.
    """
    if part := part_name(name):
        return Part(load_task(part.whole, data), part.k, part.n)
    if data is not None:
        return LocalTask(name, Path(data))
    if name in TASKS:
        return TASKS[name]()
    remedy = "With --data DIR any name will do: DIR holds train-*.parquet and test-*.parquet, or pictures by class"
    raise KfacpackError(f"{printable(name)!r} is no registered task (those are {', '.join(sorted(TASKS))}). {remedy}")
