"""`kfacpack pull`: bundles and task vectors from the Hub."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kfacpack.errors import DoesNotHoldError, KfacpackError, printable

from .console import facts_table, human_bytes, out, print_json, show_error
from .options import QUIET, RUN, option
from .progress import checks_bar


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
    from kfacpack.hub.pull import pull as pulled

    show = not (quiet or as_json)
    try:
        with checks_bar("verifying", show=show) as advance:
            found = pulled(what, files or (), output=output, force=force, progress=advance)
    except DoesNotHoldError as error:
        show_error(f"{error}. It was not put in place")
        raise typer.Exit(1) from error
    if as_json:
        listed = [{"reference": str(each.reference), "path": str(each.path), **each.item.as_json()} for each in found]
        print_json({"files": listed})
    elif show:
        for each in found:
            title = Text(printable(f"{each.path}: {each.item.kind}"))
            out.print(Panel(facts_table(each.item.facts), title=title, title_align="left", expand=False))


def _list(what: str, *, as_json: bool) -> None:
    from kfacpack.hub.repositories import look_at, parse_repository

    name, revision = parse_repository(what)
    files = look_at(name, revision).candidates
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
