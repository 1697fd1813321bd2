"""`kfacpack estimate`: a task's curvature into one file."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kfacpack.bundle.manifest import Fisher, FloatType, Probe, Sharing
from kfacpack.bundle.reader import Bundle
from kfacpack.errors import printable

from .console import err, human_bytes, human_seconds, out, print_json, show_note

if TYPE_CHECKING:
    from rich.progress import Task

    from kfacpack.estimation.forecast import Forecast
    from kfacpack.estimation.job import Job

MODEL, DATA, HOW, RUN = "The model", "The data", "The estimate", "The run"
Structure = Literal["kronecker", "diagonal"]


def option(panel: str, default: Any, *names: str, help: str, **more: Any) -> Any:
    return typer.Option(default, *names, help=help, rich_help_panel=panel, **more)


def estimate(
    model: str = option(
        MODEL, ..., "--model", help="ViT-B-32, ViT-B-16/TAG (open_clip), timm:NAME, t5:NAME_OR_DIR or hf:NAME_OR_DIR."
    ),
    task: str = option(DATA, ..., "--task", help="The task's name."),
    output: Path | None = option(RUN, None, "--output", "-o", metavar="FILE.kfac", help="Where to; else TASK.kfac."),
    weights: str | None = option(
        MODEL, None, "--weights", metavar="FILE", help="A safetensors file of the model's weights, or the word random."
    ),
    image_size: int | None = option(
        MODEL, None, "--image-size", min=1, metavar="N", help="Pixels of a side, instead of the model's own."
    ),
    params: list[str] | None = option(
        MODEL,
        None,
        "--params",
        metavar="PATTERN",
        help="Cover parameters of this name or pattern; repeatable. Else all that the family does not freeze.",
    ),
    device: str = option(MODEL, "auto", "--device", help="cpu, cuda, cuda:1, mps; auto takes the first GPU there is."),
    dtype: FloatType = option(MODEL, "float32", "--dtype", help="The model's. Sums are float32 at least."),
    data: Path | None = option(
        DATA,
        None,
        "--data",
        metavar="DIR",
        help="The task's data: train-*.parquet as on the Hub, or pictures in a folder for each class.",
    ),
    split: str = option(DATA, "train", "--split", help="The split to draw examples from."),
    examples: str = option(
        DATA, "256", "--examples", metavar="N|P%|all", help="How many; drawn by the seed, none twice."
    ),
    fisher: Fisher = option(HOW, "mc", "--fisher", help="mc: f is asked in random directions; exact: in every one."),
    samples: int = option(HOW, 1, "--samples", min=1, help="With mc, directions for each example."),
    probe: Probe = option(HOW, "orthogonal", "--probe", help="With mc, how directions are drawn."),
    sharing: Sharing = option(HOW, "expand", "--sharing", help="Which KFAC, where positions share a weight."),
    structure: Structure = option(HOW, "kronecker", "--structure", help="diagonal: G's diagonal for every block."),
    compress: str | None = option(
        HOW, None, "--compress", metavar="block:K", help="Keep, and compute, only K diagonal blocks of each factor."
    ),
    seed: int = option(HOW, 0, "--seed", min=0, help="Decides the examples and the directions."),
    batch_size: int = option(RUN, 32, "--batch-size", min=1, help="Examples at a time."),
    offload: bool = option(RUN, False, "--offload", help="Keep the sums on the CPU, whatever the device."),
    resume: bool = option(RUN, False, "--resume", help="Go on with the run that was interrupted."),
    dry_run: bool = option(
        RUN, False, "--dry-run", help="Show blocks, bytes, time, memory, what is frozen; write nothing."
    ),
    as_json: bool = option(RUN, False, "--json", help="Print what was made, or the plan, as JSON."),
    quiet: bool = option(RUN, False, "--quiet", "-q", help="Print nothing but errors."),
) -> None:
    """Estimate the curvature of a model on a task's data, and write it to one file.

    Ctrl-C stores what is done beside the output; --resume goes on from there, to the same bytes. Under torchrun or
    accelerate launch, processes share the work: torchrun --nproc-per-node 2 -m kfacpack_cli estimate …
    """
    # They bring torch, which --help has no need to wait for.
    from kfacpack.estimation import processes
    from kfacpack.estimation.job import Job
    from kfacpack.estimation.options import Options

    options = Options(fisher, samples, probe, seed, sharing, structure, compress, offload)
    place = processes.local_device(device)
    with processes.launched(place):
        show = processes.rank() == 0 and not (quiet or as_json)
        with err.status(Text(f"loading {printable(model)}")) if show and err.is_terminal else nullcontext():
            job = Job(
                *_loaded(model, weights, image_size, dtype, place, seed, task, data),
                options,
                examples,
                batch_size,
                split,
                tuple(params) if params else None,
            )
        if dry_run:
            found = job.forecast()
            if processes.rank() == 0 and (as_json or not quiet):
                print_json(asdict(found)) if as_json else _print_forecast(found)
            return
        _run(job, output or Path(f"{task.replace('/', '-')}.kfac"), resume, show=show, as_json=as_json)


def _loaded(
    model: str,
    weights: str | None,
    image_size: int | None,
    dtype: FloatType,
    device: Any,
    seed: int,
    task: str,
    data: Path | None,
) -> tuple[Any, Any]:
    import torch

    from kfacpack.models import load_model
    from kfacpack.tasks import load_task

    # The task first: a slip of the pen should not wait for a model.
    loaded_task = load_task(task, data)
    return (
        load_model(
            model, weights=weights, image_size=image_size, dtype=getattr(torch, dtype), device=device, seed=seed
        ),
        loaded_task,
    )


def _run(job: Job, output: Path, resume: bool, *, show: bool, as_json: bool) -> None:
    from kfacpack.estimation import processes
    from kfacpack.estimation.job import Interrupted

    start = time.perf_counter()
    with _stopping() as stopped, _progress(job, show=show) as advance:
        try:
            curvature = job.run(output, resume=resume, on_progress=advance, stopped=stopped)
        except Interrupted as interruption:
            show_note(f"interrupted; what is done is stored beside {output}. Go on with --resume")
            raise typer.Exit(130) from interruption
    if processes.rank() != 0:
        return
    seconds, bundle = time.perf_counter() - start, Bundle(output)
    if as_json:
        print_json(
            {
                "path": str(output),
                "sha256": bundle.digest,
                "bytes": bundle.nbytes,
                "blocks": len(curvature.blocks),
                "parameters": len(curvature.parameters),
                "examples": len(job.numbers),
                "dataset_size": len(job.split),
                "seconds": seconds,
            }
        )
    elif show:
        size = f"{len(curvature.blocks)} blocks, {human_bytes(bundle.nbytes)}"
        out.print(Text(f"wrote {output}: {size}, from {len(job.numbers)} examples in {human_seconds(seconds)}"))


@contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C, or a polite request to end, lets the batch at hand finish; the second one does not wait."""
    asked: list[int] = []

    def ask(number: int, frame: object) -> None:
        asked.append(number)
        if len(asked) > 1:
            raise KeyboardInterrupt
        show_note("stopping after this batch; press Ctrl-C again to stop at once")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Speed(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f} examples/s" if task.speed else "")


@contextmanager
def _progress(job: Job, *, show: bool) -> Iterator[Callable[[int, int], None]]:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        Speed(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not (show and err.is_terminal)) as bar:
        task = bar.add_task(printable(job.task.name), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_forecast(found: Forecast) -> None:
    table = Table("block", "operation", "ΔW", "structure", box=None, header_style="bold", pad_edge=False)
    table.add_column("bytes", justify="right")
    for block in found.blocks:
        name = Text(" + ".join(block.parameters), overflow="fold")
        table.add_row(name, block.operation, f"{block.rows}×{block.columns}", block.structure, human_bytes(block.bytes))
    out.print(table)
    for heading, names in (("frozen", found.frozen), ("f does not depend on", found.unused)):
        if names:
            out.print(Text(f"{heading}: {', '.join(names)}"), soft_wrap=True)
    out.print(
        f"{len(found.blocks)} blocks, {human_bytes(found.bytes)}; {found.examples} examples in {found.batches} batches"
    )
    out.print(
        f"about {human_seconds(found.seconds)} for the batches, by the time of one; peak memory about "
        f"{human_bytes(found.peak_memory)} on top of what Python and its libraries take"
    )
