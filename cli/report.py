"""`kfacpack report`: the results of a run as one page."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.text import Text

from kfacpack.errors import printable

from .console import human_bytes, noting, out, print_json
from .options import QUIET, RUN, option
from .progress import steps_bar


def report(
    run_dir: Path = typer.Argument(..., metavar="RUN_DIR", help="The folder of a run, with its results.json."),
    output: Path = typer.Option(Path("report.html"), "--output", "-o", metavar="FILE.html", help="The page to write."),
    as_json: bool = option(RUN, False, "--json", help="Print what was written as JSON."),
    quiet: bool = QUIET,
) -> None:
    """Write the results of a run as one page: tables, figures, and how they were made.

    The page needs no network and no file beside it. Beside it are written, all the same, the numbers in it (the same
    name with .json) and every figure as SVG and PNG (in the folder figures).
    """
    from kfacpack.reporting.report import report as write_report
    from kfacpack.reporting.unknown import UnknownKeyWarning

    show = not (quiet or as_json)
    with noting(UnknownKeyWarning, show=not quiet), steps_bar("figures", show=show) as advance:
        page = write_report(run_dir, output, on_progress=advance)
    numbers = page.with_suffix(".json")
    said = json.loads(numbers.read_text(encoding="utf-8"))
    files = [picture["file"] for section in said["sections"] for picture in section["pictures"]]
    if as_json:
        figures = [str(page.parent / "figures" / f"{file}.svg") for file in files]
        print_json({"page": str(page), "bytes": page.stat().st_size, "numbers": str(numbers), "figures": figures})
    elif show:
        size = human_bytes(page.stat().st_size)
        out.print(Text(printable(f"wrote {page}: {size}, with {len(files)} figures; its numbers are in {numbers}")))
