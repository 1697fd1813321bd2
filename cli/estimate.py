"""`kfacpack estimate`: estimates the curvature of a task and writes it to a bundle."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import NotRequired, TypedDict

from kfacpack.errors import KfacpackError, counted
from kfacpack.format.manifest import EstimateStructure, Fisher, FloatType, Metric, Probe, Sharing
from kfacpack.format.reader import Bundle
from kfacpack.format.units import human_bytes, human_seconds
from kfacpack.models.prompts import PromptStyle

from .bundles import CompressionOutput, print_report, report_json
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
    AS_JSON,
    COLUMNS,
    DATA_FOLDER,
    DATA_PANEL,
    DEVICE,
    DTYPE,
    IMAGE_SIZE,
    MAX_SHARD_SIZE,
    MODEL_NAME,
    PARAMS,
    PROMPTS,
    QUIET,
    RESUME,
    RUN_PANEL,
    TASK,
    WEIGHTS,
    WORKERS,
    check_output,
    check_shard_size,
    default_output,
    examples_option,
    load_model_option,
    load_task_option,
    option,
    output_option,
    split_option,
)

if TYPE_CHECKING:
    from kfacpack.estimation.forecast import Forecast, Gpu
    from kfacpack.estimation.task_estimate import TaskEstimate
    from kfacpack.models.model import Loading


ESTIMATE_PANEL = "Estimate"


def estimate(
    model: str = MODEL_NAME,
    task: str = TASK,
    output: Path | None = output_option("FILE.kfac", None, "Output file. [default: TASK.kfac]"),
    weights: str | None = WEIGHTS,
    image_size: int | None = IMAGE_SIZE,
    prompts: PromptStyle | None = PROMPTS,
    params: list[str] | None = PARAMS,
    device: str = DEVICE,
    dtype: FloatType = DTYPE,
    data: str | None = DATA_FOLDER,
    columns: str | None = COLUMNS,
    split: str = split_option("train"),
    examples: str = examples_option("256"),
    shard: str | None = option(
        DATA_PANEL,
        None,
        "--shard",
        metavar="K/N",
        help="Use only shard K of N: every N-th example, starting at the K-th. `kfacpack merge --rule shards` joins "
        "the bundles of all shards.",
    ),
    fisher: Fisher = option(
        ESTIMATE_PANEL,
        "mc",
        "--fisher",
        help="How the Gauss-Newton matrix is estimated. mc: from gradients of f along probes, which are random "
        "directions in the output space of f. exact: from the gradients of all output dimensions of f.",
    ),
    samples: int = option(ESTIMATE_PANEL, 1, "--samples", min=1, help="Number of probes per example with --fisher mc."),
    probe: Probe = option(
        ESTIMATE_PANEL,
        "orthogonal",
        "--probe",
        help="Distribution of the probes; used only with --fisher mc and --metric l2.",
    ),
    metric: Metric = option(
        ESTIMATE_PANEL,
        "l2",
        "--metric",
        help="How changes in f are measured. l2: by the squared norm. kl: by the KL divergence between the output "
        "distributions of a language model.",
    ),
    sharing: Sharing = option(
        ESTIMATE_PANEL,
        "expand",
        "--sharing",
        help="Variant of KFAC for layers that apply the same weights at several positions: KFAC-expand or KFAC-reduce.",
    ),
    structure: EstimateStructure = option(
        ESTIMATE_PANEL,
        "kronecker",
        "--structure",
        help="Structure of the blocks. kronecker: Kronecker factors. diagonal: only the diagonal of G.",
    ),
    compress: str | None = option(
        ESTIMATE_PANEL,
        None,
        "--compress",
        metavar="CODEC",
        help="Compress the bundle with this codec, such as block:8 or svd:32+int8; see `kfacpack compress`. With "
        "block:K, only the diagonal blocks are computed.",
    ),
    seed: int = option(ESTIMATE_PANEL, 0, "--seed", min=0, help="Seed for the choice of examples and for the probes."),
    batch_size: int = option(RUN_PANEL, 32, "--batch-size", min=1, help="Number of examples per forward pass."),
    offload: bool = option(
        RUN_PANEL, False, "--offload", help="Accumulate the factors in CPU memory instead of GPU memory."
    ),
    stream: bool = option(
        RUN_PANEL,
        False,
        "--stream",
        help="Estimate layer by layer, with the factors of only one layer in memory at a time. If the name of the "
        "model starts with hf: or lm:, the weights of the other layers are not in memory either.",
    ),
    stream_folder: Path | None = option(
        RUN_PANEL,
        None,
        "--stream-folder",
        metavar="DIR",
        help="Folder in which --stream stores the inputs and gradients of the layers. [default: the folder that "
        "contains the output]",
    ),
    max_shard_size: str | None = MAX_SHARD_SIZE,
    resume: bool = RESUME,
    dry_run: bool = option(
        RUN_PANEL,
        False,
        "--dry-run",
        help="Show the blocks and the predicted size, time and memory without writing a file.",
    ),
    gpu: str | None = option(
        RUN_PANEL,
        None,
        "--gpu",
        metavar="NAME",
        help="With --stream --dry-run: predict the time on this GPU, such as A100-80GB or H100-80GB.",
    ),
    as_json: bool = AS_JSON,
    workers: int | None = WORKERS,
    quiet: bool = QUIET,
) -> None:
    """Estimate the curvature of a model on a task and write it to a bundle.

    The curvature is the generalised Gauss-Newton matrix of the model output f. It measures how strongly a change to the
    weights changes f.

    Ctrl-C saves the state beside the output. With --resume, the command continues from this state, and the result is
    identical, byte for byte, to that of an uninterrupted run. Processes started by torchrun or accelerate share the
    work: `torchrun --nproc-per-node 2 -m kfacpack_cli estimate …`

    With --stream, the factors of only one layer are in memory at a time, and the result does not change. Intermediate
    files are stored in a folder beside the output. If the output is named NAME.kfac.index.json, the bundle is divided
    into several files.
    """
    # Imported here so that --help does not wait for torch.
    from kfacpack.estimation import distributed
    from kfacpack.estimation.forecast import find_gpu
    from kfacpack.estimation.options import EstimateOptions
    from kfacpack.estimation.task_estimate import TaskEstimate
    from kfacpack.format.bundle_index import is_index
    from kfacpack.models.data_loading import use_workers

    use_workers(workers)
    target = output or default_output(task, ".kfac")
    check_shard_size(max_shard_size, target)
    if stream_folder is not None and not stream:
        raise KfacpackError("--stream-folder requires --stream; add --stream or omit --stream-folder")
    if gpu is not None and not (stream and dry_run):
        raise KfacpackError("--gpu requires --stream and --dry-run; add both options or omit --gpu")
    target_gpu = None if gpu is None else find_gpu(gpu)
    if not dry_run:
        check_output(target, [weights] if weights else [])
    options = EstimateOptions(fisher, samples, probe, seed, sharing, structure, compress, offload, metric)
    torch_device = distributed.local_device(device)
    with distributed.process_group(torch_device):
        show = distributed.rank() == 0 and not (quiet or as_json)
        with loading(model, show=show):
            # The task is loaded first, so that a misspelt task name is reported before the model is loaded.
            loaded_task = load_task_option(task, data, columns, model, quiet=quiet or distributed.rank() != 0)
            loading_mode: Loading = "memory" if not stream else "shapes" if dry_run else "layers"
            loaded_model = load_model_option(
                model, weights, image_size, dtype, torch_device, prompts=prompts, loading=loading_mode
            )
        patterns = tuple(params) if params else None
        run = TaskEstimate(
            loaded_model,
            loaded_task,
            options,
            examples,
            batch_size,
            split,
            patterns,
            _parse_shard(shard),
            stream,
            stream_folder,
            max_shard_size,
        )
        if dry_run:
            forecast = run.forecast(target_gpu, keeps_segments=is_index(target))
            if distributed.rank() == 0 and (as_json or not quiet):
                print_json(asdict(forecast)) if as_json else _print_forecast(forecast, gpu, target_gpu)
            if show:
                wide = [block for block in forecast.blocks if block.structure == "kronecker"]
                _print_wide_factors([max(block.rows, block.columns) for block in wide], run)
            return
        _run(run, target, resume, show=show, as_json=as_json)


class EstimateOutput(TypedDict):
    """Output of `kfacpack estimate --json`. With `--dry-run`, a forecast is printed instead."""

    path: str
    sha256: str
    """Digest of the bundle."""
    bytes: int
    blocks: int
    """Number of blocks in the bundle."""
    parameters: int
    """Number of parameters that the bundle covers."""
    examples: int
    """Number of examples that were used."""
    dataset_size: int
    """Number of examples in the split. By default, `kfacpack merge` uses this number as the weight of the bundle."""
    seconds: float
    compression: NotRequired[CompressionOutput]
    """Size and errors of the compressed bundle; only with `--compress`."""


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
        result: EstimateOutput = {
            "path": str(output),
            "sha256": bundle.digest,
            "bytes": bundle.nbytes,
            "blocks": len(curvature.blocks),
            "parameters": len(curvature.parameters),
            "examples": len(run.indices),
            "dataset_size": len(run.split),
            "seconds": seconds,
        }
        if run.report:
            result["compression"] = report_json(run.report, bundle.nbytes)
        print_json(result)
    elif show:
        size = f"{counted(len(curvature.blocks), 'block')}, {human_bytes(bundle.nbytes)}"
        print_line(f"wrote {output}: {size}, from {counted(len(run.indices), 'example')} in {human_seconds(seconds)}")
        if run.report:
            print_report(run.report, f"compressed with {run.options.compress}", bundle.nbytes)
            if run.options.diagonal_blocks > 1:
                print_line("entries outside the diagonal blocks were not computed; the errors do not account for them")
        _print_wide_factors([max(block.join.rows, block.join.columns) for block in curvature.blocks], run)
        print_next("inspect", output)


def _print_wide_factors(sides: list[int], run: TaskEstimate) -> None:
    """Prints a note if only the diagonal blocks of wide factors are computed."""
    from kfacpack.estimation.collectors import WIDE_BLOCKS, WIDE_SIDE

    wide = [side for side in sides if side > WIDE_SIDE]
    if wide and run.options.chain.structure is None and run.options.structure == "kronecker":
        whole = human_bytes(2 * max(wide) ** 2)
        print_line(
            f"factors wider than {WIDE_SIDE} are computed as {WIDE_BLOCKS} diagonal blocks, because a full factor of "
            f"width {max(wide)} takes up {whole}; to compute full factors, use --compress block:1"
        )


def _print_forecast(forecast: Forecast, gpu: str | None, figures: Gpu | None) -> None:
    table = plain_table("block", "operation", "ΔW", "structure", numbers=("bytes",))
    for block in forecast.blocks:
        name = name_cell(" + ".join(block.parameters))
        table.add_row(name, block.operation, f"{block.rows}×{block.columns}", block.structure, human_bytes(block.bytes))
    out.print(table)
    for heading, names in (("frozen", forecast.frozen), ("f does not depend on", forecast.unused)):
        if names:
            print_line(f"{heading}: {', '.join(names)}")
    print_line(
        f"{counted(len(forecast.blocks), 'block')}, {human_bytes(forecast.bytes)}; "
        f"{counted(forecast.examples, 'example')} in {counted(forecast.batches, 'batch', 'batches')}"
    )
    memory = f"peak memory about {human_bytes(forecast.peak_memory)}, not counting Python and its libraries"
    if figures is None:
        print_line(f"about {human_seconds(forecast.seconds)} for all batches, extrapolated from one batch; {memory}")
    else:
        from kfacpack.estimation.forecast import DISK_SPEED, EFFICIENCY

        hours = f"about {forecast.seconds / 3600:.2g} hours on {gpu}, assuming {EFFICIENCY:.0%} of its published speed"
        print_line(f"{hours} and a disk speed of {human_bytes(DISK_SPEED)}/s; {memory}")
        fits = "fits" if forecast.peak_memory < 0.9 * figures.memory else "does not fit"
        print_line(f"the estimation {fits} in the memory of the GPU ({human_bytes(figures.memory)})")
    if forecast.stored_bytes:
        print_line(f"disk space during the run: {human_bytes(forecast.stored_bytes)}, in addition to the bundle")
