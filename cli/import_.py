"""`kfacpack import`: factors that others published, into a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer
from rich.text import Text

from kfacpack.bundle.manifest import Fisher
from kfacpack.bundle.reader import Bundle

from .console import human_bytes, out, print_json
from .options import DATA, IMAGE_SIZE, MODEL_NAME, PARAMS, QUIET, RUN, WEIGHTS, check_output, load_named, option
from .progress import loading, steps_bar

Published = Literal["mammoth"]


def import_(
    layout: Published = typer.Argument(
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
    from kfacpack.importing import IMPORTERS

    check_output(output, [])
    show = not (quiet or as_json)
    with loading(model, show=show):
        found = load_named(model, weights, image_size)
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
