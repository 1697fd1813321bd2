"""`kfacpack run`: a whole comparison from one file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text

from kfacpack.errors import printable

from .console import human_bytes, human_seconds, noting, out, percent, print_json, show_note
from .options import DEVICE, QUIET, RUN, WORKERS, option
from .progress import work_bar
from .stopping import stopping

if TYPE_CHECKING:
    from kfacpack.plans.run import Run
    from kfacpack.plans.stages.base import Stage

SHARES = ("individual", "added", "normalized", "recovered", "removed", "control_kept")


def run(
    plan: Path = typer.Argument(..., metavar="PLAN.yaml", help="The plan; paths in it are meant from its folder."),
    output: Path | None = option(
        RUN, None, "--output", "-o", metavar="DIR", help="The folder to write to; else one called as the plan's file."
    ),
    device: str = DEVICE,
    dry_run: bool = option(RUN, False, "--dry-run", help="Show what would run and about how long; write nothing."),
    as_json: bool = option(RUN, False, "--json", help="Print the results as JSON."),
    workers: int | None = WORKERS,
    quiet: bool = QUIET,
) -> None:
    """Carry out a plan: estimate, merge, train, add, negate, measure, and write a report.

    Every file that is made is called by what decides its content. So a second call makes only what has changed, and
    one that was interrupted goes on where it was. The numbers are in DIR/results.json, the page is DIR/report.html,
    both with the commands that make the files, as typed in DIR.

    'kfacpack demo' writes a plan to start from.
    """
    from kfacpack.plans.reading import read_plan

    found, text = read_plan(plan)
    from kfacpack.models.batches import use_workers

    use_workers(workers)
    carry_out(found, text, output or Path(plan.stem), device, dry_run=dry_run, as_json=as_json, quiet=quiet)


def carry_out(
    plan: Any, text: str, root: Path, device: str, *, dry_run: bool, as_json: bool, quiet: bool, explain: bool = False
) -> None:
    """`explain`: a line for each kind of stage."""
    start = time.perf_counter()
    # They bring torch, which --help has no need to wait for.
    from kfacpack.plans.run import Run, peak_bytes
    from kfacpack.reporting.report import report
    from kfacpack.running.processes import local_device

    show = not (quiet or as_json)
    begun = Run(plan, text, root, local_device(device))
    for task in () if quiet else plan.tasks:
        for notice in begun.graph.shop.task(task.name).notices(plan.model.name):
            show_note(f"warning: {notice}")
    if dry_run:
        if as_json or not quiet:
            _print_forecast(begun, as_json=as_json)
        return
    from kfacpack.training.metrics import PenaltyWarning

    with (
        noting(PenaltyWarning, show=not quiet),
        stopping(f"what is done is kept in {root}. The same command goes on from there") as stopped,
    ):
        results = begun.execute(_shower(show, explain), stopped)
    page = report(root, root / "report.html")
    if as_json:
        print_json(results)
    elif show:
        print_summary(results)
        took = f"{human_seconds(time.perf_counter() - start)}, at most {human_bytes(peak_bytes())} of memory"
        out.print(Text(f"wrote {page} and {root / 'results.json'}: {took}"), soft_wrap=True)


def _shower(show: bool, explain: bool) -> Any:
    told: set[str] = set()

    @contextmanager
    def watched(stage: Stage, number: int, total: int) -> Iterator[Callable[[int, int, str], None]]:
        if explain and show and stage.kind not in told:
            told.add(stage.kind)
            out.print(Text(f"{stage.kind}: {stage.why}"), soft_wrap=True)
        with work_bar(f"{number}/{total} {stage.kind}/{stage.name}", show=show) as advance:
            yield advance

    return watched


def _print_forecast(begun: Run, *, as_json: bool) -> None:
    pending = begun.pending()
    seconds = begun.forecast()
    if as_json:
        stages = [
            {
                "stage": f"{stage.kind}/{stage.name}",
                "done": stage.done,
                "seconds": seconds.get(stage.key),
                "command": stage.command(),
            }
            for stage in begun.stages
        ]
        print_json({"stages": stages, "seconds": sum(seconds.values())})
        return
    for stage in pending:
        out.print(Text(f"{stage.kind}/{stage.name}  about {human_seconds(seconds[stage.key])}"), soft_wrap=True)
    made = len(begun.stages) - len(pending)
    out.print(
        f"{len(pending)} stages to run, {made} are there already; about {human_seconds(sum(seconds.values()))}, by the "
        "time of one batch"
    )


def print_summary(results: dict[str, Any]) -> None:
    table = Table("arm", "added by", box=None, header_style="bold", pad_edge=False)
    for heading in ("individual", "sum", "normalised", "recovered", "negated", "control kept", "AUROC"):
        table.add_column(heading, justify="right")
    table.add_row("base model", "", "", percent(results["base"]["mean"]))
    for line in results["summary"]:
        table.add_row(
            Text(printable(line["arm"])),
            line["method"],
            *(percent(line[key]) for key in SHARES),
            "" if line["auroc"] is None else f"{line['auroc']:.3f}",
        )
    out.print(table)
