"""`kfacpack estimate`: the curvature of a task, written to a bundle."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from kfacpack.errors import KfacpackError
from kfacpack.format.manifest import EstimateStructure, Fisher, FloatType, Probe, Sharing
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


def estimate(
    model: str = MODEL_NAME,
    task: str = option(DATA, ..., "--task", help="Task name, as listed by `kfacpack tasks`, or any name with --data."),
    output: Path | None = option(
        RUN, None, "--output", "-o", metavar="FILE.kfac", help="Bundle to write. [default: TASK.kfac]"
    ),
    weights: str | None = WEIGHTS,
    image_size: int | None = IMAGE_SIZE,
    prompts: PromptStyle | None = PROMPTS,
    params: list[str] | None = PARAMS,
    device: str = DEVICE,
    dtype: FloatType = DTYPE,
    data: str | None = DATA_FOLDER,
    columns: str | None = COLUMNS,
    split: str = option(DATA, "train", "--split", help="Split to sample examples from."),
    examples: str = option(
        DATA, "256", "--examples", metavar="N|P%|all", help="Number of examples, sampled without replacement."
    ),
    shard: str | None = option(
        DATA,
        None,
        "--shard",
        metavar="K/N",
        help="Take every N-th example from the K-th on; `merge --rule shards` joins the parts.",
    ),
    fisher: Fisher = option(
        ESTIMATE_PANEL, "mc", "--fisher", help="mc: random probes of f; exact: all of its directions."
    ),
    samples: int = option(ESTIMATE_PANEL, 1, "--samples", min=1, help="Probes per example, with mc."),
    probe: Probe = option(ESTIMATE_PANEL, "orthogonal", "--probe", help="Distribution of the probes, with mc."),
    sharing: Sharing = option(
        ESTIMATE_PANEL, "expand", "--sharing", help="KFAC-expand or KFAC-reduce where positions share a weight."
    ),
    structure: EstimateStructure = option(
        ESTIMATE_PANEL, "kronecker", "--structure", help="Kronecker factors, or the diagonal of G."
    ),
    compress: str | None = option(
        ESTIMATE_PANEL,
        None,
        "--compress",
        metavar="CODEC",
        help="Codec to apply, as for `compress`: block:8, svd:32+int8, … With block:K only the blocks are computed.",
    ),
    seed: int = option(ESTIMATE_PANEL, 0, "--seed", min=0, help="Seed for the examples and the probes."),
    batch_size: int = option(RUN, 32, "--batch-size", min=1, help="Examples computed at a time."),
    offload: bool = option(RUN, False, "--offload", help="Accumulate on the CPU, whatever the device."),
    resume: bool = option(RUN, False, "--resume", help="Resume an interrupted run."),
    dry_run: bool = option(RUN, False, "--dry-run", help="Show blocks, bytes, time and memory; write nothing."),
    as_json: bool = option(RUN, False, "--json", help="Print the result, or the dry run, as JSON."),
    workers: int | None = WORKERS,
    quiet: bool = QUIET,
) -> None:
    """Estimate the curvature of a model on a task and write it to a bundle.

    Ctrl-C stores the state beside the output; --resume continues from there and gives the same bytes. Under torchrun or
    accelerate launch the processes share the work: torchrun --nproc-per-node 2 -m kfacpack_cli estimate …
    """
    # Imported here so that --help does not wait for torch.
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
            # The task first: a typo should not wait for the model.
            loaded_task = load_task_option(task, data, columns, model, quiet=quiet or distributed.rank() != 0)
            loaded_model = load_model_option(model, weights, image_size, dtype, place, prompts=prompts)
        chosen = tuple(params) if params else None
        run = TaskEstimate(loaded_model, loaded_task, options, examples, batch_size, split, chosen, _parse_shard(shard))
        if dry_run:
            forecast = run.forecast()
            if distributed.rank() == 0 and (as_json or not quiet):
                print_json(asdict(forecast)) if as_json else _print_forecast(forecast)
            return
        _run(run, output or Path(f"{task.replace('/', '-')}.kfac"), resume, show=show, as_json=as_json)


def _parse_shard(shard: str | None) -> tuple[int, int]:
    if shard is None:
        return 1, 1
    match = re.fullmatch(r"([1-9][0-9]{0,6})/([1-9][0-9]{0,6})", shard)
    if match is None or int(match[1]) > int(match[2]):
        raise KfacpackError(f"--shard {shard!r}: expected K/N with K from 1 to N, such as 2/8")
    return int(match[1]), int(match[2])


def _run(run: TaskEstimate, output: Path, resume: bool, *, show: bool, as_json: bool) -> None:
    from kfacpack.estimation import distributed
    from kfacpack.estimation.resume import require_unfinished

    start = time.perf_counter()
    if resume:
        require_unfinished(output)
    with (
        stop_on_interrupt(f"the state is stored beside {output}; continue with --resume") as stopped,
        examples_bar(run.task.name, show=show) as advance,
    ):
        curvature = run.run(output, resume=resume, on_progress=advance, stopped=stopped)
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
                "examples": len(run.indices),
                "dataset_size": len(run.split),
                "seconds": seconds,
                **({"compression": report_json(run.report, bundle.nbytes)} if run.report else {}),
            }
        )
    elif show:
        size = f"{len(curvature.blocks)} blocks, {human_bytes(bundle.nbytes)}"
        out.print(Text(f"wrote {output}: {size}, from {len(run.indices)} examples in {human_seconds(seconds)}"))
        if run.report:
            print_report(run.report, f"compressed by {run.options.compress}", bundle.nbytes)
            if run.options.diagonal_blocks > 1:
                out.print(Text("entries outside the diagonal blocks were not computed, so their loss is not measured"))
        out.print(Text(f"next: kfacpack inspect {output}, or kfacpack merge with other tasks' bundles"))


def _print_forecast(forecast: Forecast) -> None:
    table = Table("block", "operation", "ΔW", "structure", box=None, header_style="bold", pad_edge=False)
    table.add_column("bytes", justify="right")
    for block in forecast.blocks:
        name = Text(" + ".join(block.parameters), overflow="fold")
        table.add_row(name, block.operation, f"{block.rows}×{block.columns}", block.structure, human_bytes(block.bytes))
    out.print(table)
    for heading, names in (("frozen", forecast.frozen), ("f does not depend on", forecast.unused)):
        if names:
            out.print(Text(f"{heading}: {', '.join(names)}"), soft_wrap=True)
    out.print(
        f"{len(forecast.blocks)} blocks, {human_bytes(forecast.bytes)}; "
        f"{forecast.examples} examples in {forecast.batches} batches"
    )
    out.print(
        f"about {human_seconds(forecast.seconds)} for the batches, by the time of one; peak memory about "
        f"{human_bytes(forecast.peak_memory)} on top of what Python and its libraries take"
    )
