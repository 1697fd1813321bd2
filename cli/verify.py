"""`kfacpack verify`: does a bundle keep what it promises?"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from kfacpack.bundle.identity import weights_of_file
from kfacpack.bundle.reader import Bundle
from kfacpack.errors import KfacpackError, printable
from kfacpack.hub.files.reference import located
from kfacpack.verification import verify as verify_bundle

from .console import err, out, print_json, show_error
from .options import File

if TYPE_CHECKING:
    from torch import nn

    from kfacpack.bundle.checks import Check
    from kfacpack.bundle.manifest import Manifest
    from kfacpack.verification import Verification

SHOWN = 5
"""How many failures of one check a person is shown."""


def verify(
    bundles: list[File] = typer.Argument(..., metavar="FILE.kfac...", help="The bundles to check."),
    model: str | None = typer.Option(
        None,
        "--model",
        help="Also check that they were computed at this model's weights: a safetensors file, or a model's name.",
    ),
    weights: str | None = typer.Option(
        None, "--weights", metavar="FILE", help="With a model's name, where its weights are; see 'estimate'."
    ),
    image_size: int | None = typer.Option(
        None, "--image-size", min=1, metavar="N", help="With a model's name, the pixels of a side; see 'estimate'."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print every check and failure as JSON."),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Print nothing but errors; the exit code tells."),
) -> None:
    """Check hashes, finiteness, symmetry and positive semi-definiteness of whole bundles.

    Exit code 0: everything holds. 1: a check does not hold; the tensor is named. 2: a file is no bundle at all.
    """
    if model is None and (weights or image_size):
        raise KfacpackError("--weights and --image-size belong to a model: name it with --model")
    bases = Bases(model, weights, image_size)
    verified: list[Verification] = []
    unreadable: list[dict[str, str]] = []
    for path in bundles:
        try:
            manifest = Bundle(path).manifest
        except KfacpackError as error:
            show_error(str(error))
            unreadable.append({"path": path, "error": str(error)})
            continue
        result = _verify_with_progress(path, bases.of(manifest), show=not (quiet or as_json))
        verified.append(result)
        if not as_json:
            _print(result, model, quiet)
    if as_json:
        holding = [{"holds": result.holds, **asdict(result)} for result in verified]
        print_json({"bundles": holding, "unreadable": unreadable})
    if unreadable:
        raise typer.Exit(2)
    if not all(result.holds for result in verified):
        raise typer.Exit(1)


class Bases:
    """What bundles are compared with: a file of weights, or a model, in the type that each bundle was computed in."""

    def __init__(self, model: str | None, weights: str | None, image_size: int | None):
        self._asked = (model, weights, image_size)
        self._loaded: dict[tuple[str, int], nn.Module] = {}
        if model is not None and self._is_file():
            weights_of_file(model)  # a damaged one is no fault of the bundles'

    def _is_file(self) -> bool:
        model, weights, image_size = self._asked
        return model is not None and weights is None and image_size is None and Path(model).is_file()

    def of(self, manifest: Manifest) -> str | nn.Module | None:
        model, weights, image_size = self._asked
        if model is None or self._is_file():
            return model
        import torch

        from kfacpack.models import load_model

        dtype = (manifest.estimate and manifest.estimate.model_dtype) or "float32"
        random = re.fullmatch(r"random-([0-9]+)", manifest.base.revision or "")
        seed = int(random[1]) if random else 0
        if (dtype, seed) not in self._loaded:
            loaded = load_model(model, weights=weights, image_size=image_size, dtype=getattr(torch, dtype), seed=seed)
            self._loaded[dtype, seed] = loaded.module
        return self._loaded[dtype, seed]


def _verify_with_progress(path: File, model: str | nn.Module | None, show: bool) -> Verification:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=err, transient=True, disable=not (show and err.is_terminal)) as bar:
        name = located(path).name
        task = bar.add_task(printable(name), total=None)

        def update(check: str, done: int, total: int) -> None:
            bar.update(task, description=printable(f"{name}: {check}"), completed=done, total=total)

        return verify_bundle(path, model, update)


def _print(result: Verification, model: str | None, quiet: bool) -> None:
    for check in result.checks:
        against = f" ({model})" if check.name == "model" else ""
        for failure in check.failures[:SHOWN]:
            show_error(f"{result.path}: {failure.subject}: {failure.problem}{against}")
        if (more := len(check.failures) - SHOWN) > 0:
            show_error(f"{result.path}: {check.name}: {more} more of {check.checked} fail, --json lists them all")
    if quiet:
        return
    if result.holds:
        word, names = ("holds ", "bold green"), [_count(check) for check in result.checks]
    else:
        word, names = ("fails ", "bold red"), [check.name for check in result.checks if check.failures]
    out.print(Text.assemble(word, printable(f"{result.path}: {', '.join(names)}")), soft_wrap=True)


def _count(check: Check) -> str:
    exempt = f"; {check.exempt} promise nothing" if check.exempt else ""
    return f"{check.name} ({check.checked}{exempt})"
