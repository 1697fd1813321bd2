"""`kfacpack push`: bundles and task vectors to the Hub.

`kfacpack pull`: bundles and task vectors from the Hub.

`kfacpack search`: which bundles and vectors there are on the Hub.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kfacpack.errors import KfacpackError, VerificationError, printable
from kfacpack.format.reference import Reference
from kfacpack.format.units import human_bytes

from .console import checks_bar, key_value_table, out, print_json, show_error
from .options import QUIET, RUN, option

if TYPE_CHECKING:
    from kfacpack.hub.push import PushResult


REPOSITORY_PANEL, CARD_PANEL = "The repository", "The card"


def push(
    files: list[str] = typer.Argument(
        ..., metavar="FILE... OWNER/REPO", help="Bundles and task vectors, and the repository they go to."
    ),
    private: bool = option(
        REPOSITORY_PANEL, False, "--private", help="If the repository is not there yet, make it private."
    ),
    revision: str | None = option(
        REPOSITORY_PANEL,
        None,
        "--revision",
        "--branch",
        metavar="BRANCH",
        help="Another branch than main; made if it is missing.",
    ),
    message: str | None = option(REPOSITORY_PANEL, None, "--message", "-m", help="What the commit says of itself."),
    license: str | None = option(
        CARD_PANEL,
        None,
        "--license",
        metavar="ID",
        help="The licence you give them, in the Hub's words: apache-2.0, mit.",
    ),
    base_model: str | None = option(
        CARD_PANEL,
        None,
        "--base-model",
        metavar="OWNER/REPO",
        help="The base model on the Hub, where that is not known.",
    ),
    dry_run: bool = option(RUN, False, "--dry-run", help="Show the files and the card; send nothing."),
    as_json: bool = option(RUN, False, "--json", help="Print what was sent, and the card, as JSON."),
    quiet: bool = QUIET,
) -> None:
    """Publish bundles and task vectors on the Hub, with a card made of what they say of themselves.

    They are verified first; exit code 1: one does not hold, and nothing was sent. The repository is made if it is not
    there. Files and card go in one commit; what is there already is not sent again, so that a push that was cut off
    goes on with the same command.

    Of a card that is there, your own text stays: ours lies between two comments. Log in with: hf auth login.
    """
    *paths, repository = files
    if not paths:
        raise KfacpackError(f"{printable(repository)}: expected files and then the repository: push t.kfac owner/repo")
    if Path(repository).exists():
        raise KfacpackError(f"{printable(repository)}: the last word is the repository, owner/repo, and this is a file")
    # They bring torch, which --help has no need to wait for.
    from kfacpack.hub.push import push as pushed

    show = not (quiet or as_json)
    try:
        with checks_bar("verifying", show=show) as advance:
            done = pushed(
                paths,
                repository,
                private=private,
                revision=revision,
                message=message,
                license=license,
                base_model=base_model,
                dry_run=dry_run,
                progress=advance,
            )
    except VerificationError as error:
        show_error(f"{error}. Nothing was sent")
        raise typer.Exit(1) from error
    if as_json:
        print_json(_as_json(done))
    elif show:
        _print(done, dry_run)


def _as_json(done: PushResult) -> dict[str, Any]:
    return {
        "repository": done.repository,
        "revision": done.revision,
        "created": done.creates,
        "commit": done.commit,
        "files": [{**each.item.as_json(), "sent": not each.there} for each in done.files],
        "card_changed": done.card_changed,
        "card": done.card,
    }


def _print(done: PushResult, dry_run: bool) -> None:
    where = f"{done.repository}{f'@{done.revision}' if done.revision else ''}"
    for each in done.files:
        word = "is there" if each.there else "would send" if dry_run else "sent"
        tasks = f": {', '.join(each.item.tasks[:8])}" if each.item.tasks else ""
        said = f"{word} {each.item.name}: {each.item.kind} of {each.item.base.name}{tasks}"
        out.print(Text(printable(f"{said}, {human_bytes(each.item.file.nbytes)}")), soft_wrap=True)
    if dry_run:
        new = (
            "a new repository" if done.creates else "README.md would change" if done.card_changed else "README.md stays"
        )
        out.print(Text(f"to {where}, {new}; nothing was sent. The card:\n"), soft_wrap=True)
        out.print(Text(done.card), soft_wrap=True)
    elif done.commit is None:
        out.print(Text(f"{where} has all of this already; nothing was sent"), soft_wrap=True)
    else:
        card = " and the card" if done.card_changed else ""
        new = ", a new repository" if done.creates else ""
        out.print(
            Text(f"pushed to {where}{new}: commit {done.commit[:12]}, with the files above{card}"), soft_wrap=True
        )
        place = Reference(done.repository, done.files[0].item.name, done.revision)
        out.print(Text(f"read it anywhere as {place}"), soft_wrap=True)


def pull(
    what: str = typer.Argument(..., metavar="hf://OWNER/REPO/FILE|OWNER/REPO", help="A file, or a repository."),
    files: list[str] | None = typer.Argument(
        None, metavar="FILE...", help="Of a repository, these files; else all bundles and task vectors."
    ),
    output: Path | None = option(
        RUN, None, "--output", "-o", metavar="DIR|FILE", help="Where to put them; else the current folder."
    ),
    force: bool = option(RUN, False, "--force", help="Replace a file that is there and differs."),
    listing: bool = option(RUN, False, "--list", help="List what the repository has; fetch nothing."),
    as_json: bool = option(RUN, False, "--json", help="Print what was fetched as JSON."),
    quiet: bool = QUIET,
) -> None:
    """Fetch bundles and task vectors, verify them, and say what they are.

    A branch, tag or commit goes behind the repository: OWNER/REPO@REVISION. What was cut off goes on where it was. Each
    file is checked by the Hub's SHA-256 and by all that 'verify' looks at; exit code 1: it does not hold, and was not
    put in place. A private repository needs a log-in: hf auth login.
    """
    if listing:
        _list(what, as_json=as_json)
        return
    # It brings torch, which --help has no need to wait for.
    from kfacpack.hub.repository import pull as pulled

    show = not (quiet or as_json)
    try:
        with checks_bar("verifying", show=show) as advance:
            found = pulled(what, files or (), output=output, force=force, progress=advance)
    except VerificationError as error:
        show_error(f"{error}. It was not put in place")
        raise typer.Exit(1) from error
    if as_json:
        listed = [{"reference": str(each.reference), "path": str(each.path), **each.item.as_json()} for each in found]
        print_json({"files": listed})
    elif show:
        for each in found:
            title = Text(printable(f"{each.path}: {each.item.kind}"))
            out.print(Panel(key_value_table(each.item.facts), title=title, title_align="left", expand=False))


def _list(what: str, *, as_json: bool) -> None:
    from kfacpack.hub.repository import inspect_repository, parse_repository

    name, revision = parse_repository(what)
    files = inspect_repository(name, revision).candidates
    if as_json:
        print_json({"repository": name, "files": [{"name": file.name, "bytes": file.nbytes} for file in files]})
        return
    if not files:
        raise KfacpackError(f"{printable(what)}: has no files that end in .kfac or .safetensors")
    table = Table("file", box=None, header_style="bold", pad_edge=False)
    table.add_column("size", justify="right")
    for file in files:
        table.add_row(Text(printable(file.name), overflow="fold"), human_bytes(file.nbytes))
    out.print(table)


FILTER_PANEL = "Which"


def search(
    base_model: str | None = option(
        FILTER_PANEL,
        None,
        "--base-model",
        metavar="M",
        help="Only those of this model: as --model has it, or its id on the Hub.",
    ),
    task: str | None = option(FILTER_PANEL, None, "--task", metavar="T", help="Only those of this task."),
    author: str | None = option(
        FILTER_PANEL, None, "--author", metavar="NAME", help="Only those of this user or organisation."
    ),
    limit: int = option(FILTER_PANEL, 20, "--limit", min=1, metavar="N", help="At most so many repositories."),
    as_json: bool = option(RUN, False, "--json", help="Print them as JSON."),
) -> None:
    """List repositories on the Hub that hold bundles or task vectors, with their files."""
    from kfacpack.hub.repository import search as searched

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
