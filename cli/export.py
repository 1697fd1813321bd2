"""`kfacpack export`: the factors as plain safetensors.

`kfacpack import`: factors that others published, into a bundle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer
from rich.text import Text

from kfacpack.format.manifest import Fisher, FloatType
from kfacpack.format.reader import Bundle
from kfacpack.format.units import human_bytes

from .console import loading, out, print_json, steps_bar
from .options import (
    DATA,
    IMAGE_SIZE,
    MODEL_NAME,
    PARAMS,
    QUIET,
    RUN,
    WEIGHTS,
    File,
    check_output,
    load_model_option,
    option,
)


def export(
    bundle: File = typer.Argument(..., metavar="FILE.kfac", help="The bundle."),
    output: Path = option(RUN, ..., "--output", "-o", metavar="FACTORS.safetensors", help="The file to write."),
    dtype: FloatType = option(RUN, "float32", "--dtype", help="The type of the matrices' numbers."),
    as_json: bool = option(RUN, False, "--json", help="Print what was written as JSON."),
    quiet: bool = QUIET,
) -> None:
    """Write a bundle's factors as plain safetensors, for programs that know nothing of kfacpack.

    Every matrix is dense, whatever the bundle holds it in: PARAMETER/A and PARAMETER/B, or PARAMETER/G; diagonal ones
    are vectors. The file's metadata says how parameters join to the matrix that they act on, how they are scaled, and
    in three lines how to apply them.
    """
    # It brings torch, which --help has no need to wait for.
    from kfacpack.curvature.curvature import from_bundle
    from kfacpack.curvature.export import export as write

    opened = Bundle(bundle)
    check_output(output, [bundle])
    curvature = from_bundle(opened)
    with steps_bar("writing", show=not (quiet or as_json)) as advance:
        write(curvature, output, dtype=dtype, progress=advance)
    size = output.stat().st_size
    if as_json:
        print_json({"path": str(output), "bytes": size, "dtype": dtype, "blocks": len(curvature.blocks)})
    elif not quiet:
        blocks = f"{len(curvature.blocks)} blocks, dense, {dtype}"
        out.print(Text(f"wrote {output}: {blocks}, {human_bytes(size)}, from {human_bytes(opened.nbytes)}"))


ImportLayout = Literal["mammoth"]


def import_(
    layout: ImportLayout = typer.Argument(
        ..., metavar="mammoth", help="Whose layout: mammoth, the framework of the method's authors."
    ),
    source: str = typer.Argument(..., metavar="DIR|hf://OWNER/REPO/DIR", help="The folder with the files."),
    output: Path = option(RUN, ..., "--output", "-o", metavar="FILE.kfac", help="The file to write."),
    model: str = MODEL_NAME,
    weights: str | None = WEIGHTS,
    image_size: int | None = IMAGE_SIZE,
    params: list[str] | None = PARAMS,
    task: str | None = option(
        DATA, None, "--task", help="What the bundle calls the task. Of seq-8vision, it also says which files are meant."
    ),
    files: str | None = option(
        DATA,
        None,
        "--files",
        metavar="DATASET_task_N",
        help="How their names begin, where there are several tasks'.",
    ),
    fisher: Fisher = option(
        DATA, "mc", "--fisher", help="How f was differentiated: in random directions (mc), or in every one (exact)."
    ),
    samples: int | None = option(
        DATA,
        None,
        "--samples",
        min=1,
        metavar="M",
        help="In how many random directions for each example, which the files do not say.",
    ),
    dataset_size: int | None = option(
        DATA, None, "--dataset-size", min=1, metavar="N", help="Of the whole data set, by which 'merge' weights tasks."
    ),
    as_json: bool = option(RUN, False, "--json", help="Print what was made, and what was left out, as JSON."),
    quiet: bool = QUIET,
) -> None:
    """Make a bundle of factors that were published as pickles, scaled and named as all bundles are.

    The files are read in a process of its own, with limits on memory and time, that builds tensors and nothing else.
    Give the model that they were computed with: its weights are compared with what the factors show of theirs. From the
    Hub, the five files of one task are fetched.

    kfacpack import mammoth hf://aimagelab-ta/TAK/vitb16/fisher_8vision/kfac/mc_full --model ViT-B-16/openai --task dtd
    --samples 1 -o dtd.kfac
    """
    # They bring torch, which --help has no need to wait for.
    from kfacpack.hub.mammoth import IMPORTERS

    check_output(output, [])
    show = not (quiet or as_json)
    with loading(model, show=show):
        found = load_model_option(model, weights, image_size)
    with steps_bar("importing", show=show) as advance:
        made = IMPORTERS[layout](
            source,
            found,
            output,
            task=task,
            files=files,
            fisher=fisher,
            samples=samples,
            params=params or None,
            dataset_size=dataset_size,
            progress=advance,
        )
    bundle = Bundle(output)
    if as_json:
        print_json(
            {
                "path": str(output),
                "sha256": bundle.digest,
                "bytes": bundle.nbytes,
                "task": made.task,
                "files": list(made.files),
                "blocks": made.blocks,
                "parameters": made.parameters,
                "examples": made.examples,
                "positions": made.positions,
                "weights_compared": made.weights_compared,
                "left_out": [{"what": what, "why": why} for what, why in made.left_out],
            }
        )
    elif not quiet:
        size = f"{made.blocks} blocks, {human_bytes(bundle.nbytes)}, from {made.examples} examples"
        out.print(Text(f"wrote {output}: {made.task} of {found.name}: {size}"), soft_wrap=True)
        for what, why in made.left_out:
            out.print(Text(f"not imported: {what} ({why})"), soft_wrap=True)
        if dataset_size is None:
            out.print("how large the data set is was not given (--dataset-size): 'merge' will ask for --weights")
