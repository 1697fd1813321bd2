"""`kfacpack run`: a whole comparison from one file.

`kfacpack report`: the results of a run as one page.

`kfacpack demo`: the whole story on the model that comes with the package.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text

from kfacpack.errors import KfacpackError, printable
from kfacpack.format.units import human_bytes, human_seconds

from .console import out, percent, print_json, show_note, show_warnings, steps_bar, stop_on_interrupt, work_bar
from .options import DEVICE, QUIET, RUN, WORKERS, option

if TYPE_CHECKING:
    from kfacpack.experiments.run import Run
    from kfacpack.experiments.stage import Stage


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
    from kfacpack.experiments.plan_file import read_plan

    found, text = read_plan(plan)
    from kfacpack.models.data_loading import use_workers

    use_workers(workers)
    execute_run(found, text, output or Path(plan.stem), device, dry_run=dry_run, as_json=as_json, quiet=quiet)


def execute_run(
    plan: Any, text: str, root: Path, device: str, *, dry_run: bool, as_json: bool, quiet: bool, explain: bool = False
) -> None:
    """`explain`: a line for each kind of stage."""
    start = time.perf_counter()
    # They bring torch, which --help has no need to wait for.
    from kfacpack.estimation.distributed import local_device
    from kfacpack.experiments.report import report
    from kfacpack.experiments.run import Run, peak_bytes

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
        show_warnings(PenaltyWarning, show=not quiet),
        stop_on_interrupt(f"what is done is kept in {root}. The same command goes on from there") as stopped,
    ):
        results = begun.execute(_stage_reporter(show, explain), stopped)
    page = report(root, root / "report.html")
    if as_json:
        print_json(results)
    elif show:
        print_summary(results)
        took = f"{human_seconds(time.perf_counter() - start)}, at most {human_bytes(peak_bytes())} of memory"
        out.print(Text(f"wrote {page} and {root / 'results.json'}: {took}"), soft_wrap=True)


def _stage_reporter(show: bool, explain: bool) -> Any:
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
    from kfacpack.experiments.report import report as write_report
    from kfacpack.experiments.results_schema import UnknownKeyWarning

    show = not (quiet or as_json)
    with show_warnings(UnknownKeyWarning, show=not quiet), steps_bar("figures", show=show) as advance:
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


def demo(
    output: Path = option(RUN, Path("demo"), "--output", "-o", metavar="DIR", help="The folder to write to."),
    every: bool = option(RUN, False, "--all", help="All eight tasks instead of three; takes longer."),
    device: str = DEVICE,
    as_json: bool = option(RUN, False, "--json", help="Print the results as JSON."),
    quiet: bool = QUIET,
) -> None:
    """Three tasks, a small CLIP: vectors trained apart, with and without the penalty, added up, negated, measured.

    It is a plan like any other, written to DIR/plan.yaml for you to copy and edit; 'kfacpack run' carries it out again.
    """
    from kfacpack.experiments.plan_file import parse, plan_text
    from kfacpack.format.writer import write_atomically

    path, text = output / "plan.yaml", plan_text(every=every)
    try:
        output.mkdir(parents=True, exist_ok=True)
        before = path.read_text(encoding="utf-8") if path.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise KfacpackError(f"{output}: cannot be used for the demo: {error}. Give another folder with -o") from error
    if before is not None and before != text:
        remedy = f"Carry it out with 'kfacpack run {path} -o {output}', or give another folder with -o"
        raise KfacpackError(f"{path}: is there already, and is not the demo's. {remedy}")
    write_atomically(path, text.encode())
    if not (quiet or as_json):
        out.print(f"the plan is {path}")
    execute_run(parse(text, str(path)), text, output, device, dry_run=False, as_json=as_json, quiet=quiet, explain=True)
    if not (quiet or as_json):
        show_note(f"edit {path} and call 'kfacpack run {path} -o {output}': only what has changed is made again")
