"""`kfacpack tasks`: which tasks there are, what one consists of, and what its pictures look like."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text

from kfacpack.errors import KfacpackError, printable
from kfacpack.running.files import write_whole

from .console import facts_table, out, print_json

if TYPE_CHECKING:
    from kfacpack.tasks import Task

COUNTED = ("train", "validation", "test")


def tasks(
    name: str | None = typer.Argument(None, metavar="[NAME]", help="Show this task: its classes and prompts."),
    sheet: Path | None = typer.Option(
        None, "--sheet", metavar="FILE.png", help="Draw thumbnails of the task's pictures, by class."
    ),
    split: str | None = typer.Option(None, "--split", help="The split that --sheet draws; else train."),
    data: Path | None = typer.Option(None, "--data", metavar="DIR", help="The task's data, as for 'estimate'."),
    as_json: bool = typer.Option(False, "--json", help="Print everything that is known of the tasks as JSON."),
) -> None:
    """List the tasks there are, show one of them, or draw its pictures."""
    from kfacpack.tasks import TASKS, load_task

    if split is not None and sheet is None:
        raise KfacpackError("--split chooses what --sheet draws: give --sheet FILE.png as well")
    if name is None:
        if sheet or data:
            raise KfacpackError(f"{'--sheet' if sheet else '--data'} is about one task: give its name as well")
        known = [load() for load in TASKS.values()]
        print_json({"tasks": list(map(_as_json, known))}) if as_json else _print_list(known)
        return
    task = load_task(name, data)
    drawn = _draw(task, split or "train", sheet) if sheet else {}
    if as_json:
        print_json(_as_json(task) | drawn)
    elif sheet:
        about = drawn["sheet"]
        left_out = f", {about['left_out']} more are left out" if about["left_out"] else ""
        out.print(Text(printable(f"wrote {sheet}: {about['classes']} classes{left_out}")), soft_wrap=True)
    else:
        _print_details(task)


def _draw(task: Task, split: str, file: Path) -> dict[str, Any]:
    """What JSON says about a sheet that was written."""
    from kfacpack.tasks.sheet import draw_sheet

    if file.suffix.lower() != ".png":
        raise KfacpackError(f"{file}: a sheet is a PNG; give it a name that ends in .png")
    sheet = draw_sheet(task, split)
    picture = io.BytesIO()
    sheet.image.save(picture, format="PNG")
    write_whole(file, picture.getvalue())
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


def _print_list(known: list[Task]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("task", no_wrap=True, min_width=max(len(task.name) for task in known))
    for heading in ("classes", *COUNTED):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("source", overflow="fold")
    table.add_column("license", overflow="fold")
    for task in known:
        counts = [f"{task.sizes[split]:,}" if split in task.sizes else "" for split in COUNTED]
        table.add_row(task.name, f"{len(task.classes or ())}", *counts, Text(task.source), Text(task.license or ""))
    out.print(table)
    out.print(Text("tasks NAME shows one of them, tasks NAME --sheet FILE.png draws its pictures", style="dim"))


def _print_details(task: Task) -> None:
    out.print(facts_table(_facts(task)))


def _facts(task: Task) -> Iterator[tuple[str, str]]:
    yield "task", task.name
    if task.classes is not None:
        yield f"{len(task.classes)} classes", ", ".join(task.classes)
    for number, template in enumerate(task.templates):
        yield "templates" if number == 0 else "", template
    yield "examples", ", ".join(f"{split} {size:,}" for split, size in task.sizes.items())
    yield "source", task.source
    if task.license:
        yield "license", task.license
