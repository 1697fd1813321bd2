"""A task's data as others know it: its id on the Hub, and what `--data` would say."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kfacpack.bundle.task_names import whole_name
from kfacpack.tasks import PUBLISHED, TASKS

if TYPE_CHECKING:
    from kfacpack.bundle.manifest import Source

_ID = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}")


def dataset_id(source: Source) -> str | None:
    """Where it is published, if it was taken from there: a folder is nowhere."""
    return source.dataset if source.dataset and _ID.fullmatch(source.dataset) else None


def data_option(source: Source) -> str:
    """What a command says, behind a space, so that the data is the one that is meant: the task's name alone may be
    that of other data."""
    name = whole_name(source.task)
    embedded, published = TASKS.get(name), PUBLISHED.get(name)
    if embedded and embedded().source == source.dataset:
        return ""
    found, revision = dataset_id(source), source.revision
    if published and not found:
        found, revision = published().repository, None  # a copy of it in a folder
    if not found:
        return " --data DIR"
    if published and not embedded and found == published().repository:
        return ""
    return f" --data hf://datasets/{found}" + (f"@{revision}" if revision else "")
