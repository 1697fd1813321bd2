"""`kfacpack extract`: writes the task vector of a checkpoint. `kfacpack refine`, `kfacpack negate`: modify a vector."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typing_extensions import TypedDict

from kfacpack.errors import KfacpackError, counted
from kfacpack.format.manifest import FloatType
from kfacpack.format.reference import is_reference
from kfacpack.format.units import human_bytes, human_seconds
from kfacpack.vectors.methods.curvature import RefineMethod

from .add import (
    METHOD_PANEL,
    SAVE_MODEL,
    MethodOutput,
    ModelOutput,
    VectorOutput,
    method_output,
    write,
)
from .console import loading, print_json, print_line, print_next, show_note, steps_bar
from .options import (
    AS_JSON,
    DATA_PANEL,
    IMAGE_SIZE,
    MODEL_NAME,
    MODEL_PANEL,
    QUIET,
    WEIGHTS,
    File,
    check_output,
    load_model_option,
    model_arguments,
    option,
    output_option,
    task_arguments,
)

if TYPE_CHECKING:
    from kfacpack.vectors.task_vector import TaskVector


class ExtractOutput(TypedDict):
    """Output of `kfacpack extract --json`."""

    path: str
    sha256: str
    """Digest of the file."""
    bytes: int
    seconds: float
    base: str
    """Name of the base model."""
    tasks: list[str]
    parameters: int
    """Number of parameters that the vector covers."""
    dense: int
    """Number of parameters whose change is a dense tensor."""
    factored: int
    """Number of parameters whose change is stored as factors."""
    unchanged: int
    """Number of covered parameters that do not change."""
    ranks: list[int]
    """Distinct ranks of the factors, in ascending order."""
    remainders: int
    """Number of parameters with a float64 remainder, which is stored so that the checkpoint is restored exactly."""
    notes: list[str]
    """Differences between the checkpoint and the base model that do not prevent extraction."""


def extract(
    checkpoint: File = typer.Argument(
        ...,
        metavar="CHECKPOINT",
        help="Fine-tuned model: a .safetensors file, a folder with weights or a PEFT adapter, or "
        "hf://OWNER/REPO[@REVISION].",
    ),
    output: Path = output_option("TASK.safetensors"),
    model: str = MODEL_NAME,
    weights: str | None = WEIGHTS,
    image_size: int | None = IMAGE_SIZE,
    dtype: FloatType = option(
        MODEL_PANEL,
        "float32",
        "--dtype",
        help="Data type in which the base model is loaded. Pass the data type that the model will have when the vector "
        "is added to it.",
    ),
    task: str | None = option(
        DATA_PANEL,
        None,
        "--task",
        metavar="TASK",
        help="Task name to record in the vector. Bundles are matched to the vector by this name. [default: none]",
    ),
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
) -> None:
    """Write the task vector of a checkpoint or LoRA adapter that was fine-tuned elsewhere.

    --model is the base model that was fine-tuned. Adding the vector of a checkpoint to the base model restores the
    weights of the checkpoint bit for bit. The vector of a LoRA adapter is stored as factors. Other adapters and pickle
    files are not supported.

    Differences in names, shapes, dtypes and frozen parameters are reported before anything is written.
    """
    # Imported here so that --help does not wait for torch.
    from kfacpack.vectors.task_vector import TaskVector

    start, show = time.perf_counter(), not (quiet or as_json)
    check_output(output, [*_files(checkpoint), *([weights] if weights else [])])
    with loading(model, show=show):
        base = load_model_option(model, weights, image_size, dtype)
    notes: list[str] = []
    with steps_bar("comparing", show=show) as advance:
        tau = TaskVector.from_checkpoint(base, checkpoint, task=task, on_note=notes.append, on_progress=advance)
    for note in () if quiet or as_json else notes:
        show_note(f"note: {note}")
    with steps_bar("writing", show=show) as advance:
        tau.save(output, on_progress=advance)
    result = _result(tau, output, time.perf_counter() - start, notes)
    if as_json:
        print_json(result)
    elif show:
        size = f"{human_bytes(result['bytes'])}, in {human_seconds(result['seconds'])}"
        print_line(f"wrote {output}: {_summary(result)}, {size}")
        tasks = task_arguments([task]) if task else ("--task", "TASK")
        print_next("eval", *model_arguments(tau.about.base), "--vector", output, *tasks)


def _files(checkpoint: File) -> list[File]:
    """Returns the input files of the command. If the checkpoint is a folder, these are all files in the folder."""
    if not checkpoint:
        raise KfacpackError("CHECKPOINT is empty; expected a file, a folder or hf://OWNER/REPO")
    if is_reference(checkpoint) or not Path(checkpoint).is_dir():
        return [checkpoint]
    return [str(file) for file in Path(checkpoint).iterdir() if file.is_file()]


def _result(tau: TaskVector, output: Path, seconds: float, notes: list[str]) -> ExtractOutput:
    ranks = [tau.rank(name) for name in tau]
    factored = [rank for rank in ranks if rank]
    return {
        "path": str(output),
        "sha256": tau.digest,
        "bytes": output.stat().st_size,
        "seconds": seconds,
        "base": tau.about.base.name,
        "tasks": list(tau.tasks),
        "parameters": len(tau),
        "dense": ranks.count(None),
        "factored": len(factored),
        "unchanged": ranks.count(0),
        "ranks": sorted(set(factored)),
        "remainders": sum(tau.remainder(name) is not None for name in tau),
        "notes": notes,
    }


def _summary(result: ExtractOutput) -> str:
    ranks = ", ".join(map(str, result["ranks"]))
    parts = [
        f"{counted(result['dense'], 'parameter')} changed" if result["dense"] else "",
        f"{counted(result['factored'], 'parameter')} changed by factors of rank {ranks}" if result["factored"] else "",
        f"{result['unchanged']} unchanged" if result["unchanged"] else "",
    ]
    return ", ".join(filter(None, parts))


SETTINGS = {setting.name: setting for setting in RefineMethod.declared_settings()}


def _setting(name: str, metavar: str) -> Any:
    """Declares the command-line option for one of the settings of `kfacpack refine`."""
    declared = SETTINGS[name]
    return option(METHOD_PANEL, declared.default, f"--{name.replace('_', '-')}", metavar=metavar, help=declared.help)


class NegateOutput(VectorOutput):
    """Output of `kfacpack negate --json`."""

    alpha: float
    """Factor α of the result −α τ."""


class RefineOutput(VectorOutput, MethodOutput):
    """Output of `kfacpack refine --json`."""


def refine(
    vector: File = typer.Argument(..., metavar="FILE.safetensors", help="Task vector to refine."),
    own: list[File] = option(
        METHOD_PANEL,
        ...,
        "--own",
        metavar="FILE.kfac",
        help="Bundle of the vector's own task; repeatable for a vector of several tasks.",
    ),
    reg: list[File] = option(
        METHOD_PANEL, ..., "--reg", metavar="FILE.kfac", help="Bundle with the curvature of other tasks; repeatable."
    ),
    output: Path = output_option("REFINED.safetensors"),
    strength: float = _setting("strength", "λ"),
    damping: float = _setting("damping", "X"),
    task_weights: str = _setting("task_weights", "|".join(SETTINGS["task_weights"].choices)),
    tolerance: float = _setting("tolerance", "X"),
    iterations: int = _setting("iterations", "N"),
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
) -> None:
    """Reduce the effect of a task vector on other tasks, so that it can be added to the vectors of those tasks.

    The result hardly changes the model's outputs on the other tasks. On the vector's own task, its effect stays as
    close as possible to the effect of the original vector. Neither data nor training is needed.
    """
    # Imported here so that --help does not wait for torch.
    from kfacpack.vectors.add import refine as refine_vector

    start = time.perf_counter()
    target, show = ModelOutput(None, MODEL_NAME.default, None, None), not (quiet or as_json)
    target.check(output, [vector, *own, *reg])
    with steps_bar("refining", show=show) as advance:
        tau = refine_vector(
            vector,
            own,
            reg,
            strength=strength,
            damping=damping,
            task_weights=task_weights,
            tolerance=tolerance,
            iterations=iterations,
            on_progress=advance,
        )
    entry = tau.about.method
    assert entry is not None
    result = write(tau, output, target, start=start, show=show, quiet=quiet, method=entry)
    if as_json:
        refined: RefineOutput = {**method_output(entry), **result}
        print_json(refined)


def negate(
    vector: File = typer.Argument(..., metavar="FILE.safetensors", help="Task vector to negate."),
    output: Path = output_option("NEGATED.safetensors"),
    alpha: float = option(METHOD_PANEL, 1.0, "--alpha", metavar="α", help="Factor α of the result −α τ."),
    save_model: Path | None = SAVE_MODEL,
    model: str = MODEL_NAME,
    weights: str | None = WEIGHTS,
    image_size: int | None = IMAGE_SIZE,
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
) -> None:
    """Negate a task vector: adding the result to a model makes the model forget the task.

    The result keeps the heads of the vector. With α = 1, the sum of a vector and its negation is exactly zero.
    """
    # Imported here so that --help does not wait for torch.
    from kfacpack.vectors.task_vector import TaskVector

    start, show = time.perf_counter(), not (quiet or as_json)
    target = ModelOutput(save_model, model, weights, image_size)
    target.check(output, [vector])
    result = write(-alpha * TaskVector.load(vector), output, target, start=start, show=show, quiet=quiet)
    if as_json:
        negated: NegateOutput = {"alpha": alpha, **result}
        print_json(negated)
