"""`kfacpack negate`: a task vector the other way round, to forget its task."""

from __future__ import annotations

from pathlib import Path

import typer

from .console import print_json
from .options import IMAGE_SIZE, MODEL_NAME, QUIET, RUN, WEIGHTS, File, option
from .vectors import SAVE_MODEL, Wanted, write


def negate(
    vector: File = typer.Argument(..., metavar="FILE.safetensors", help="The task vector."),
    output: Path = option(RUN, ..., "--output", "-o", metavar="NEGATED.safetensors", help="The file to write."),
    alpha: float = option(RUN, 1.0, "--alpha", metavar="α", help="The result is -α τ."),
    save_model: Path | None = SAVE_MODEL,
    model: str = MODEL_NAME,
    weights: str | None = WEIGHTS,
    image_size: int | None = IMAGE_SIZE,
    as_json: bool = option(RUN, False, "--json", help="Print what was made as JSON."),
    quiet: bool = QUIET,
) -> None:
    """Negate a task vector: a model that it is added to forgets the task. Its heads stay as they are.

    Added to the vector itself, it gives zero, exactly.
    """
    from kfacpack.vectors.vector import TaskVector

    wanted = Wanted(save_model, model, weights, image_size)
    wanted.check(output, [vector])
    said = write(-alpha * TaskVector.load(vector), output, wanted, show=not (quiet or as_json), quiet=quiet)
    if as_json:
        print_json({"alpha": alpha, **said})
