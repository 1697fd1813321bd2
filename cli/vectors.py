"""What `add` and `negate` share: writing a vector, and the whole model with it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from kfacpack.errors import KfacpackError

from .console import human_bytes, human_seconds, out, show_note
from .options import MODEL, File, check_output, load_named, option
from .progress import loading, steps_bar

if TYPE_CHECKING:
    from kfacpack.models import Model
    from kfacpack.vectors.vector import TaskVector

SAVE_MODEL = option(
    MODEL,
    None,
    "--save-model",
    metavar="PATH",
    help="Write the model with the vector added, too: a .safetensors file for open_clip and timm, a folder for t5: and "
    "hf:. --model, --weights and --image-size say which model.",
)
LINEARISED = (
    "the vector was trained in the linearised model f + J τ; what is saved is the model itself with the weights "
    "θ0 + τ, which gives other outputs. eval --vector uses the vector as it was trained"
)


@dataclass(frozen=True)
class Wanted:
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


def write(tau: TaskVector, output: Path, wanted: Wanted, *, show: bool, quiet: bool) -> dict[str, Any]:
    """Write the vector, and the model where it is wanted, and say so; what `--json` says of both.

    Nothing is written where the model does not fit.
    """
    from kfacpack.vectors.vector import TaskVector

    start = time.perf_counter()
    loaded = _fitting(tau, wanted, show=show)
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


def _fitting(tau: TaskVector, wanted: Wanted, *, show: bool) -> Model | None:
    if wanted.path is None:
        return None
    from kfacpack.curvature.matrices.components import TORCH_TYPES

    # In the precision that the vector was trained from, or the weights would not be the same.
    dtype: Any = str(TORCH_TYPES[tau.about.base.parameters[0].dtype]).removeprefix("torch.")
    with loading(wanted.model, show=show):
        loaded = load_named(wanted.model, wanted.weights, wanted.image_size, dtype)
    loaded.checkpoint.check(wanted.path)
    tau.check(loaded.module, loaded.function)
    return loaded


def _save(model: Model, tau: TaskVector, path: Path, *, show: bool, quiet: bool) -> dict[str, Any]:
    tau.apply(model.module, in_place=True)
    model.checkpoint.save(path)
    note = LINEARISED if tau.is_linear else None
    load = model.checkpoint.how_to_load(path)
    if show:
        out.print(Text(f"wrote {path}: the model with it; load it with {load}"), soft_wrap=True)
    if note and not quiet:
        show_note(f"note: {note}")
    return {"path": str(path), "load": load, "note": note}
