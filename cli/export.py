"""`kfacpack export`: writes the factors of a bundle as plain safetensors.

`kfacpack import`: converts published factors to a bundle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer
from typing_extensions import TypedDict

from kfacpack.format.manifest import Fisher, FloatType
from kfacpack.format.reader import Bundle
from kfacpack.format.units import human_bytes

from .console import loading, print_json, print_line, print_next, steps_bar
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


class ExportOutput(TypedDict):
    """Output of `kfacpack export --json`."""

    path: str
    bytes: int
    dtype: FloatType
    """Dtype of the matrices."""
    blocks: int
    """Number of blocks."""


def export(
    bundle: File = typer.Argument(..., metavar="FILE.kfac", help="Bundle to export."),
    output: Path = output_option("FACTORS.safetensors"),
    dtype: FloatType = option(RUN_PANEL, "float32", "--dtype", help="Dtype of the matrices."),
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
) -> None:
    """Write the factors of a bundle as plain safetensors, for use without kfacpack.

    The matrices are called PARAMETER/A and PARAMETER/B, or PARAMETER/G. They are dense, however the bundle stores them,
    except that diagonal ones are vectors. The file's metadata describes how parameters form the matrix that the
    factors act on, how the factors are scaled, and how to apply them.
    """
    # Imported here so that --help does not wait for torch.
    from kfacpack.curvature.curvature import from_bundle
    from kfacpack.curvature.export import export as write

    source = Bundle(bundle)
    check_output(output, [bundle])
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
        blocks = f"{len(curvature.blocks)} blocks, dense, {dtype}"
        print_line(f"wrote {output}: {blocks}, {human_bytes(size)}, from {human_bytes(source.nbytes)}")
        print_line("next: read it with safetensors.safe_open; its metadata() describes the layout", style="dim")


FACTORS_PANEL = "Factors"
ImportLayout = Literal["mammoth"]


class LeftOutOutput(TypedDict):
    """A part of the published files that was not imported."""

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
    """Number of blocks."""
    parameters: int
    """Number of parameters that the bundle covers."""
    examples: int
    positions: int
    """Number of positions of the layers that process every token."""
    weights_compared: bool
    """Whether the factors show that they were computed at the model's weights."""
    left_out: list[LeftOutOutput]


def import_(
    layout: ImportLayout = typer.Argument(
        ..., metavar="mammoth", help="Layout of the files: mammoth, the framework of the method's authors."
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
        help="Task name in the bundle. For seq-8vision it also selects the files.",
    ),
    files: str | None = option(
        FACTORS_PANEL,
        None,
        "--files",
        metavar="DATASET_task_N",
        help="Prefix of the file names, if the folder contains several tasks.",
    ),
    fisher: Fisher = option(
        FACTORS_PANEL,
        "mc",
        "--fisher",
        help="How the factors were estimated. mc: random probes of f. exact: all directions of f.",
    ),
    samples: int | None = option(
        FACTORS_PANEL,
        None,
        "--samples",
        min=1,
        metavar="M",
        help="Probes per example. Required with mc, because the files do not record the number.",
    ),
    dataset_size: int | None = option(
        FACTORS_PANEL,
        None,
        "--dataset-size",
        min=1,
        metavar="N",
        help="Size of the whole dataset, which `kfacpack merge` uses as the weight.",
    ),
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
) -> None:
    """Convert factors that were published as pickles to a bundle.

    The pickles are read in a separate process that has limited memory and time and can only build tensors. --model is
    the model that the factors were computed with; its weights are checked against the factors. From the Hub, only the
    five files of one task are downloaded.

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
        size = f"{imported.blocks} blocks, {human_bytes(bundle.nbytes)}, from {imported.examples} examples"
        print_line(f"wrote {output}: {imported.task} of {loaded_model.name}: {size}")
        for name, reason in imported.left_out:
            print_line(f"not imported: {name} ({reason})")
        if dataset_size is None:
            print_line("the dataset size is unknown (see --dataset-size), so `kfacpack merge` requires --weights")
        print_next("merge", output, "OTHER.kfac", "-o", "merged.kfac")
