"""Tasks by name: a task is one line here, or a folder of the user's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kfacpack.errors import KfacpackError, printable
from kfacpack.tasks.base import Example, Origin, Split, Task
from kfacpack.tasks.local import LocalTask

__all__ = ["TASKS", "Example", "Origin", "Split", "Task", "load_task"]

TASKS: dict[str, Callable[[], Task]] = {}
"""The tasks whose data we know where to find."""


def load_task(name: str, data: str | os.PathLike[str] | None = None) -> Task:
    """The task of that name; its data is what is registered for it, or what lies in the folder `data`."""
    if data is not None:
        return LocalTask(name, Path(data))
    if name in TASKS:
        return TASKS[name]()
    known = f"those are {', '.join(sorted(TASKS))}" if TASKS else "there is none yet"
    remedy = "With --data DIR any name will do: DIR holds train-*.parquet and test-*.parquet, or pictures by class"
    raise KfacpackError(f"{printable(name)!r} is no registered task ({known}). {remedy}")
