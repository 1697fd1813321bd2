"""`kfacpack tasks`: which tasks there are, what one consists of, and what its pictures look like."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text

from kfacpack.errors import KfacpackError, printable
from kfacpack.format.writer import write_atomically

from .console import key_value_table, out, print_json

if TYPE_CHECKING:
    from kfacpack.tasks.published import PublishedTask
    from kfacpack.tasks.task import Task


COUNTED = ("train", "validation", "test")


def tasks(
    name: str | None = typer.Argument(None, metavar="NAME", help="Show this task: its classes and prompts."),
    sheet: Path | None = typer.Option(
        None, "--sheet", metavar="FILE.png", help="Draw thumbnails of the task's pictures, by class."
    ),
    split: str | None = typer.Option(None, "--split", help="The split that --sheet draws; else train."),
    data: str | None = typer.Option(None, "--data", metavar="DIR|hf://…", help="The task's data, as for 'estimate'."),
    columns: str | None = typer.Option(None, "--columns", metavar="KEY=COLUMN,…", help="Its columns, likewise."),
    as_json: bool = typer.Option(False, "--json", help="Print everything that is known of the tasks as JSON."),
) -> None:
    """List the tasks there are, show one of them, or draw its pictures.

    Of those on the Hub, what is known of them is shown; nothing is fetched. With --data, it is looked into.
    """
    from kfacpack.tasks.registry import PUBLISHED, TASKS, load_task

    if split is not None and sheet is None:
        raise KfacpackError("--split chooses what --sheet draws: give --sheet FILE.png as well")
    if name is None:
        if one := next((name for name, given in (("--sheet", sheet), ("--data", data)) if given), None):
            raise KfacpackError(f"{one} is about one task: give its name as well")
        embedded = [load() for load in TASKS.values()]
        published = [describe() for describe in PUBLISHED.values()]
        if as_json:
            known = {"tasks": list(map(_as_json, embedded)), "published": list(map(_published_as_json, published))}
            print_json(known)
        else:
            _print_list(embedded)
            _print_published(published)
        return
    if name in PUBLISHED and name not in TASKS and not (data or sheet or columns):
        definition = PUBLISHED[name]()
        print_json(_published_as_json(definition)) if as_json else out.print(key_value_table(_facts_of(definition)))
        return
    task = load_task(name, data, columns)
    drawn = _draw(task, split or "train", sheet) if sheet else {}
    if as_json:
        print_json(_as_json(task) | drawn)
    elif sheet:
        about = drawn["sheet"]
        left_out = f", {about['left_out']} more are left out" if about["left_out"] else ""
        out.print(Text(printable(f"wrote {sheet}: {about['classes']} classes{left_out}")), soft_wrap=True)
    else:
        out.print(key_value_table(_facts(task)))


def _draw(task: Task, split: str, file: Path) -> dict[str, Any]:
    """What JSON says about a sheet that was written."""
    from kfacpack.tasks.contact_sheet import draw_contact_sheet

    if file.suffix.lower() != ".png":
        raise KfacpackError(f"{file}: a sheet is a PNG; give it a name that ends in .png")
    sheet = draw_contact_sheet(task, split)
    picture = io.BytesIO()
    sheet.image.save(picture, format="PNG")
    write_atomically(file, picture.getvalue())
    return {"sheet": {"path": str(file), "split": split, "classes": sheet.classes, "left_out": sheet.left_out}}


def _as_json(task: Task) -> dict[str, Any]:
    return {
        "name": task.name,
        "classes": task.classes,
        "templates": task.templates,
        "splits": dict(task.sizes),
        "source": task.source,
        "license": task.license,
    }


def _published_as_json(task: PublishedTask) -> dict[str, Any]:
    return {
        "name": task.name,
        "repository": task.repository,
        "config": task.config,
        "revision": task.revision,
        "url": task.url,
        "class_count": task.classes,
        "splits": task.sizes,
        "serving": {split: list(names) for split, names in task.serving.items()},
        "columns": {key: list(names) for key, names in (*task.inputs.items(), ("label", task.label))},
        "templates": task.templates,
        "license": task.license,
        "gated": task.gated,
    }


def _print_list(known: list[Task]) -> None:
    rows = [(task.name, len(task.classes or ()), task.sizes, task.source, task.license) for task in known]
    _print_table("task", "source", rows)
    out.print(Text("tasks NAME shows one of them, tasks NAME --sheet FILE.png draws its pictures\n", style="dim"))


def _print_published(known: list[PublishedTask]) -> None:
    rows = [(task.name, task.classes, task.sizes, _address(task), task.license) for task in known]
    _print_table("on the Hub", "repository", rows)
    said = "fetched when they are used, or --data DIR with a copy; mnist is this one with --data alone"
    out.print(Text(said, style="dim"))


def _print_table(
    heading: str, origin: str, rows: Sequence[tuple[str, int, Mapping[str, int], str, str | None]]
) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(heading, no_wrap=True, min_width=max(len(name) for name, *_ in rows))
    for each in ("classes", *COUNTED):
        table.add_column(each, justify="right", overflow="fold")
    table.add_column(origin, overflow="fold")
    table.add_column("license", overflow="fold")
    for name, classes, sizes, source, license_ in rows:
        counts = [f"{sizes[split]:,}" if split in sizes else "" for split in COUNTED]
        table.add_row(name, f"{classes:,}", *counts, Text(source), Text(license_ or ""))
    out.print(table)


def _address(task: PublishedTask) -> str:
    return task.repository + (f", {task.config}" if task.config not in (None, "default") else "")


def _facts_of(task: PublishedTask) -> Iterator[tuple[str, str]]:
    yield "task", task.name
    yield "classes", f"{task.classes:,}"
    yield "examples", ", ".join(f"{split} {size:,}" for split, size in task.sizes.items())
    for split in task.sizes:
        own = f"the repository's {task.serving[split][0]!r}" if split in task.stored else None
        yield f"{split} is", own or "held out of train: a tenth, at most 5,000 examples"
    yield "columns", ", ".join([*(f"{key}={names[0]}" for key, names in task.inputs.items()), f"label={task.label[0]}"])
    if task.drops_unlabelled:
        yield "left out", "rows without a label"
    yield from _templates(task.templates)
    yield "repository", _address(task) + (", for those who have accepted its terms" if task.gated else "")
    yield "", task.url
    yield "license", task.license or "not stated"


def _facts(task: Task) -> Iterator[tuple[str, str]]:
    yield "task", task.name
    if task.classes is not None:
        yield f"{len(task.classes)} classes", ", ".join(task.classes)
    yield from _templates(task.templates)
    yield "examples", ", ".join(f"{split} {size:,}" for split, size in task.sizes.items())
    yield "source", task.source
    if task.license:
        yield "license", task.license
    for notice in task.notices(""):
        yield "note", notice


def _templates(templates: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for number, template in enumerate(templates):
        yield "templates" if number == 0 else "", template
