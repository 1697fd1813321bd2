"""Tasks that are published on the Hub: what is known of each, a line here and a function in one of the files.

Tasks by name: a task is one line here, one of those on the Hub, or data of the user's.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from kfacpack.demo import drawn_tasks, photo_tasks
from kfacpack.errors import KfacpackError, printable
from kfacpack.tasks import published_tasks
from kfacpack.tasks.columns import read_columns
from kfacpack.tasks.data_sources import DatasetRepository, data_source_of
from kfacpack.tasks.local_task import LocalTask
from kfacpack.tasks.published import PublishedTask
from kfacpack.tasks.published_tasks import imagenet
from kfacpack.tasks.task import ClassSplitTask, Task, parse_class_split

PUBLISHED: dict[str, Callable[[], PublishedTask]] = {
    "stanford_cars": published_tasks.stanford_cars,
    "dtd": published_tasks.dtd,
    "eurosat": published_tasks.eurosat,
    "gtsrb": published_tasks.gtsrb,
    "mnist": published_tasks.mnist,
    "resisc45": published_tasks.resisc45,
    "sun397": published_tasks.sun397,
    "svhn": published_tasks.svhn,
    "snli": published_tasks.snli,
    "mnli": published_tasks.mnli,
    "sick": published_tasks.sick,
    "scitail": published_tasks.scitail,
    "rte": published_tasks.rte,
    "qnli": published_tasks.qnli,
    "imagenet": imagenet,
}
"""Calling one neither reads nor fetches any data."""


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
"""The tasks that the package brings. Loading one makes or reads no data yet."""


def load_task(name: str, data: str | os.PathLike[str] | None = None, columns: str | None = None) -> Task:
    """The task of that name; its data is what is registered for it, or what `data` names: a folder, or
    hf://datasets/OWNER/REPO[@REVISION][/CONFIG].

    `columns`, such as "image=IMG,label=Y", says what the data's columns are. Of a task that is published, all that is
    known of it holds for a copy in a folder as well. NAME@k/n is the k-th of n parts of a task, by classes. Nothing is
    read of the data yet but the names of its files.
    """
    if part := parse_class_split(name):
        return ClassSplitTask(load_task(part.whole, data, columns), part.k, part.n)
    definition = PUBLISHED[name]() if name in PUBLISHED else None
    wanted = read_columns(columns) if columns is not None else None
    if data is not None:
        place, config = data_source_of(data)
        return LocalTask(name, place, definition, wanted, config)
    if wanted is not None:
        raise KfacpackError("--columns is about data of your own: say where it is, --data DIR")
    if name in TASKS:
        return TASKS[name]()
    if definition is not None:
        place = DatasetRepository(definition.repository, definition.revision, definition.config)
        return LocalTask(name, place, definition)
    there = f"those are {', '.join(TASKS)}, and on the Hub {', '.join(PUBLISHED)}"
    remedy = "With --data DIR any name will do: DIR holds train-*.parquet and test-*.parquet, or pictures by class"
    raise KfacpackError(f"{printable(name)!r} is no registered task ({there}). {remedy}")
