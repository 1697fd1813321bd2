"""`kfacpack export`: writes the factors of a bundle as plain safetensors, or a task vector as a LoRA adapter.

`kfacpack import`: converts published factors to a bundle.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer
from typing_extensions import TypedDict

from kfacpack.errors import KfacpackError, counted
from kfacpack.format.bundle_index import open_container
from kfacpack.format.container import VECTOR
from kfacpack.format.manifest import Fisher, FloatType
from kfacpack.format.reader import Bundle
from kfacpack.format.units import human_bytes

from .console import (
    loading,
    name_cell,
    out,
    percent,
    plain_table,
    print_json,
    print_line,
    print_next,
    show_warnings,
    steps_bar,
)
from .options import (
    AS_JSON,
    IMAGE_SIZE,
    MODEL_NAME,
    PARAMS,
    QUIET,
    RUN_PANEL,
    WEIGHTS,
    File,
    check_output,
    load_model_option,
    option,
    output_option,
)

if TYPE_CHECKING:
    from kfacpack.vectors.adapter_export import LoraExport


class ExportOutput(TypedDict):
    """Output of `kfacpack export --json`."""

    path: str
    bytes: int
    dtype: FloatType
    """Data type of the matrices."""
    blocks: int
    """Number of blocks in the bundle."""


class AdapterMatrixOutput(TypedDict):
    """A weight matrix of an adapter, with its approximation errors.

    The metric of a bundle with the curvature G is the norm whose square is τᵀGτ.
    """

    parameter: str
    rank: int
    method: Literal["factors", "svd", "metric"]
    """How the matrix was obtained. factors: from the factors in the vector, without loss. svd: as a truncated SVD.
    metric: as an approximation whose error in the metric of the bundle is smaller than that of the SVD."""
    error: float
    """Relative error in the Frobenius norm."""
    metric_error: float | None
    """Relative error in the metric of the bundle; null without `--bundle` or if the matrix has norm zero in this
    metric."""
    svd_metric_error: float | None
    """Relative error of the truncated SVD in the metric of the bundle; null in the same cases as `metric_error`."""


class LostParameterOutput(TypedDict):
    """A parameter of the vector that the adapter does not contain."""

    parameter: str
    reason: str
    share: float
    """The parameter's share of the squared norm of the vector."""
    metric_share: float | None
    """τᵀGτ for this parameter alone, divided by τᵀGτ for the whole vector; null without `--bundle` or if the latter is
    zero."""


class AdapterOutput(TypedDict):
    """Output of `kfacpack export --lora RANK --json`."""

    path: str
    bytes: int
    """Size of the weights file of the adapter."""
    rank: int
    """Largest rank of the matrices."""
    error: float
    """Relative error of the whole vector in the Frobenius norm, including lost parameters."""
    metric_error: float | None
    """Relative error of the whole vector in the metric of the bundle; null without `--bundle` or if the vector has norm
    zero in this metric."""
    matrices: list[AdapterMatrixOutput]
    lost: list[LostParameterOutput]
    linearised: bool
    """Whether the vector was trained in the linearised model, whose outputs differ from those of the model
    with the adapter."""


ADAPTER_PANEL = "LoRA adapter"


def export(
    file: File = typer.Argument(..., metavar="FILE", help="Bundle or task vector to export."),
    output: Path = output_option("PATH", help="Output: a .safetensors file for a bundle, or a folder for an adapter."),
    dtype: FloatType = option(RUN_PANEL, "float32", "--dtype", help="Data type of the exported matrices of a bundle."),
    lora: int | None = option(
        ADAPTER_PANEL, None, "--lora", min=1, metavar="RANK", help="Write a task vector as a LoRA adapter of this rank."
    ),
    bundle: File | None = option(
        ADAPTER_PANEL,
        None,
        "--bundle",
        metavar="FILE.kfac",
        help="Approximate each matrix so that its error is small in the metric of this bundle, τᵀGτ. [default: "
        "approximate each matrix by its truncated SVD]",
    ),
    model: str | None = option(
        ADAPTER_PANEL,
        None,
        "--model",
        metavar="MODEL",
        help="Base model, whose layer types determine which weights are exported. [default: the base model recorded in "
        "the vector]",
    ),
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
) -> None:
    """Write the factors of a bundle as plain safetensors, or a task vector as a LoRA adapter for PEFT.

    For a bundle, the matrices are named PARAMETER/A and PARAMETER/B, or PARAMETER/G. They are dense, regardless of how
    the bundle stores them, except that diagonal matrices are stored as vectors. The file's metadata describes how the
    parameters form the matrix that the factors act on, how the factors are scaled, and how to apply them.

    For a task vector, --lora RANK writes a folder that peft.PeftModel.from_pretrained can apply to the base model. An
    adapter cannot contain biases, norm layers, class tokens or embeddings. If the vector changes such parameters, they
    are listed with their share of the squared norm of the vector.
    """
    is_vector = VECTOR.manifest in open_container(file).metadata
    check_output(output, [file, *([bundle] if bundle else [])], allow_folder=is_vector)
    if is_vector:
        if lora is None:
            raise KfacpackError(f"{file}: is a task vector; pass --lora RANK to export it as a LoRA adapter")
        if dtype != "float32":
            raise KfacpackError("--dtype applies to bundles, but LoRA adapters are always float32; omit --dtype")
        _export_adapter(file, output, lora, bundle, model, as_json=as_json, quiet=quiet)
        return
    if options := [name for name, value in (("--lora", lora), ("--bundle", bundle), ("--model", model)) if value]:
        problem = f"{options[0]} applies to task vectors, but this file is not a task vector"
        raise KfacpackError(f"{file}: {problem}; omit {options[0]}")
    _export_factors(file, output, dtype, as_json=as_json, quiet=quiet)


def _export_factors(file: File, output: Path, dtype: FloatType, *, as_json: bool, quiet: bool) -> None:
    # Imported here so that --help does not wait for torch.
    from kfacpack.curvature.curvature import from_bundle
    from kfacpack.curvature.saving import export as write

    source = Bundle(file)
    curvature = from_bundle(source)
    show = not (quiet or as_json)
    with steps_bar("writing", show=show) as advance:
        write(curvature, output, dtype=dtype, on_progress=advance)
    size = output.stat().st_size
    if as_json:
        result: ExportOutput = {
            "path": str(output),
            "bytes": size,
            "dtype": dtype,
            "blocks": len(curvature.blocks),
        }
        print_json(result)
    elif show:
        blocks = f"{counted(len(curvature.blocks), 'block')}, dense, {dtype}"
        print_line(f"wrote {output}: {blocks}, {human_bytes(size)}, from {human_bytes(source.nbytes)}")
        print_line("next: open the file with safetensors.safe_open; its metadata() describes the layout", style="dim")


def _export_adapter(
    file: File, output: Path, rank: int, bundle: File | None, model: str | None, *, as_json: bool, quiet: bool
) -> None:
    # Imported here so that --help does not wait for torch.
    from kfacpack.vectors.adapter_export import LinearVectorWarning, export_lora
    from kfacpack.vectors.task_vector import TaskVector

    vector = TaskVector.load(file)
    show = not (quiet or as_json)
    loaded_model = None
    if model is not None:
        with loading(model, show=show):
            # Only the classes of the modules are needed, so no weights are downloaded.
            loaded_model = load_model_option(model, "random", None)
    with show_warnings(LinearVectorWarning, show=not quiet), steps_bar("approximating", show=show) as advance:
        result = export_lora(vector, output, rank=rank, bundle=bundle, model=loaded_model, on_progress=advance)
    if as_json:
        adapter: AdapterOutput = {
            "path": str(output),
            "bytes": result.nbytes,
            "rank": result.rank,
            "error": result.error,
            "metric_error": result.metric_error,
            "matrices": [
                {
                    "parameter": matrix.parameter,
                    "rank": matrix.rank,
                    "method": matrix.method,
                    "error": matrix.error,
                    "metric_error": matrix.metric_error,
                    "svd_metric_error": matrix.svd_metric_error,
                }
                for matrix in result.matrices
            ],
            "lost": [
                {
                    "parameter": parameter.parameter,
                    "reason": parameter.reason,
                    "share": parameter.share,
                    "metric_share": parameter.metric_share,
                }
                for parameter in result.lost
            ],
            "linearised": vector.is_linear,
        }
        print_json(adapter)
    elif show:
        _print_adapter(result)


def _print_adapter(result: LoraExport) -> None:
    measured = result.metric_error is not None
    errors_in_metric = ("metric error", "metric error of SVD") if measured else ()
    table = plain_table("weight", "method", numbers=("rank", "error", *errors_in_metric))
    for matrix in result.matrices:
        errors = (matrix.metric_error, matrix.svd_metric_error) if measured else ()
        cells = [percent(matrix.error), *map(percent, errors)]
        table.add_row(name_cell(matrix.parameter), matrix.method, str(matrix.rank), *cells)
    out.print(table)
    drift = f", {percent(result.metric_error)} in the metric of the bundle" if measured else ""
    matrices = counted(len(result.matrices), "matrix", "matrices")
    size = f"{matrices} of rank up to {result.rank}, {human_bytes(result.nbytes)}"
    print_line(f"wrote {result.path}: {size}; error {percent(result.error)}{drift}")
    if result.lost:
        share = f"{percent(sum(parameter.share for parameter in result.lost))} of the vector's squared norm"
        if measured:
            # Each share is computed for one parameter alone, so the shares may add up to more than 100%.
            share += f" and {percent(sum(parameter.metric_share or 0.0 for parameter in result.lost))} of τᵀGτ"
        names = ", ".join(f"{parameter.parameter} ({parameter.reason})" for parameter in result.lost[:LOST_SHOWN])
        more = f" and {len(result.lost) - LOST_SHOWN} more" if len(result.lost) > LOST_SHOWN else ""
        print_line(f"lost parameters: {len(result.lost)}, with {share}: {names}{more}")
    print_line(f"next: peft.PeftModel.from_pretrained(model.module, {str(result.path)!r})", style="dim")


LOST_SHOWN = 4
"""Maximum number of lost parameters that are printed; --json lists all of them."""
FACTORS_PANEL = "Factors"
ImportLayout = Literal["mammoth"]


class LeftOutOutput(TypedDict):
    """A file, block or parameter that was not imported."""

    what: str
    why: str


class ImportOutput(TypedDict):
    """Output of `kfacpack import --json`."""

    path: str
    sha256: str
    """Digest of the bundle."""
    bytes: int
    task: str
    files: list[str]
    """The files that were read."""
    blocks: int
    """Number of blocks in the bundle."""
    parameters: int
    """Number of parameters that the bundle covers."""
    examples: int
    positions: int
    """Number of positions (tokens) per example in the layers that process every token."""
    weights_compared: bool
    """Whether the factors were compared with the model's weights. Some files lack the data for this comparison."""
    left_out: list[LeftOutOutput]


def import_(
    layout: ImportLayout = typer.Argument(
        ...,
        metavar="mammoth",
        help="Layout of the files. mammoth: files written by Mammoth, the framework of the authors of the TAK paper.",
    ),
    source: str = typer.Argument(..., metavar="DIR|hf://OWNER/REPO/DIR", help="Folder with the files."),
    output: Path = output_option("FILE.kfac"),
    model: str = MODEL_NAME,
    weights: str | None = WEIGHTS,
    image_size: int | None = IMAGE_SIZE,
    params: list[str] | None = PARAMS,
    task: str | None = option(
        FACTORS_PANEL,
        None,
        "--task",
        metavar="TASK",
        help="Task name to record in the bundle. If the folder contains the tasks of Mammoth's dataset seq-8vision, "
        "this name also selects the files.",
    ),
    files: str | None = option(
        FACTORS_PANEL,
        None,
        "--files",
        metavar="DATASET_task_N",
        help="Prefix of the names of the files to read. Needed only if the folder contains files of several tasks.",
    ),
    fisher: Fisher = option(
        FACTORS_PANEL,
        "mc",
        "--fisher",
        help="How the factors were estimated. mc: from gradients of f along probes, which are random directions in the "
        "output space of f. exact: from the gradients of all output dimensions of f.",
    ),
    samples: int | None = option(
        FACTORS_PANEL,
        None,
        "--samples",
        min=1,
        metavar="M",
        help="Number of probes per example. Required with --fisher mc, because the files do not record this number.",
    ),
    dataset_size: int | None = option(
        FACTORS_PANEL,
        None,
        "--dataset-size",
        min=1,
        metavar="N",
        help="Number of examples in the whole dataset. By default, `kfacpack merge` uses this number as the weight of "
        "the bundle.",
    ),
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
) -> None:
    """Convert published factors, which are stored as pickle files, to a bundle.

    The pickle files are read in a separate process, which has limited memory and time and can only create tensors.
    --model is the model for which the factors were computed. The factors are compared with the weights of this model.
    From the Hub, only the five files of one task are downloaded. Example:

    kfacpack import mammoth hf://aimagelab-ta/TAK/vitb16/fisher_8vision/kfac/mc_full --model ViT-B-16/openai --task dtd
    --samples 1 -o dtd.kfac
    """
    # Imported here so that --help does not wait for torch.
    from kfacpack.hub.mammoth import IMPORTERS

    check_output(output, [])
    show = not (quiet or as_json)
    with loading(model, show=show):
        loaded_model = load_model_option(model, weights, image_size)
    with steps_bar("importing", show=show) as advance:
        imported = IMPORTERS[layout](
            source,
            loaded_model,
            output,
            task=task,
            files=files,
            fisher=fisher,
            samples=samples,
            params=params or None,
            dataset_size=dataset_size,
            on_progress=advance,
        )
    bundle = Bundle(output)
    if as_json:
        result: ImportOutput = {
            "path": str(output),
            "sha256": bundle.digest,
            "bytes": bundle.nbytes,
            "task": imported.task,
            "files": list(imported.files),
            "blocks": imported.blocks,
            "parameters": imported.parameters,
            "examples": imported.examples,
            "positions": imported.positions,
            "weights_compared": imported.weights_compared,
            "left_out": [{"what": what, "why": why} for what, why in imported.left_out],
        }
        print_json(result)
    elif show:
        blocks, examples = counted(imported.blocks, "block"), counted(imported.examples, "example")
        size = f"{blocks}, {human_bytes(bundle.nbytes)}, from {examples}"
        print_line(f"wrote {output}: bundle of {loaded_model.name} for the task {imported.task}; {size}")
        for name, reason in imported.left_out:
            print_line(f"not imported: {name} ({reason})")
        if dataset_size is None:
            print_line("the dataset size is unknown (see --dataset-size), so `kfacpack merge` requires --weights")
        print_next("merge", output, "OTHER.kfac", "-o", "merged.kfac")
