"""What `add` and `negate` share: writing a vector, and the whole model with it.

`kfacpack add`: many task vectors into one.

`kfacpack negate`: a task vector the other way round, to forget its task.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from kfacpack.errors import KfacpackError
from kfacpack.format.units import human_bytes, human_seconds

from .console import loading, out, print_json, show_note, steps_bar
from .options import IMAGE_SIZE, MODEL, MODEL_NAME, QUIET, RUN, WEIGHTS, File, check_output, load_model_option, option

if TYPE_CHECKING:
    from kfacpack.models.model import Model
    from kfacpack.vectors.task_vector import TaskVector


SAVE_MODEL = option(
    MODEL,
    None,
    "--save-model",
    metavar="PATH",
    help="Write the model with the vector added, too: a .safetensors file for open_clip and timm, a folder for t5: and "
    "hf:. --model, --weights and --image-size say which model.",
)
LINEARISED_NOTE = (
    "the vector was trained in the linearised model f + J τ; what is saved is the model itself with the weights "
    "θ0 + τ, which gives other outputs. eval --vector uses the vector as it was trained"
)


@dataclass(frozen=True)
class ModelOutput:
    """What the options say of the model to save, if it is to be saved."""

    path: Path | None
    model: str
    weights: str | None
    image_size: int | None

    def check(self, output: Path, inputs: list[File]) -> None:
        check_output(output, inputs)
        if self.path is None:
            if self.weights or self.image_size:
                raise KfacpackError("--weights and --image-size belong to a model that is saved: give --save-model")
            return
        check_output(self.path, [*inputs, *([self.weights] if self.weights else [])])
        if self.path.resolve() == output.resolve():
            raise KfacpackError(f"{output}: the vector and the model cannot be the same file; give each its own name")


def write(tau: TaskVector, output: Path, wanted: ModelOutput, *, show: bool, quiet: bool) -> dict[str, Any]:
    """Write the vector, and the model where it is wanted, and say so; what `--json` says of both.

    Nothing is written where the model does not fit.
    """
    from kfacpack.vectors.task_vector import TaskVector

    start = time.perf_counter()
    loaded = _load_fitting_model(tau, wanted, show=show)
    with steps_bar("writing", show=show) as advance:
        tau.save(output, progress=advance)
    made, seconds = TaskVector.load(output), time.perf_counter() - start
    if show:
        size = f"{len(made)} parameters, {human_bytes(output.stat().st_size)}, in {human_seconds(seconds)}"
        out.print(Text(f"wrote {output}: {', '.join(made.tasks)}: {size}"), soft_wrap=True)
    return {
        "path": str(output),
        "sha256": made.digest,
        "bytes": output.stat().st_size,
        "seconds": seconds,
        "base": made.about.base.name,
        "regime": made.regime,
        "tasks": list(made.tasks),
        "parameters": len(made),
        "addends": [each.model_dump(mode="json") for each in made.about.addends],
        # From the file, where everything is computed already.
        "model": _save(loaded, made, wanted.path, show=show, quiet=quiet) if loaded and wanted.path else None,
    }


def _load_fitting_model(tau: TaskVector, wanted: ModelOutput, *, show: bool) -> Model | None:
    if wanted.path is None:
        return None
    from kfacpack.curvature.matrices.components import TORCH_TYPES

    # In the precision that the vector was trained from, or the weights would not be the same.
    dtype: Any = str(TORCH_TYPES[tau.about.base.parameters[0].dtype]).removeprefix("torch.")
    with loading(wanted.model, show=show):
        loaded = load_model_option(wanted.model, wanted.weights, wanted.image_size, dtype)
    loaded.checkpoint.check(wanted.path)
    tau.check(loaded.module, loaded.function)
    return loaded


def _save(model: Model, tau: TaskVector, path: Path, *, show: bool, quiet: bool) -> dict[str, Any]:
    tau.apply(model.module, in_place=True)
    model.checkpoint.save(path)
    note = LINEARISED_NOTE if tau.is_linear else None
    load = model.checkpoint.how_to_load(path)
    if show:
        out.print(Text(f"wrote {path}: the model with it; load it with {load}"), soft_wrap=True)
    if note and not quiet:
        show_note(f"note: {note}")
    return {"path": str(path), "load": load, "note": note}


METHOD_PANEL = "The method"


def add(
    vectors: list[File] = typer.Argument(..., metavar="FILE.safetensors...", help="The task vectors."),
    output: Path = option(RUN, ..., "--output", "-o", metavar="SUM.safetensors", help="The file to write."),
    method: str = option(
        METHOD_PANEL,
        "sum",
        "--method",
        help="sum: Σ α τ. ties: trim, elect signs, add up what agrees (the paper: their mean times λ). dare: drop at "
        "random, rescale, add up. tsv: each task's largest singular vectors, made orthogonal (the paper's α is 1). "
        "iso: the sum with a flat spectrum, Iso-C; iso-cts: with directions of single tasks (the paper chooses α).",
    ),
    alpha: list[float] | None = option(
        METHOD_PANEL,
        None,
        "--alpha",
        metavar="α",
        help="What the result is multiplied by; or, repeated, one for each vector in their order. Every method gives "
        "a vector on the scale of the sum, not the mean, to be used at 1, which is the default.",
    ),
    keep: float | None = option(
        METHOD_PANEL,
        None,
        "--keep",
        metavar="X",
        help="ties: the share of each vector's numbers that stays; 0.2 by default.",
    ),
    drop: float | None = option(
        METHOD_PANEL, None, "--drop", metavar="P", help="dare: the probability of being dropped; 0.9 by default."
    ),
    seed: int | None = option(METHOD_PANEL, None, "--seed", help="dare: decides what is dropped; 0 by default."),
    common: float | None = option(
        METHOD_PANEL,
        None,
        "--common",
        metavar="X",
        help="iso-cts: the share of directions that the sum gives; 0.8 by default.",
    ),
    mean: bool = option(
        METHOD_PANEL,
        False,
        "--mean",
        help="Average where the publication does: ties, what agrees; tsv and iso, parameters that are no matrices.",
    ),
    save_model: Path | None = SAVE_MODEL,
    model: str = MODEL_NAME,
    weights: str | None = WEIGHTS,
    image_size: int | None = IMAGE_SIZE,
    as_json: bool = option(RUN, False, "--json", help="Print what was made, and how, as JSON."),
    quiet: bool = QUIET,
) -> None:
    """Add task vectors up to one that has all their heads, or merge them by another method.

    Vectors of other base models, regimes or f, or with other heads for the same task, are refused.

    Memory does not grow with the number of vectors; the methods with singular vectors hold one layer of all of them.
    """
    # They bring torch, which --help has no need to wait for.
    from kfacpack.vectors.add import add as added
    from kfacpack.vectors.methods import METHODS

    wanted = ModelOutput(save_model, model, weights, image_size)
    wanted.check(output, vectors)
    given = {"keep": keep, "drop": drop, "seed": seed, "common": common, "mean": mean or None}
    settings = {name: value for name, value in given.items() if value is not None}
    alphas = alpha or [1.0]
    tau = added(vectors, method, alphas[0] if len(alphas) == 1 else alphas, **settings)
    said = write(tau, output, wanted, show=not (quiet or as_json), quiet=quiet)
    if as_json:
        by = METHODS[method].of(settings)
        how: dict[str, Any] = {"method": method, "settings": by.settings, "scale": by.scale}
        print_json({**how, "alphas": alphas * len(vectors) if len(alphas) == 1 else alphas, **said})


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
    from kfacpack.vectors.task_vector import TaskVector

    wanted = ModelOutput(save_model, model, weights, image_size)
    wanted.check(output, [vector])
    said = write(-alpha * TaskVector.load(vector), output, wanted, show=not (quiet or as_json), quiet=quiet)
    if as_json:
        print_json({"alpha": alpha, **said})
