"""`kfacpack estimate`: a task's curvature into one file."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.table import Table
from rich.text import Text

from kfacpack.errors import KfacpackError
from kfacpack.format.manifest import Fisher, FloatType, Probe, Sharing
from kfacpack.format.reader import Bundle
from kfacpack.format.units import human_bytes, human_seconds
from kfacpack.models.prompts import PromptStyle

from .compress import print_report, report_json
from .console import examples_bar, loading, out, print_json, stop_on_interrupt
from .options import (
    COLUMNS,
    DATA,
    DATA_FOLDER,
    DEVICE,
    DTYPE,
    IMAGE_SIZE,
    MODEL_NAME,
    PARAMS,
    PROMPTS,
    QUIET,
    RUN,
    WEIGHTS,
    WORKERS,
    load_model_option,
    load_task_option,
    option,
)

if TYPE_CHECKING:
    from kfacpack.estimation.accumulator import Forecast
    from kfacpack.estimation.task_estimate import TaskEstimate


ESTIMATE_PANEL = "The estimate"
Structure = Literal["kronecker", "diagonal"]


def estimate(
    model: str = MODEL_NAME,
    task: str = option(DATA, ..., "--task", help="The task's name."),
    output: Path | None = option(
        RUN, None, "--output", "-o", metavar="FILE.kfac", help="The file to write; else TASK.kfac."
    ),
    weights: str | None = WEIGHTS,
    image_size: int | None = IMAGE_SIZE,
    prompts: PromptStyle | None = PROMPTS,
    params: list[str] | None = PARAMS,
    device: str = DEVICE,
    dtype: FloatType = DTYPE,
    data: str | None = DATA_FOLDER,
    columns: str | None = COLUMNS,
    split: str = option(DATA, "train", "--split", help="The split to draw examples from."),
    examples: str = option(
        DATA, "256", "--examples", metavar="N|P%|all", help="How many; drawn by the seed, none twice."
    ),
    shard: str | None = option(
        DATA,
        None,
        "--shard",
        metavar="K/N",
        help="Every N-th of them, from the K-th on; 'merge --rule shards' joins them.",
    ),
    fisher: Fisher = option(
        ESTIMATE_PANEL, "mc", "--fisher", help="mc: f is differentiated in random directions; exact: in every one."
    ),
    samples: int = option(ESTIMATE_PANEL, 1, "--samples", min=1, help="With mc, directions for each example."),
    probe: Probe = option(ESTIMATE_PANEL, "orthogonal", "--probe", help="With mc, how directions are drawn."),
    sharing: Sharing = option(
        ESTIMATE_PANEL, "expand", "--sharing", help="Which KFAC, where positions share a weight."
    ),
    structure: Structure = option(
        ESTIMATE_PANEL, "kronecker", "--structure", help="diagonal: G's diagonal for every block."
    ),
    compress: str | None = option(
        ESTIMATE_PANEL,
        None,
        "--compress",
        metavar="CODEC",
        help="As 'compress' does: block:8, svd:32+int8, …; of block:K, no more is computed.",
    ),
    seed: int = option(ESTIMATE_PANEL, 0, "--seed", min=0, help="Decides the examples and the directions."),
    batch_size: int = option(RUN, 32, "--batch-size", min=1, help="Examples at a time."),
    offload: bool = option(RUN, False, "--offload", help="Keep the sums on the CPU, whatever the device."),
    resume: bool = option(RUN, False, "--resume", help="Go on with the run that was interrupted."),
    dry_run: bool = option(
        RUN, False, "--dry-run", help="Show blocks, bytes, time, memory, what is frozen; write nothing."
    ),
    as_json: bool = option(RUN, False, "--json", help="Print what was made, or the plan, as JSON."),
    workers: int | None = WORKERS,
    quiet: bool = QUIET,
) -> None:
    """Estimate the curvature of a model on a task's data, and write it to one file.

    Ctrl-C stores what is done beside the output; --resume goes on from there, to the same bytes. Under torchrun or
    accelerate launch, processes share the work: torchrun --nproc-per-node 2 -m kfacpack_cli estimate …
    """
    # They bring torch, which --help has no need to wait for.
    from kfacpack.estimation import distributed
    from kfacpack.estimation.options import EstimateOptions
    from kfacpack.estimation.task_estimate import TaskEstimate
    from kfacpack.models.data_loading import use_workers

    use_workers(workers)
    options = EstimateOptions(fisher, samples, probe, seed, sharing, structure, compress, offload)
    place = distributed.local_device(device)
    with distributed.process_group(place):
        show = distributed.rank() == 0 and not (quiet or as_json)
        with loading(model, show=show):
            # The task first: a slip of the pen should not wait for a model.
            found_task = load_task_option(task, data, columns, model, quiet=quiet or distributed.rank() != 0)
            found_model = load_model_option(model, weights, image_size, dtype, place, seed, prompts)
        chosen = tuple(params) if params else None
        job = TaskEstimate(found_model, found_task, options, examples, batch_size, split, chosen, _parse_shard(shard))
        if dry_run:
            found = job.forecast()
            if distributed.rank() == 0 and (as_json or not quiet):
                print_json(asdict(found)) if as_json else _print_forecast(found)
            return
        _run(job, output or Path(f"{task.replace('/', '-')}.kfac"), resume, show=show, as_json=as_json)


def _parse_shard(shard: str | None) -> tuple[int, int]:
    if shard is None:
        return 1, 1
    match = re.fullmatch(r"([1-9][0-9]{0,6})/([1-9][0-9]{0,6})", shard)
    if match is None or int(match[1]) > int(match[2]):
        raise KfacpackError(f"--shard {shard!r}: expected which part of how many, such as 2/8")
    return int(match[1]), int(match[2])


def _run(job: TaskEstimate, output: Path, resume: bool, *, show: bool, as_json: bool) -> None:
    from kfacpack.estimation import distributed
    from kfacpack.estimation.resume import require_unfinished

    start = time.perf_counter()
    if resume:
        require_unfinished(output)
    kept = f"what is done is stored beside {output}. Go on with --resume"
    with stop_on_interrupt(kept) as stopped, examples_bar(job.task.name, show=show) as advance:
        curvature = job.run(output, resume=resume, on_progress=advance, stopped=stopped)
    if distributed.rank() != 0:
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
                **({"compression": report_json(job.report, bundle.nbytes)} if job.report else {}),
            }
        )
    elif show:
        size = f"{len(curvature.blocks)} blocks, {human_bytes(bundle.nbytes)}"
        out.print(Text(f"wrote {output}: {size}, from {len(job.numbers)} examples in {human_seconds(seconds)}"))
        if job.report:
            print_report(job.report, f"compressed by {job.options.compress}", bundle.nbytes)
            if job.options.diagonal_blocks > 1:
                out.print(Text("what lies between the diagonal blocks of factors was not computed, nor measured"))


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
