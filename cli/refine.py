"""`kfacpack refine`: takes the curvature of other tasks out of a task vector."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import typer

from kfacpack.vectors.methods.curvature import RefineMethod

from .add import METHOD_PANEL, MethodOutput, ModelOutput, VectorOutput, method_output, write
from .console import print_json, steps_bar
from .options import AS_JSON, MODEL_NAME, QUIET, File, option, output_option

SETTINGS = {setting.name: setting for setting in RefineMethod.declared_settings()}


def _setting(name: str, metavar: str) -> Any:
    """Declares the option of a setting."""
    declared = SETTINGS[name]
    return option(METHOD_PANEL, declared.default, f"--{name.replace('_', '-')}", metavar=metavar, help=declared.help)


class RefineOutput(VectorOutput, MethodOutput):
    """Output of `kfacpack refine --json`."""


def refine(
    vector: File = typer.Argument(..., metavar="FILE.safetensors", help="Task vector to refine."),
    own: list[File] = option(
        METHOD_PANEL,
        ...,
        "--own",
        metavar="FILE.kfac",
        help="Bundle of the vector's task; repeatable for a vector of several tasks.",
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
    """Take the curvature of other tasks out of a task vector, so that it can be added to theirs.

    The result has little effect on the outputs of the other tasks, and changes those of its own task as little as
    possible. No data and no training are needed.
    """
    # Imported here so that --help does not wait for torch.
    from kfacpack.vectors.refine import refine as refine_vector

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
