"""`kfacpack inspect`: what a bundle is, of which model, from what, how big, which blocks.

`kfacpack verify`: does a bundle keep what it promises?
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from kfacpack.curvature.verification import verify as verify_bundle
from kfacpack.errors import KfacpackError, printable
from kfacpack.format.identity import weights_of_file
from kfacpack.format.reader import Bundle
from kfacpack.format.reference import header_of, locate
from kfacpack.format.schema import LAYOUTS
from kfacpack.format.units import human_bytes
from kfacpack.hub.card import abbreviate, bundle_summary, relative_error

from .console import err, key_value_table, out, print_json, show_error
from .options import File

if TYPE_CHECKING:
    from torch import nn

    from kfacpack.curvature.verification import Verification
    from kfacpack.format.manifest import DenseEntry, KroneckerEntry, Manifest
    from kfacpack.format.reader import CheckResult

    AnyBlockEntry = KroneckerEntry | DenseEntry


MOST_BLOCKS = 2000
"""How many blocks a table lists; real models have a few hundred."""


def inspect(
    bundle: File = typer.Argument(..., metavar="FILE.kfac", help="The bundle to look into."),
    blocks: bool = typer.Option(False, "--blocks", help="List every block: its parameters, form and bytes."),
    as_json: bool = typer.Option(False, "--json", help="Print digest, sizes and the whole manifest as JSON."),
) -> None:
    """Show what a bundle is, without reading its tensors.

    Only the header is read, and of hf://owner/repo/FILE.kfac only the header is fetched, so it is quick on any size.
    Whether the tensors are intact is what 'verify' tells.
    """
    opened = Bundle(header_of(bundle))
    if as_json:
        print_json(_as_json(opened))
        return
    _print_summary(opened)
    if blocks:
        _print_blocks(opened)
    else:
        _print_kinds(opened)


def _as_json(bundle: Bundle) -> dict[str, Any]:
    manifest = bundle.manifest
    return {
        "path": str(bundle.path),
        "sha256": bundle.digest,
        "bytes": bundle.nbytes,
        "dense_bytes": bundle.dense_bytes,
        "weights": sum(map(_weights, manifest.blocks)),
        "manifest": bundle.said,
    }


def _print_summary(bundle: Bundle) -> None:
    facts = key_value_table(bundle_summary(bundle))
    out.print(Panel(facts, title=Text(printable(bundle.path.name)), title_align="left", expand=False))


def _print_kinds(bundle: Bundle) -> None:
    """One row for each kind of block."""
    rows: dict[tuple[str, str, str], list[AnyBlockEntry]] = defaultdict(list)
    for block in bundle.manifest.blocks:
        rows[block.operation, block.structure, _forms(bundle, block)].append(block)
    table = Table("operation", "structure", "held as", box=None, header_style="bold", pad_edge=False)
    for heading in ("blocks", "weights", "bytes"):
        table.add_column(heading, justify="right")
    counted: set[str] = set()
    for (operation, structure, forms), blocks in rows.items():
        size = sum(_bytes(bundle, block, counted) for block in blocks)
        numbers = (f"{len(blocks)}", f"{sum(map(_weights, blocks)):,}", human_bytes(size))
        table.add_row(Text(operation), structure, Text(forms), *numbers)
    out.print(table)
    out.print(Text("--blocks lists every block, --json has everything", style="dim"))


def _print_blocks(bundle: Bundle) -> None:
    table = Table("block", "operation", "ΔW", "structure", "held as", box=None, header_style="bold", pad_edge=False)
    table.add_column("bytes", justify="right")
    lossy = any(block.losses for block in bundle.manifest.blocks)
    if lossy:
        table.add_column("relative error")
    counted: set[str] = set()
    for block in bundle.manifest.blocks[:MOST_BLOCKS]:
        size = human_bytes(_bytes(bundle, block, counted))
        shape = f"{block.join.rows}×{block.join.columns}"
        name, held = Text(block.name, overflow="fold"), Text(_forms(bundle, block))
        losses = abbreviate(f"{loss.step} {relative_error(loss.frobenius)}" for loss in block.losses)
        table.add_row(name, Text(block.operation), shape, block.structure, held, size, *([Text(losses)] * lossy))
        others = [piece.parameter for piece in block.join.pieces if not block.name.startswith(piece.parameter)]
        if others:
            table.add_row(Text(f"  + {abbreviate(dict.fromkeys(others))}", style="dim", overflow="fold"))
    out.print(table)
    if (more := len(bundle.manifest.blocks) - MOST_BLOCKS) > 0:
        out.print(Text(f"{more} more blocks, --json has them all", style="dim"))


def _forms(bundle: Bundle, block: AnyBlockEntry) -> str:
    """'packed F32 · block:8 I8': each form among a block's matrices, once."""
    forms = list(dict.fromkeys(_form(bundle, name) for name, _ in block.references()))
    return " · ".join(forms)


def _form(bundle: Bundle, matrix: str) -> str:
    entry = bundle.matrices[matrix]
    data = bundle.tensors[entry.components["data"]]
    dimension = LAYOUTS[entry.form].count
    count = "" if dimension is None else f":{data.shape[dimension]}"
    return f"{entry.form}{count} {data.dtype}"


def _bytes(bundle: Bundle, block: AnyBlockEntry, counted: set[str]) -> int:
    """A block's bytes, without the matrices that a block before it has brought along."""
    own = {name for name, _ in block.references()} - counted
    counted |= own
    return sum(bundle.tensors[t].nbytes for name in own for t in bundle.matrices[name].components.values())


def _weights(block: AnyBlockEntry) -> int:
    return block.join.rows * block.join.columns


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
    bases = BaseModels(model, weights, image_size)
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


class BaseModels:
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

        from kfacpack.models.families import load_model

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
        name = locate(path).name
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


def _count(check: CheckResult) -> str:
    exempt = f"; {check.exempt} promise nothing" if check.exempt else ""
    return f"{check.name} ({check.checked}{exempt})"
