"""`kfacpack run`: runs a plan. `kfacpack report`: writes the report of a run. `kfacpack demo`: runs an example."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typing_extensions import TypedDict

from kfacpack._compat import require
from kfacpack.errors import KfacpackError, counted
from kfacpack.format.units import human_bytes, human_seconds

from .console import (
    StageRows,
    name_cell,
    out,
    percent,
    plain_table,
    print_json,
    print_line,
    show_note,
    show_warnings,
    steps_bar,
    stop_on_interrupt,
)
from .options import AS_JSON, DEVICE, EVENTS, JOBS, QUIET, RUN_PANEL, THREADS, WORKERS, option, output_option

if TYPE_CHECKING:
    from kfacpack.experiments.plan import Plan
    from kfacpack.experiments.results import StageEvent
    from kfacpack.experiments.run import Run, StageCallback, StageDisplay
    from kfacpack.experiments.stage import Stage


SHARES = {
    "individual": "individual",
    "added": "sum",
    "normalized": "normalised",
    "recovered": "recovered",
    "removed": "negated",
    "control_kept": "control kept",
}
"""Keys of the summary whose values are fractions, with their column headings."""
DEMO_SHARES = {"individual": "own vector", "added": "all added, α = 1"}
"""Keys and column headings that `kfacpack demo` uses instead of `SHARES`."""


class PlannedStageOutput(TypedDict):
    """A stage of a plan."""

    stage: str
    """Kind and name of the stage, such as bundles/digits.kronecker.seed-0."""
    done: bool
    """Whether the output of the stage already exists."""
    seconds: float | None
    """Estimated time; null if the stage is done."""
    command: str | None
    """The `kfacpack` command that writes the file of the stage; null if there is no such command."""


class RunForecastOutput(TypedDict):
    """Output of `kfacpack run --dry-run --json`."""

    stages: list[PlannedStageOutput]
    seconds: float
    """Estimated time of all stages that are not done."""


class ReportOutput(TypedDict):
    """Output of `kfacpack report --json`."""

    page: str
    bytes: int
    """Size of the HTML file."""
    numbers: str
    """JSON file with the numbers that the page shows."""
    figures: list[str]
    """SVG files of the figures; each figure is also written as PNG."""


def run(
    plan: Path = typer.Argument(
        ..., metavar="PLAN.yaml", help="Plan file. Paths in the plan are relative to the folder of this file."
    ),
    output: Path | None = output_option("DIR", None, "Output folder. [default: PLAN, or PLAN-NAME with --scale]"),
    scale: str | None = option(
        RUN_PANEL,
        None,
        "--scale",
        metavar="NAME",
        help="Name of an entry in the plan's `scales`. The settings in this entry override those of the plan.",
    ),
    device: str = DEVICE,
    dry_run: bool = option(
        RUN_PANEL, False, "--dry-run", help="Show the stages and their estimated time without running them."
    ),
    gpu: str | None = option(
        RUN_PANEL,
        None,
        "--gpu",
        metavar="NAME",
        help="With --dry-run: check the plan without loading weights or data, and show shapes, file sizes and the "
        "estimated time on this GPU, such as A100.",
    ),
    as_json: bool = AS_JSON,
    jobs: int | None = JOBS,
    threads: int | None = THREADS,
    ray: str | None = option(
        RUN_PANEL,
        None,
        "--ray",
        metavar="[ADDRESS]",
        help="Compute the stages on a Ray cluster. Without ADDRESS, a running cluster is used if there is one; "
        "otherwise, a new one is started on this machine.",
    ),
    events: bool = EVENTS,
    workers: int | None = WORKERS,
    quiet: bool = QUIET,
) -> None:
    """Run a plan: estimate, merge, train, add, negate, measure, and write a report.

    Each stage writes one file, whose name contains a hash of everything that determines its content. A second run
    therefore computes only the stages that have changed, and an interrupted run continues where it stopped. The results
    are written to DIR/results.json and the report to DIR/report.html. Both list the commands that write the files of
    the stages.

    Independent stages run at the same time in worker processes, or on a Ray cluster. DIR/events.jsonl records when and
    where each stage ran, and DIR/logs contains the output of the workers. The results do not depend on --jobs.

    To get a plan to start from, run `kfacpack demo`.
    """
    from kfacpack.experiments.plan_file import read_plan

    parsed, text = read_plan(plan, scale)
    # Imported here so that --help does not wait for torch.
    from kfacpack.models.data_loading import use_workers

    use_workers(workers)
    if gpu is not None:
        if not dry_run:
            raise KfacpackError("--gpu requires --dry-run; to select the device of a run, use --device")
        _print_offline_forecast(parsed, gpu, as_json=as_json, quiet=quiet)
        return
    options = Execution(device, jobs, threads, ray, dry_run, as_json, quiet, events)
    execute_run(parsed, text, output or Path(f"{plan.stem}-{scale}" if scale else plan.stem), options)


@dataclass(frozen=True)
class Execution:
    """Execution options of `run` and `demo`."""

    device: str
    jobs: int | None
    threads: int | None
    ray: str | None = None
    dry_run: bool = False
    as_json: bool = False
    quiet: bool = False
    events: bool = False
    is_demo: bool = False
    """Whether to print explanations of the stages and the results."""


def execute_run(plan: Plan, text: str, root: Path, options: Execution) -> None:
    """Runs a plan and prints its results.

    Args:
        plan: The plan.
        text: YAML source of the plan.
        root: Output folder.
        options: The options of the command.
    """
    start = time.perf_counter()
    if not options.dry_run:
        # The report is written after all stages. Missing packages are reported now, before the stages run.
        require(extra="report", feature="the report of a run")
    # Imported here so that --help does not wait for torch.
    from kfacpack.estimation.distributed import local_device
    from kfacpack.experiments.jobs import JobsWarning
    from kfacpack.experiments.run import Run

    device, jobs = local_device(options.device), 1 if options.dry_run else options.jobs
    with (
        show_warnings(JobsWarning, show=not options.quiet),
        Run(plan, text, root, device, jobs, options.threads, options.ray) as planned,
    ):
        _execute(planned, start, options)


def _execute(planned: Run, start: float, options: Execution) -> None:
    """Executes a checked plan and prints the results; `start` is the time when the command started."""
    as_json, quiet, is_demo = options.as_json, options.quiet, options.is_demo
    plan, root, show = planned.plan, planned.root, not (quiet or as_json)
    for task in () if quiet else plan.tasks:
        for notice in planned.graph.context.task(task.name).notices(plan.model.name):
            show_note(f"warning: {notice}")
    if options.dry_run:
        if as_json or not quiet:
            _print_forecast(planned, as_json=as_json)
        return
    from kfacpack.experiments.report import report
    from kfacpack.training.metrics import PenaltyWarning

    costs = {stage.key: stage.cost() for stage in planned.pending()}
    with (
        show_warnings(PenaltyWarning, show=not quiet),
        stop_on_interrupt(f"finished stages are kept in {root}; repeat the command to continue") as stopped,
        StageRows(costs, len(planned.stages), show=show and not options.events) as rows,
    ):
        results = planned.execute(
            _stage_reporter(rows, explain=show and is_demo), stopped, _print_event if options.events else _ignore_event
        )
    page = report(root, root / "report.html")
    if as_json:
        print_json(results)
    elif show:
        if is_demo:
            print_line("")
        print_summary(results, DEMO_SHARES if is_demo else SHARES)
        if is_demo:
            _print_conclusion(root)
        usage = f"{human_seconds(time.perf_counter() - start)}, at most {human_bytes(planned.peak_bytes)} of memory"
        print_line(f"wrote {page} and {root / 'results.json'}: {usage}")
        _print_open(page)


def _print_conclusion(root: Path) -> None:
    """Prints the headline of the report."""
    from kfacpack.experiments.report_accuracy import headline
    from kfacpack.experiments.report_content import joined_text
    from kfacpack.experiments.results_schema import read_results

    out.print("", joined_text(headline(read_results(root))), "", sep="\n", markup=False)


def _print_open(page: Path) -> None:
    print_line(f"next: open {page} in a browser", style="dim")


def _print_event(event: StageEvent) -> None:
    print(json.dumps(event, ensure_ascii=False), file=sys.stderr, flush=True)


def _ignore_event(event: StageEvent) -> None:
    pass


def _stage_reporter(rows: StageRows, *, explain: bool) -> StageDisplay:
    """Returns the callback that displays the progress of each stage.

    Args:
        rows: The progress bars.
        explain: Whether to print the purpose of each kind of stage when the first stage of that kind starts.
    """
    explained: set[str] = set()

    @contextmanager
    def watch(stage: Stage, number: int, total: int) -> Iterator[StageCallback]:
        if explain and stage.kind not in explained:
            explained.add(stage.kind)
            print_line(f"  {stage.kind:<15}{stage.purpose}")
        with rows.row(f"{stage.kind}/{stage.name}", stage.key) as advance:
            yield advance

    return watch


def _print_forecast(planned: Run, *, as_json: bool) -> None:
    pending = planned.pending()
    seconds = planned.forecast()
    if as_json:
        stages: list[PlannedStageOutput] = [
            {
                "stage": f"{stage.kind}/{stage.name}",
                "done": stage.done,
                "seconds": seconds.get(stage.key),
                "command": stage.command(),
            }
            for stage in planned.stages
        ]
        output: RunForecastOutput = {"stages": stages, "seconds": sum(seconds.values())}
        print_json(output)
        return
    for stage in pending:
        print_line(f"{stage.kind}/{stage.name}  about {human_seconds(seconds[stage.key])}")
    finished = len(planned.stages) - len(pending)
    total = human_seconds(sum(seconds.values()))
    print_line(
        f"{counted(len(pending), 'stage')} to run, {finished} finished; "
        f"about {total} in one process, extrapolated from one batch"
    )


def _print_offline_forecast(plan: Plan, gpu: str, *, as_json: bool, quiet: bool) -> None:
    """Checks a plan without loading weights or data, and prints the predicted file sizes and times on a GPU."""
    from kfacpack.estimation.forecast import EFFICIENCY
    from kfacpack.experiments.offline_check import check_offline

    forecast = check_offline(plan, gpu)
    if as_json:
        print_json(asdict(forecast))
        return
    if quiet:
        return
    table = plain_table("stages", numbers=("number", "files", f"hours on one {forecast.gpu}"))
    for kind in forecast.kinds:
        table.add_row(kind.kind, str(kind.stages), human_bytes(kind.bytes), f"{kind.hours:.2f}")
    table.add_row("all", str(sum(kind.stages for kind in forecast.kinds)), human_bytes(forecast.bytes),
                  f"{forecast.hours:.1f}")  # fmt: skip
    out.print(table)
    largest = f"matrices of up to {forecast.largest_side}×{forecast.largest_side}"
    shapes = f"{forecast.parameters:,} trained weights in {counted(forecast.blocks, 'block')}, {largest}"
    print_line(f"{forecast.model}: {shapes}, {forecast.forward_flops / 1e9:.2f} GFLOP per example")
    assumption = f"the times assume {EFFICIENCY:.0%} of the GPU's published speed"
    print_line(f"all stages were checked without weights or data; {assumption}")


def print_summary(results: dict[str, Any], shares: Mapping[str, str] = SHARES) -> None:
    """Prints the summary of a run, with one row for each arm and merge method.

    Args:
        results: The content of `results.json`.
        shares: Keys of the summary to print, with their column headings. The AUROC is always printed.
    """
    table = plain_table("arm", "added by", numbers=[*shares.values(), "AUROC"])
    table.add_row("base model", "", "", percent(results["base"]["mean"]))
    for line in results["summary"]:
        table.add_row(
            name_cell(line["arm"]),
            line["method"],
            *(percent(line[key]) for key in shares),
            "" if line["auroc"] is None else f"{line['auroc']:.3f}",
        )
    out.print(table)


def report(
    run_dir: Path = typer.Argument(..., metavar="RUN_DIR", help="Output folder of a run, which contains results.json."),
    output: Path = output_option("FILE.html", Path("report.html")),
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
) -> None:
    """Write the results of a run as one HTML page with tables, figures and commands.

    The page is self-contained. The numbers are also written to a JSON file with the same name as the page. The figures
    are also written as SVG and PNG to the folder figures/ beside the page.
    """
    # Imported here so that --help does not wait for matplotlib.
    from kfacpack.experiments.report import report as write_report
    from kfacpack.experiments.results_schema import UnknownKeyWarning

    show = not (quiet or as_json)
    with show_warnings(UnknownKeyWarning, show=not quiet), steps_bar("figures", show=show) as advance:
        page = write_report(run_dir, output, on_progress=advance)
    numbers = page.with_suffix(".json")
    content = json.loads(numbers.read_text(encoding="utf-8"))
    files = [picture["file"] for section in content["sections"] for picture in section["pictures"]]
    if as_json:
        figures = [str(page.parent / "figures" / f"{file}.svg") for file in files]
        result: ReportOutput = {
            "page": str(page),
            "bytes": page.stat().st_size,
            "numbers": str(numbers),
            "figures": figures,
        }
        print_json(result)
    elif show:
        size = human_bytes(page.stat().st_size)
        print_line(f"wrote {page}: {size}, with {counted(len(files), 'figure')}; the numbers are in {numbers}")
        _print_open(page)


def demo(
    output: Path = output_option("DIR", Path("demo"), "Output folder."),
    all_tasks: bool = option(RUN_PANEL, False, "--all", help="Use all eight tasks instead of three."),
    device: str = DEVICE,
    jobs: int | None = JOBS,
    threads: int | None = THREADS,
    as_json: bool = AS_JSON,
    events: bool = EVENTS,
    quiet: bool = QUIET,
) -> None:
    """Run an example: train task vectors for three tasks on a small CLIP model, with and without the penalty.

    The vectors are then added, negated and measured. The report is written to DIR/report.html.

    The plan is written to DIR/plan.yaml. You can edit the plan and run it again with `kfacpack run`.

    By default, the demo uses only CPU cores that are idle.
    """
    require(extra="demo", feature="the demo")
    from kfacpack.experiments.plan_file import parse, plan_text
    from kfacpack.format.writer import write_atomically

    path, text = output / "plan.yaml", plan_text(all_tasks=all_tasks)
    try:
        output.mkdir(parents=True, exist_ok=True)
        existing = path.read_text(encoding="utf-8") if path.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise KfacpackError(f"{output}: cannot be used for the demo: {error}. Pass another folder with -o") from error
    if existing is not None and existing != text:
        remedy = f"Run it with `kfacpack run {path} -o {output}`, or pass another folder with -o"
        raise KfacpackError(f"{path}: the file already exists and differs from the plan of the demo. {remedy}")
    write_atomically(path, text.encode())
    show = not (quiet or as_json)
    plan = parse(text, str(path))
    if show:
        tasks = ", ".join(task.name for task in plan.tasks)
        _print_lines(INTRODUCTION.format(count=len(plan.tasks), tasks=tasks, plan=path))
    jobs = jobs or idle_jobs()
    options = Execution(device, jobs, threads, as_json=as_json, quiet=quiet, events=events, is_demo=True)
    execute_run(plan, text, output, options)
    if show:
        _print_lines(CLOSING.format(output=output, plan=path))


INTRODUCTION = """\
Can one model have the skills of {count} fine-tuned ones?

The same small CLIP model is fine-tuned separately on each task ({tasks}).
The change to the weights is a task vector, and the vectors of all tasks
are added to the model. This is done twice:
  without        ordinary fine-tuning: the vectors interfere with each other
  kfac           with a penalty made from the curvature of the other tasks: a few
                 matrices per layer, which are shared instead of the data

The plan is {plan}. Its stages:"""
CLOSING = """\
What to look at in the report:
  Accuracy over α  with the penalty, the maximum is near α = 1: no tuning needed
  Disentanglement  in dark areas, the vectors do not affect each other's tasks
  Localisation     each vector changes the outputs on its own task only
In practice, the owners of the tasks would publish the bundles in {output}/bundles.
To try other settings, edit {plan} and run
  kfacpack run {plan} -o {output}"""


def _print_lines(text: str) -> None:
    for line in text.splitlines():
        print_line(line)


def idle_jobs() -> int | None:
    """Returns the number of idle CPU cores, to be used as the number of worker processes.

    Returns None, the default of --jobs, if all cores are idle or if the number of idle cores is unknown.
    """
    from kfacpack.estimation.distributed import usable_cores

    idle = _idle_cores()
    return None if idle is None or round(idle) >= usable_cores() else max(1, round(idle))


def _idle_cores(seconds: float = 0.5) -> float | None:
    """Returns the mean number of idle CPU cores over `seconds`, or None if the system does not report idle times."""

    def idle_seconds() -> float:
        _, _, _, _, idle, waiting, *_ = Path("/proc/stat").read_text(encoding="ascii").split(maxsplit=7)
        return (int(idle) + int(waiting)) / os.sysconf("SC_CLK_TCK")

    try:
        start, before = time.perf_counter(), idle_seconds()
        time.sleep(seconds)
        return (idle_seconds() - before) / (time.perf_counter() - start)
    except (OSError, ValueError):
        return None
