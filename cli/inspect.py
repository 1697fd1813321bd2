"""`kfacpack inspect`: what a bundle is, of which model, from what, how big, which blocks."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kfacpack.bundle.layout import LAYOUTS
from kfacpack.bundle.reader import Bundle
from kfacpack.errors import printable

from .console import facts_table, human_bytes, out, print_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kfacpack.bundle.manifest import DenseEntry, KroneckerEntry

    BlockEntry = KroneckerEntry | DenseEntry

MOST_BLOCKS = 2000
"""How many blocks a table lists; real models have a few hundred."""


def inspect(
    bundle: Path = typer.Argument(..., metavar="FILE.kfac", help="The bundle to look into."),
    blocks: bool = typer.Option(False, "--blocks", help="List every block: its parameters, form and bytes."),
    as_json: bool = typer.Option(False, "--json", help="Print digest, sizes and the whole manifest as JSON."),
) -> None:
    """Show what a bundle is, without reading its tensors.

    Only the header is read, so it is quick on any size. Whether the tensors are intact is what 'verify' tells.
    """
    opened = Bundle(bundle)
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
    facts = facts_table(_facts(bundle))
    out.print(Panel(facts, title=Text(printable(bundle.path.name)), title_align="left", expand=False))


def _facts(bundle: Bundle) -> Iterator[tuple[str, str]]:
    manifest = bundle.manifest
    base, function, source, estimate, merge = (
        manifest.base, manifest.function, manifest.source, manifest.estimate, manifest.merge,
    )  # fmt: skip
    if source:
        yield "task", source.task
        data = [source.dataset, source.split, f"revision {source.revision}" if source.revision else None]
        if any(data):
            yield "data", ", ".join(filter(None, data))
        if source.examples is not None:
            size = f" of {source.dataset_size:,}" if source.dataset_size is not None else ""
            yield "examples", f"{source.examples:,}{size}"
        if source.preprocessing:
            yield "preprocessing", source.preprocessing
        if source.license:
            yield "license", source.license
    if merge:
        parents = _some(f"{parent.task or parent.sha256[:12]} × {parent.weight:.4g}" for parent in merge.parents)
        rank = f" of rank {merge.rank}" if merge.rank else ""
        yield "merged", f"{merge.rule}{rank}: {parents}"
    revision = f", {base.revision}" if base.revision else ""
    yield "base model", f"{base.name} ({base.family}{revision})"
    yield "", f"sha256 {base.sha256[:16]}… over {len(base.parameters)} parameters"
    normalized = "normalised " if function.normalized else ""
    detail = f": {function.detail}" if function.detail else ""
    yield "f", f"{normalized}{function.output} of width {function.width}{detail}"
    if estimate:
        probes = f"{estimate.probes} {estimate.probe} probes per example" if estimate.probes else None
        seed = f"seed {estimate.seed}" if estimate.seed is not None else None
        model = f"model in {estimate.model_dtype}" if estimate.model_dtype else None
        sums = f"sums in {estimate.accumulation_dtype}" if estimate.accumulation_dtype else None
        yield "estimate", ", ".join(filter(None, [estimate.fisher, probes, seed, model, sums]))
    yield "scaling", f"{manifest.scaling.sharing}, as the true GGN (1/N Σ JᵀJ)"
    promised = sum(matrix.psd for matrix in manifest.matrices)
    if promised < len(manifest.matrices):
        yield "psd", f"{promised} of {len(manifest.matrices)} matrices promise to be positive semi-definite"
    if manifest.losses:
        yield "lossy steps", _some(f"{loss.step} (error of G {_error(loss.frobenius)})" for loss in manifest.losses)
    dense = bundle.dense_bytes
    share = f", {bundle.nbytes / dense:.1%} of dense float32 ({human_bytes(dense)})" if bundle.nbytes < dense else ""
    yield "size", human_bytes(bundle.nbytes) + share
    yield "content", f"sha256 {bundle.digest}"
    yield "format", f"{manifest.version}" + (f", written by {manifest.producer}" if manifest.producer else "")


def _print_kinds(bundle: Bundle) -> None:
    """One row for each kind of block."""
    rows: dict[tuple[str, str, str], list[BlockEntry]] = defaultdict(list)
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
        losses = _some(f"{loss.step} {_error(loss.frobenius)}" for loss in block.losses)
        table.add_row(name, Text(block.operation), shape, block.structure, held, size, *([Text(losses)] * lossy))
        others = [piece.parameter for piece in block.join.pieces if not block.name.startswith(piece.parameter)]
        if others:
            table.add_row(Text(f"  + {_some(dict.fromkeys(others))}", style="dim", overflow="fold"))
    out.print(table)
    if (more := len(bundle.manifest.blocks) - MOST_BLOCKS) > 0:
        out.print(Text(f"{more} more blocks, --json has them all", style="dim"))


def _some(words: Iterable[str], most: int = 16) -> str:
    """The first of them, and how many more there are: a table is for reading."""
    found = list(words)
    more = [f"and {len(found) - most} more"] if len(found) > most else []
    return ", ".join([*found[:most], *more])


def _error(relative: float | None) -> str:
    return "not measured" if relative is None else f"{relative:.2g}"


def _forms(bundle: Bundle, block: BlockEntry) -> str:
    """'packed F32 · block:8 I8': each form among a block's matrices, once."""
    forms = list(dict.fromkeys(_form(bundle, name) for name, _ in block.references()))
    return " · ".join(forms)


def _form(bundle: Bundle, matrix: str) -> str:
    entry = bundle.matrices[matrix]
    data = bundle.tensors[entry.components["data"]]
    dimension = LAYOUTS[entry.form].count
    count = "" if dimension is None else f":{data.shape[dimension]}"
    return f"{entry.form}{count} {data.dtype}"


def _bytes(bundle: Bundle, block: BlockEntry, counted: set[str]) -> int:
    """A block's bytes, without the matrices that a block before it has brought along."""
    own = {name for name, _ in block.references()} - counted
    counted |= own
    return sum(bundle.tensors[t].nbytes for name in own for t in bundle.matrices[name].components.values())


def _weights(block: BlockEntry) -> int:
    return block.join.rows * block.join.columns
