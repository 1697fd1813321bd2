"""`kfacpack search`: which bundles and vectors there are on the Hub."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from kfacpack.errors import printable

from .console import human_bytes, out, print_json
from .options import RUN, option

WHICH = "Which"


def search(
    base_model: str | None = option(
        WHICH,
        None,
        "--base-model",
        metavar="M",
        help="Only those of this model: as --model has it, or its id on the Hub.",
    ),
    task: str | None = option(WHICH, None, "--task", metavar="T", help="Only those of this task."),
    author: str | None = option(
        WHICH, None, "--author", metavar="NAME", help="Only those of this user or organisation."
    ),
    limit: int = option(WHICH, 20, "--limit", min=1, metavar="N", help="At most so many repositories."),
    as_json: bool = option(RUN, False, "--json", help="Print them as JSON."),
) -> None:
    """List repositories on the Hub that hold bundles or task vectors, with their files."""
    from kfacpack.hub.search import search as searched

    found = searched(base_model=base_model, task=task, author=author, limit=limit)
    if as_json:
        listed = [
            {
                "repository": each.repository,
                "base_models": list(each.bases),
                "tasks": list(each.tasks),
                "downloads": each.downloads,
                "files": [{"name": file.name, "bytes": file.nbytes} for file in each.files],
            }
            for each in found
        ]
        print_json({"repositories": listed})
        return
    if not found:
        out.print("nothing was found; fewer conditions find more")
        return
    table = Table("file", "base model", "tasks", box=None, header_style="bold", pad_edge=False)
    table.add_column("size", justify="right")
    for each in found:
        for file in each.files:
            name = Text(printable(f"hf://{each.repository}/{file.name}"), overflow="fold")
            words = (Text(printable(", ".join(said)), overflow="fold") for said in (each.bases, each.tasks))
            table.add_row(name, *words, human_bytes(file.nbytes))
    out.print(table)
