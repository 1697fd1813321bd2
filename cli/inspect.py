"""`kfacpack inspect`: what a bundle is, of which model, from what, how big, which blocks."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import typer
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kfacpack.bundle.layout import LAYOUTS
from kfacpack.bundle.reader import Bundle
from kfacpack.errors import printable
from kfacpack.hub.facts import bundle_facts, relative_error, some
from kfacpack.hub.files.reference import header_of

from .console import facts_table, human_bytes, out, print_json
from .options import File

if TYPE_CHECKING:
    from kfacpack.bundle.manifest import DenseEntry, KroneckerEntry

    BlockEntry = KroneckerEntry | DenseEntry

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
    facts = facts_table(bundle_facts(bundle))
    out.print(Panel(facts, title=Text(printable(bundle.path.name)), title_align="left", expand=False))


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
        losses = some(f"{loss.step} {relative_error(loss.frobenius)}" for loss in block.losses)
        table.add_row(name, Text(block.operation), shape, block.structure, held, size, *([Text(losses)] * lossy))
        others = [piece.parameter for piece in block.join.pieces if not block.name.startswith(piece.parameter)]
        if others:
            table.add_row(Text(f"  + {some(dict.fromkeys(others))}", style="dim", overflow="fold"))
    out.print(table)
    if (more := len(bundle.manifest.blocks) - MOST_BLOCKS) > 0:
        out.print(Text(f"{more} more blocks, --json has them all", style="dim"))


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
