"""`kfacpack estimate`: the curvature of a task, written to a bundle."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kfacpack.errors import KfacpackError
from kfacpack.format.manifest import EstimateStructure, Fisher, FloatType, Probe, Sharing
from kfacpack.format.reader import Bundle
from kfacpack.format.units import human_bytes, human_seconds
from kfacpack.models.prompts import PromptStyle

from .compress import print_report, report_json
from .console import (
    examples_bar,
    loading,
    name_cell,
    out,
    plain_table,
    print_json,
    print_line,
    print_next,
    stop_on_interrupt,
)
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


ESTIMATE_PANEL = "Estimate"


def estimate(
    model: str = MODEL_NAME,
    task: str = option(
        DATA,
        ...,
        "--task",
        metavar="TASK",
        help="Task name, as listed by `kfacpack tasks`, or any name with --data.",
    ),
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
    split: str = option(DATA, "train", "--split", metavar="SPLIT", help="Split to sample examples from."),
    examples: str = option(
        DATA, "256", "--examples", metavar="N|P%|all", help="Number of examples, sampled without replacement."
    ),
    shard: str | None = option(
        DATA,
        None,
        "--shard",
        metavar="K/N",
        help="Use every N-th example, starting at the K-th; `merge --rule shards` combines the shards.",
    ),
    fisher: Fisher = option(
        ESTIMATE_PANEL, "mc", "--fisher", help="mc: random probes of f; exact: all directions of f."
    ),
    samples: int = option(ESTIMATE_PANEL, 1, "--samples", min=1, help="Probes per example, with mc."),
    probe: Probe = option(ESTIMATE_PANEL, "orthogonal", "--probe", help="Distribution of the probes, with mc."),
    sharing: Sharing = option(
        ESTIMATE_PANEL,
        "expand",
        "--sharing",
        help="KFAC-expand or KFAC-reduce, for weights that are shared by several positions.",
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
    batch_size: int = option(RUN, 32, "--batch-size", min=1, help="Examples per forward pass."),
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
            # The task is loaded first, so that a misspelt name is reported before the model is loaded.
            loaded_task = load_task_option(task, data, columns, model, quiet=quiet or distributed.rank() != 0)
            loaded_model = load_model_option(model, weights, image_size, dtype, place, prompts=prompts)
        patterns = tuple(params) if params else None
        run = TaskEstimate(
            loaded_model, loaded_task, options, examples, batch_size, split, patterns, _parse_shard(shard)
        )
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
        print_line(f"wrote {output}: {size}, from {len(run.indices)} examples in {human_seconds(seconds)}")
        if run.report:
            print_report(run.report, f"compressed by {run.options.compress}", bundle.nbytes)
            if run.options.diagonal_blocks > 1:
                print_line("entries outside the diagonal blocks were not computed, so their error is not measured")
        print_next("inspect", output)


def _print_forecast(forecast: Forecast) -> None:
    table = plain_table("block", "operation", "ΔW", "structure", numbers=("bytes",))
    for block in forecast.blocks:
        name = name_cell(" + ".join(block.parameters))
        table.add_row(name, block.operation, f"{block.rows}×{block.columns}", block.structure, human_bytes(block.bytes))
    out.print(table)
    for heading, names in (("frozen", forecast.frozen), ("f does not depend on", forecast.unused)):
        if names:
            print_line(f"{heading}: {', '.join(names)}")
    print_line(
        f"{len(forecast.blocks)} blocks, {human_bytes(forecast.bytes)}; "
        f"{forecast.examples} examples in {forecast.batches} batches"
    )
    print_line(
        f"about {human_seconds(forecast.seconds)} for all batches, extrapolated from one; peak memory about "
        f"{human_bytes(forecast.peak_memory)}, in addition to Python and its libraries"
    )
