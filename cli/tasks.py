"""`kfacpack tasks`: lists the tasks, shows one task, or draws the images of a task."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.text import Text
from typing_extensions import NotRequired, TypedDict

from kfacpack.errors import KfacpackError, counted
from kfacpack.format.writer import write_atomically

from .console import key_value_table, out, plain_table, print_json, print_line
from .options import AS_JSON, COLUMNS, DATA_FOLDER, DATA_PANEL, RUN_PANEL, check_output, option

if TYPE_CHECKING:
    from kfacpack.tasks.published_tasks import PublishedTask
    from kfacpack.tasks.task import Task


SPLITS = ("train", "validation", "test")
"""Splits whose sizes are shown in the list of tasks."""


class SheetOutput(TypedDict):
    """The contact sheet that `--sheet` writes."""

    path: str
    split: str
    classes: int
    """Number of classes that are drawn."""
    left_out: int
    """Number of classes that are not drawn because the sheet is full."""


class TaskOutput(TypedDict):
    """Output of `kfacpack tasks TASK --json` for an embedded task, or for any task with `--data` or `--sheet`."""

    name: str
    classes: list[str] | None
    """Names of the classes; null if the data has no class labels."""
    templates: list[str]
    """Prompts, with {} in place of the class name."""
    splits: dict[str, int]
    """Number of examples by split."""
    source: str
    license: str | None
    sheet: NotRequired[SheetOutput]
    """The contact sheet; only with `--sheet`."""


class PublishedTaskOutput(TypedDict):
    """Output of `kfacpack tasks TASK --json` for a task on the Hub without `--data` or `--sheet`."""

    name: str
    repository: str
    config: str | None
    revision: str | None
    url: str
    class_count: int
    splits: dict[str, int]
    """Number of examples by split."""
    serving: dict[str, list[str]]
    """Possible names of each split of the task in the repository."""
    columns: dict[str, list[str]]
    """Possible column names for each key of an example."""
    templates: list[str]
    """Prompts, with {} in place of the class name."""
    license: str | None
    gated: bool
    """Whether users have to accept the terms of the repository on the Hub."""


class TaskListOutput(TypedDict):
    """Output of `kfacpack tasks --json`."""

    tasks: list[TaskOutput]
    """The tasks that are included in the package."""
    published: list[PublishedTaskOutput]
    """The tasks on the Hub."""


def tasks(
    name: str | None = typer.Argument(
        None, metavar="TASK", help="Task to show, with its classes and prompts; by default, all tasks are listed."
    ),
    sheet: Path | None = option(
        RUN_PANEL,
        None,
        "--sheet",
        metavar="FILE.png",
        help="Save thumbnails of the task's images, grouped by class, to this file.",
    ),
    split: str | None = option(
        DATA_PANEL, None, "--split", metavar="SPLIT", help="Split to draw with --sheet. [default: train]"
    ),
    data: str | None = DATA_FOLDER,
    columns: str | None = COLUMNS,
    as_json: bool = AS_JSON,
) -> None:
    """List the tasks, show one task, or draw the images of a task.

    For tasks on the Hub, nothing is downloaded unless --data or --sheet is passed.
    """
    from kfacpack.tasks.registry import PUBLISHED, TASKS, load_task

    if sheet is not None:
        if sheet.suffix.lower() != ".png":
            raise KfacpackError(f"{sheet}: expected a file name that ends in .png")
        check_output(sheet, ())
    if split is not None and sheet is None:
        raise KfacpackError("--split selects the images that --sheet draws; pass --sheet FILE.png as well")
    if name is None:
        options = {"--sheet": sheet, "--data": data, "--columns": columns}
        if flag := next((flag for flag, value in options.items() if value), None):
            raise KfacpackError(f"{flag} needs a task; pass the name of the task as the argument")
        embedded = [load() for load in TASKS.values()]
        published = list(PUBLISHED.values())
        if as_json:
            lists: TaskListOutput = {
                "tasks": list(map(_as_json, embedded)),
                "published": list(map(_published_as_json, published)),
            }
            print_json(lists)
        else:
            _print_embedded(embedded)
            _print_published(published)
        return
    if name in PUBLISHED and name not in TASKS and not (data or sheet or columns):
        definition = PUBLISHED[name]
        rows = _published_rows(definition)
        print_json(_published_as_json(definition)) if as_json else out.print(key_value_table(rows))
        return
    task = load_task(name, data, columns=columns)
    counts = _draw(task, split or "train", sheet) if sheet else None
    if as_json:
        result = _as_json(task)
        if counts:
            result["sheet"] = counts
        print_json(result)
    elif counts:
        left_out = f"; classes left out: {counts['left_out']}" if counts["left_out"] else ""
        print_line(f"wrote {sheet}: {counted(counts['classes'], 'class', 'classes')}{left_out}")
    else:
        out.print(key_value_table(_rows(task)))


def _draw(task: Task, split: str, file: Path) -> SheetOutput:
    """Draws a contact sheet and returns its entry for `--json`."""
    from kfacpack.tasks.contact_sheet import draw_contact_sheet

    sheet = draw_contact_sheet(task, split)
    buffer = io.BytesIO()
    sheet.image.save(buffer, format="PNG")
    write_atomically(file, buffer.getvalue())
    return {"path": str(file), "split": split, "classes": sheet.classes, "left_out": sheet.left_out}


def _as_json(task: Task) -> TaskOutput:
    return {
        "name": task.name,
        "classes": None if task.classes is None else list(task.classes),
        "templates": list(task.templates),
        "splits": dict(task.sizes),
        "source": task.source,
        "license": task.license,
    }


def _published_as_json(task: PublishedTask) -> PublishedTaskOutput:
    return {
        "name": task.name,
        "repository": task.repository,
        "config": task.config,
        "revision": task.revision,
        "url": task.url,
        "class_count": task.classes,
        "splits": task.sizes,
        "serving": {split: list(names) for split, names in task.split_names.items()},
        "columns": {key: list(names) for key, names in (*task.inputs.items(), ("label", task.label))},
        "templates": list(task.templates),
        "license": task.license,
        "gated": task.gated,
    }


def _print_embedded(tasks: list[Task]) -> None:
    rows = [(task.name, len(task.classes or ()), task.sizes, task.source, task.license) for task in tasks]
    _print_table("task", "source", rows)
    print_line("`kfacpack tasks TASK` shows one task; --sheet FILE.png draws its images", style="dim")
    out.print()


def _print_published(tasks: list[PublishedTask]) -> None:
    rows = [(task.name, task.classes, task.sizes, _address(task), task.license) for task in tasks]
    _print_table("on the Hub", "repository", rows)
    print_line(
        "these tasks are downloaded when they are first used; with --data DIR, a local copy is read instead. "
        "Without --data, the name mnist selects the embedded task",
        style="dim",
    )


def _print_table(
    heading: str, origin: str, rows: Sequence[tuple[str, int, Mapping[str, int], str, str | None]]
) -> None:
    table = plain_table()
    table.add_column(heading, no_wrap=True, min_width=max(len(name) for name, *_ in rows))
    for number in ("classes", *SPLITS):
        table.add_column(number, justify="right", overflow="fold")
    table.add_column(origin, overflow="fold")
    table.add_column("license", overflow="fold")
    for name, classes, sizes, source, license_ in rows:
        counts = [f"{sizes[split]:,}" if split in sizes else "" for split in SPLITS]
        table.add_row(name, f"{classes:,}", *counts, Text(source), Text(license_ or ""))
    out.print(table)


def _address(task: PublishedTask) -> str:
    return task.repository + (f", {task.config}" if task.config not in (None, "default") else "")


def _published_rows(task: PublishedTask) -> Iterator[tuple[str, str]]:
    yield "task", task.name
    yield "classes", f"{task.classes:,}"
    yield "examples", _sizes(task.sizes)
    for split in task.sizes:
        stored = f"split {task.split_names[split][0]!r} of the repository" if split in task.stored else None
        yield split, stored or "held out from the train split: 10% of the examples, at most 5,000"
    yield "columns", ", ".join([*(f"{key}={names[0]}" for key, names in task.inputs.items()), f"label={task.label[0]}"])
    if task.drops_unlabelled:
        yield "left out", "rows without a label"
    yield from _templates(task.templates)
    yield "repository", _address(task) + (" (gated; accept its terms on the Hub first)" if task.gated else "")
    yield "", task.url
    yield "license", task.license or "not stated"


def _rows(task: Task) -> Iterator[tuple[str, str]]:
    yield "task", task.name
    if task.classes is not None:
        yield counted(len(task.classes), "class", "classes"), ", ".join(task.classes)
    yield from _templates(task.templates)
    yield "examples", _sizes(task.sizes)
    yield "source", task.source
    if task.license:
        yield "license", task.license
    for notice in task.notices(""):
        yield "note", notice


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{split} {size:,}" for split, size in sizes.items())


def _templates(templates: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for number, template in enumerate(templates):
        yield "templates" if number == 0 else "", template
