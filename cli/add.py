"""`kfacpack add`: merges task vectors into one, and can also write the model with the resulting vector added.

The functions that write and describe the result are also used by the commands in `vectors.py`.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import typer
from typing_extensions import TypedDict

from kfacpack.errors import KfacpackError, abbreviate, counted
from kfacpack.format.units import human_bytes, human_seconds
from kfacpack.format.vector_manifest import MethodEntry, RegimeName
from kfacpack.vectors.methods import METHODS

from .console import loading, print_json, print_line, print_next, show_note, steps_bar
from .options import (
    AS_JSON,
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
    from kfacpack.models.model import Model
    from kfacpack.vectors.methods.method import DeclaredSetting
    from kfacpack.vectors.task_vector import TaskVector


METHOD_PANEL = "Method"
SAVE_MODEL = option(
    MODEL_PANEL,
    None,
    "--save-model",
    metavar="PATH",
    help="Also save the model with the resulting vector added. PATH is a folder if the name of the model starts with "
    "clip:, t5:, lm: or hf:, and a .safetensors file otherwise. --model, --weights and --image-size select the model.",
)
LINEARISED_NOTE = (
    "the vector was trained in the linearised model f + J τ; the saved model has the weights θ0 + τ, and its outputs "
    "differ from those of the linearised model. To evaluate the linearised model, use `kfacpack eval --vector`"
)


@dataclass(frozen=True)
class ModelOutput:
    """Output path for the model with the vector added, and the options that select the model."""

    path: Path | None
    """The value of --save-model; None if no model is saved."""
    model: str
    weights: str | None
    image_size: int | None

    def check(self, output: Path, inputs: list[File]) -> None:
        """Checks the output paths before any work is done.

        Args:
            output: Output path of the vector.
            inputs: Input files of the command.

        Raises:
            KfacpackError: If a path cannot be written or an option has no effect.
        """
        check_output(output, inputs)
        if self.path is None:
            if self.weights or self.image_size:
                raise KfacpackError(
                    "--weights and --image-size apply only to the model to save; pass --save-model PATH, or omit them"
                )
            return
        check_output(self.path, [*inputs, *([self.weights] if self.weights else [])], allow_folder=True)
        if self.path.resolve() == output.resolve():
            raise KfacpackError(f"{output}: --output and --save-model name the same file; pass different paths")


class AddendOutput(TypedDict):
    """A task vector that contributes to the result. If an input is itself a sum, its addends are listed instead."""

    sha256: str
    """Digest of the vector's file."""
    coefficient: float
    """Factor by which the vector was multiplied."""
    tasks: list[str]


class SavedModelOutput(TypedDict):
    """The saved model, which is the base model with the vector added."""

    path: str
    load: str
    """Python call that loads the model."""
    note: str | None
    """Why the outputs of the saved model differ from those of the trained model; null if they do not differ."""


class VectorOutput(TypedDict):
    """A task vector that was written to a file."""

    path: str
    sha256: str
    """Digest of the file."""
    bytes: int
    seconds: float
    base: str
    """Name of the base model."""
    regime: RegimeName
    tasks: list[str]
    parameters: int
    """Number of parameters that the vector covers."""
    addends: list[AddendOutput]
    model: SavedModelOutput | None
    """The saved model; null without `--save-model`."""


class SolvedBlockOutput(TypedDict):
    """Report on one block of a vector that was merged with curvature.

    In directions without curvature, the result equals the prior of the method, such as the sum of the vectors.
    """

    name: str
    curvature: bool
    """Whether a bundle covers the block. If not, the whole block is taken from the prior."""
    iterations: int
    """Number of iterations of the solver; 0 if the block was solved directly."""
    residual: float
    """Norm of the residual of the block's linear system, divided by the norm of the right-hand side."""
    before: float
    """Value of the method's objective for the prior."""
    after: float
    """Value of the method's objective for the result."""
    repaired: bool
    """Whether negative eigenvalues of the block's matrices were set to zero."""


class MethodOutput(TypedDict):
    """The merge method that produced a vector, with its settings and its reports on the blocks."""

    method: str
    settings: dict[str, bool | int | float | str]
    """Settings of the method, including defaults."""
    bundles: list[str]
    """Digests of the bundles that the method used."""
    blocks: list[SolvedBlockOutput]
    """Reports on the blocks; empty for methods that do not use curvature."""


class AddOutput(VectorOutput, MethodOutput):
    """Output of `kfacpack add --json`."""

    scale: str
    """Meaning of α for this method."""
    alphas: list[float]
    """Factor α of each vector, in the order of the vectors."""


def write(
    tau: TaskVector,
    output: Path,
    target: ModelOutput,
    *,
    start: float,
    show: bool,
    quiet: bool,
    method: MethodEntry | None = None,
) -> VectorOutput:
    """Writes a vector and, if requested, the model with the vector added.

    Args:
        tau: The vector.
        output: Output path of the vector.
        target: The model to save, if any.
        start: Value of `time.perf_counter()` at the start of the command.
        show: Whether to print a summary.
        quiet: Whether to suppress notes.
        method: The merge method that produced the vector. A summary of its reports is printed if `show` is true.

    Returns:
        The result for `--json`.

    Raises:
        KfacpackError: If the vector does not match the model to save. In this case, nothing is written.
    """
    from kfacpack.vectors.task_vector import TaskVector

    model = _load_base_model(tau, target, show=show)
    with steps_bar("writing", show=show) as advance:
        tau.save(output, on_progress=advance)
    vector, seconds = TaskVector.load(output), time.perf_counter() - start
    if show:
        size = f"{counted(len(vector), 'parameter')}, {human_bytes(output.stat().st_size)}, in {human_seconds(seconds)}"
        print_line(f"wrote {output}: {', '.join(vector.tasks)}: {size}" if vector.tasks else f"wrote {output}: {size}")
        if method:
            print_solved(method)
    # The saved vector is used, because `tau` may compute its tensors again each time they are read.
    saved = _save_model(model, vector, target.path, show=show, quiet=quiet) if model and target.path else None
    if show:
        print_next("eval", *model_arguments(vector.about.base), "--vector", output, *task_arguments(vector.tasks))
    return {
        "path": str(output),
        "sha256": vector.digest,
        "bytes": output.stat().st_size,
        "seconds": seconds,
        "base": vector.about.base.name,
        "regime": vector.regime,
        "tasks": list(vector.tasks),
        "parameters": len(vector),
        "addends": [
            {"sha256": addend.sha256, "coefficient": addend.coefficient, "tasks": list(addend.tasks)}
            for addend in vector.about.addends
        ],
        "model": saved,
    }


def _load_base_model(tau: TaskVector, target: ModelOutput, *, show: bool) -> Model | None:
    """Loads the model to save and checks that the vector matches it. Returns None if no model is to be saved."""
    if target.path is None:
        return None
    from kfacpack.curvature.matrices.components import TORCH_TYPES

    # The model is loaded in the dtype in which the vector was trained. In any other dtype, the weights would differ.
    dtype: Any = str(TORCH_TYPES[tau.about.base.parameters[0].dtype]).removeprefix("torch.")
    with loading(target.model, show=show):
        model = load_model_option(target.model, target.weights, target.image_size, dtype)
    model.checkpoint.check(target.path)
    tau.check(model.module, model.function)
    return model


def _save_model(model: Model, tau: TaskVector, path: Path, *, show: bool, quiet: bool) -> SavedModelOutput:
    tau.apply(model.module, in_place=True)
    model.checkpoint.save(path)
    note = LINEARISED_NOTE if tau.is_linear else None
    load = model.checkpoint.load_command(path)
    if show:
        print_line(f"wrote {path}: the model with the vector added; load it with {load}")
    if note and not quiet:
        show_note(f"note: {note}")
    return {"path": str(path), "load": load, "note": note}


def method_output(method: MethodEntry) -> MethodOutput:
    """Returns the description of a merge method and its reports for `--json`."""
    return {
        "method": method.name,
        "settings": method.settings,
        "bundles": list(method.bundles),
        "blocks": [
            {
                "name": block.name,
                "curvature": block.curvature,
                "iterations": block.iterations,
                "residual": block.residual,
                "before": block.before,
                "after": block.after,
                "repaired": block.repaired,
            }
            for block in method.blocks
        ],
    }


def print_solved(method: MethodEntry) -> None:
    """Prints a summary of the reports on the blocks of a vector that was merged with curvature."""
    if method.solved:
        before, after = method.objective
        print_line(
            f"{method.name}: {counted(len(method.solved), 'block')} solved, "
            f"at most {counted(method.max_iterations, 'iteration')}, "
            f"relative residual at most {method.worst_residual:.2g}; objective {before:.4g} → {after:.4g}"
        )
    if method.without_curvature:
        names = abbreviate(method.without_curvature)
        print_line(f"blocks without curvature, taken from the prior: {len(method.without_curvature)} ({names})")
    if method.repaired:
        names = abbreviate(method.repaired)
        print_line(f"blocks whose negative eigenvalues were set to zero: {len(method.repaired)} ({names})")


def _setting_options() -> list[inspect.Parameter]:
    """Returns one command-line option per setting of the merge methods, for the signature of a command.

    If several methods have a setting of the same name, these settings share one option.
    """
    declared: dict[str, dict[DeclaredSetting, list[str]]] = {}
    for method in METHODS.values():
        for setting in method.declared_settings():
            declared.setdefault(setting.name, {}).setdefault(setting, []).append(method.name)
    parameters = []
    for name, variants in declared.items():
        texts = []
        for setting, methods in variants.items():
            default = "" if isinstance(setting.default, bool) else f" [default: {setting.default}]"
            texts.append(f"{', '.join(methods)}: {setting.help}{default}")
        kind = type(setting.default)
        metavar = "|".join(setting.choices) or {int: "N", float: "X"}.get(kind)
        declaration = option(
            METHOD_PANEL,
            False if kind is bool else None,
            f"--{name.replace('_', '-')}",
            metavar=metavar,
            help=" ".join(texts),
        )
        annotation = bool if kind is bool else kind | None
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=declaration, annotation=annotation)
        )
    return parameters


def _with_setting_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options from `_setting_options` to a command, which receives their values as `**settings`."""
    hints = get_type_hints(command)
    fixed = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    generated = _setting_options()

    @wraps(command)
    def with_settings(**arguments: Any) -> None:
        settings = {parameter.name: arguments.pop(parameter.name) for parameter in generated}
        command(
            **arguments, **{name: value for name, value in settings.items() if value is not None and value is not False}
        )

    # The settings are inserted after --bundle, so that the help lists them there.
    place = [parameter.name for parameter in fixed].index("bundle") + 1
    parameters = [*fixed[:place], *generated, *fixed[place:]]
    with_settings.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_settings.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_settings


@_with_setting_options
def add(
    vectors: list[File] = typer.Argument(..., metavar="FILE.safetensors...", help="Task vectors to add."),
    output: Path = output_option("SUM.safetensors"),
    method: str = option(
        METHOD_PANEL,
        "sum",
        "--method",
        metavar="METHOD",
        help="Merge method. " + " ".join(f"{name}: {method.help}" for name, method in METHODS.items()),
    ),
    alpha: list[float] | None = option(
        METHOD_PANEL,
        None,
        "--alpha",
        metavar="α",
        help="Factor α of the vectors. If the option is repeated, each value is the factor of one vector, in the order "
        "of the vectors. At α = 1, the result of every method has the scale of the sum of the vectors, not of their "
        "mean. [default: 1]",
    ),
    bundle: list[File] | None = option(
        METHOD_PANEL,
        None,
        "--bundle",
        metavar="FILE.kfac",
        help="Bundle of a task on which one of the vectors was trained; repeatable, in any order. Required by the "
        f"methods {', '.join(name for name, method in METHODS.items() if method.needs_bundles)}.",
    ),
    save_model: Path | None = SAVE_MODEL,
    model: str = MODEL_NAME,
    weights: str | None = WEIGHTS,
    image_size: int | None = IMAGE_SIZE,
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
    **settings: Any,
) -> None:
    """Add task vectors, or merge them with another method. The result has the heads of all tasks.

    The vectors must have the same base model, regime and output function f. Vectors of the same task must also have the
    same head. Methods that use bundles require one bundle per task. Bundles are matched to the vectors by base model, f
    and task.

    For most methods, memory use does not depend on the number of vectors. The methods tsv, iso-cts and actmat, and
    methods that use bundles, process one layer at a time and keep this layer of every vector and bundle in memory.
    """
    # Imported here so that --help does not wait for torch.
    from kfacpack.vectors.add import add as add_vectors

    start = time.perf_counter()
    target, show = ModelOutput(save_model, model, weights, image_size), not (quiet or as_json)
    target.check(output, [*vectors, *(bundle or [])])
    alphas = alpha or [1.0]
    with steps_bar("merging", show=show) as advance:
        tau = add_vectors(
            vectors,
            method,
            alpha=alphas[0] if len(alphas) == 1 else alphas,
            bundles=bundle,
            on_progress=advance,
            **settings,
        )
    entry = tau.about.method
    result = write(tau, output, target, start=start, show=show, quiet=quiet, method=entry)
    if as_json:
        added: AddOutput = {
            **method_output(entry or MethodEntry(name=method)),
            "scale": METHODS[method].scale,
            "alphas": alphas * len(vectors) if len(alphas) == 1 else alphas,
            **result,
        }
        print_json(added)
