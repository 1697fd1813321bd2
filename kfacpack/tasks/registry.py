"""Task registry: embedded tasks, tasks published on the Hub, and user data."""

from __future__ import annotations

import os
from collections.abc import Callable

from kfacpack.demo import drawn_tasks, photo_tasks
from kfacpack.errors import KfacpackError, did_you_mean, printable
from kfacpack.tasks.data_sources import DatasetRepository, data_source_of, parse_columns
from kfacpack.tasks.local_task import LocalTask
from kfacpack.tasks.published_tasks import PUBLISHED_TASKS, PublishedTask
from kfacpack.tasks.task import ClassSplitTask, Task, parse_class_split

PUBLISHED: dict[str, PublishedTask] = {task.name: task for task in PUBLISHED_TASKS}
"""Definitions of the tasks on the Hub, by name."""

TASKS: dict[str, Callable[[], Task]] = {
    "digits": photo_tasks.load_digits,
    "mnist": photo_tasks.load_mnist,
    "materials": photo_tasks.load_materials,
    "faces": photo_tasks.load_faces,
    "hebrew": drawn_tasks.load_hebrew,
    "syllabics": drawn_tasks.load_syllabics,
    "emblems": drawn_tasks.load_emblems,
    "weaves": drawn_tasks.load_weaves,
}
"""Loaders of the embedded tasks, by name. The images are generated when a split is first used."""


def is_registered(name: str) -> bool:
    """Returns whether `load_task` can load a task without `data`.

    A class split is registered if the whole task is registered.
    """
    part = parse_class_split(name)
    whole = part.whole if part else name
    return whole in TASKS or whole in PUBLISHED


def load_task(name: str, data: str | os.PathLike[str] | None = None, *, columns: str | None = None) -> Task:
    """Loads a task by name. The files of the task are listed, but not read until they are needed.

    Args:
        name: Name of a registered task, or any name if `data` is given. `NAME@k/n` selects the k-th of n groups of the
            classes of the task `NAME`.
        data: Data to use instead of the registered data: a folder, or `hf://datasets/OWNER/REPO[@REVISION][/CONFIG]`.
            The definition of a published task (columns, class names, prompts) also applies to a copy of its data.
        columns: Columns to use, such as `"image=IMG,label=Y"`; by default, they are found by name or type.

    Returns:
        The task.

    Raises:
        KfacpackError: If the task is unknown, or the data or the columns are invalid.

    Example:
        >>> task = kp.load_task("digits")
        >>> task.sizes["train"]
        1000
    """
    if part := parse_class_split(name):
        return ClassSplitTask(load_task(part.whole, data, columns=columns), part.k, part.n)
    definition = PUBLISHED.get(name)
    requested = parse_columns(columns) if columns is not None else None
    if data is not None:
        source, config = data_source_of(data)
        return LocalTask(name, source, definition, requested, config)
    if requested is not None:
        raise KfacpackError("--columns (columns=…) requires your own data; pass --data DIR (data=DIR)")
    if name in TASKS:
        return TASKS[name]()
    if definition is not None:
        source = DatasetRepository(definition.repository, definition.revision, definition.config)
        return LocalTask(name, source, definition)
    suggestion = did_you_mean(name, [*TASKS, *PUBLISHED])
    contents = "train-*.parquet and test-*.parquet, or with class folders"
    remedy = f"For your own data, pass --data DIR (data=DIR), a folder with {contents}"
    raise KfacpackError(f"unknown task {printable(name)!r}{suggestion} Run `kfacpack tasks` for a list. {remedy}")


def resolve_task(task: Task | str) -> Task:
    """Returns `task` itself, or loads the task if `task` is a name.

    Raises:
        KfacpackError: If the argument is neither a task nor a name, or the task is unknown.
    """
    if isinstance(task, str):
        return load_task(task)
    if not all(hasattr(task, attribute) for attribute in ("name", "splits", "split")):
        raise KfacpackError(f"expected a task from kp.load_task or the name of a task, got {type(task).__name__}")
    return task
