"""`kfacpack verify`: does a bundle keep what it promises?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from kfacpack.bundle.identity import weights_of_file
from kfacpack.errors import KfacpackError
from kfacpack.verification import verify as verify_bundle

from .console import err, out, print_json, show_error

if TYPE_CHECKING:
    from kfacpack.bundle.identity import Weights
    from kfacpack.verification import Verification


def verify(
    bundles: list[Path] = typer.Argument(..., metavar="FILE.kfac...", help="The bundles to check."),
    model: str | None = typer.Option(
        None,
        "--model",
        metavar="WEIGHTS.safetensors",
        help="Also check that they were computed at these weights.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print every check and failure as JSON."),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Print nothing but errors; the exit code tells."),
) -> None:
    """Check hashes, finiteness, symmetry and positive semi-definiteness of whole bundles.

    Exit code 0: everything holds. 1: a check does not hold; the tensor is named. 2: a file is no bundle at all.
    """
    weights = _weights(model) if model else None
    verified: list[Verification] = []
    unreadable: list[dict[str, str]] = []
    for path in bundles:
        try:
            result = _verify_with_progress(path, weights, show=not (quiet or as_json))
        except KfacpackError as error:
            show_error(str(error))
            unreadable.append({"path": str(path), "error": str(error)})
            continue
        verified.append(result)
        if not as_json:
            _print(result, quiet)
    if as_json:
        holding = [{"holds": result.holds, **asdict(result)} for result in verified]
        print_json({"bundles": holding, "unreadable": unreadable})
    if unreadable:
        raise typer.Exit(2)
    if not all(result.holds for result in verified):
        raise typer.Exit(1)


def _weights(model: str) -> Weights:
    if not Path(model).is_file():
        raise KfacpackError(
            f"--model {model}: expected a safetensors file with the base model's weights, found no file"
        )
    return weights_of_file(model)


def _verify_with_progress(path: Path, weights: Weights | None, show: bool) -> Verification:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=err, transient=True, disable=not (show and err.is_terminal)) as bar:
        task = bar.add_task(path.name, total=None)
        return verify_bundle(
            path,
            weights,
            lambda check, done, total: bar.update(
                task, description=f"{path.name}: {check}", completed=done, total=total
            ),
        )


def _print(result: Verification, quiet: bool) -> None:
    failures = [(check, failure) for check in result.checks for failure in check.failures]
    for check, failure in failures:
        kind = "parameter" if check.name == "model" else "tensor"
        show_error(f"{result.path}: {kind} {failure.subject!r}: {failure.problem}")
    if quiet:
        return
    did = ", ".join(f"{check.name} ({check.checked})" for check in result.checks if not check.failures)
    if failures:
        failed = ", ".join(check.name for check in result.checks if check.failures)
        out.print(Text.assemble(("fails ", "bold red"), result.path, f": {failed}"), soft_wrap=True)
    else:
        out.print(Text.assemble(("holds ", "bold green"), result.path, f": {did}"), soft_wrap=True)
