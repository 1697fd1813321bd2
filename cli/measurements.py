"""How `kfacpack measure` shows what it found: tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from kfacpack.errors import printable


def _disentanglement(found: dict[str, Any]) -> Iterator[Table | Text]:
    first, second = (printable(name) for name in found["tasks"])
    table = _table("α", *(f"{alpha:g}" for alpha in found["alphas"]))
    for alpha, row in zip(found["alphas"], found["xi"], strict=True):
        table.add_row(f"{alpha:g}", *(f"{100 * xi:.0f}" for xi in row))
    yield table
    sizes = " and ".join(f"{size:,}" for size in found["examples"].values())
    yield Text(f"ξ in %, of 200; down: α of {first}, across: α of {second}; {sizes} examples", style="dim")


def _localisation(found: dict[str, Any]) -> Iterator[Table | Text]:
    table = _table("vector", "on task", "off task", "AUROC")
    for name, each in found["vectors"].items():
        numbers = f"{each['on']['mean']:.3g}", f"{each['off']['mean']:.3g}", f"{each['auroc']:.3f}"
        table.add_row(Text(printable(name), overflow="fold"), *numbers)
    if len(found["vectors"]) > 1:
        table.add_row("mean", "", "", f"{found['auroc']:.3f}", style="bold")
    yield table
    yield Text("the mean of the squared change of f, and how well it tells the tasks apart", style="dim")


def _drift(found: dict[str, Any]) -> Iterator[Table | Text]:
    table = _table("vector", "task", "predicted", "measured", "ratio", words=2)
    for each in found["pairs"]:
        names = (Text(printable(each[key]), overflow="fold") for key in ("vector", "task"))
        table.add_row(*names, f"{each['predicted']:.3g}", f"{each['measured']:.3g}", _ratio(each))
    yield table
    # A layer that moves nothing has no ratio.
    moved = sorted((each for each in found["layers"] if each["measured"] > 0), key=_quotient)
    if moved:
        low, middle, high = (_ratio(moved[int(share * (len(moved) - 1))]) for share in (0.05, 0.5, 0.95))
        words = f"ratios of {len(moved):,} single layers: {middle} in the middle, nine in ten from {low} to {high}"
        yield Text(words, style="dim")


def _quotient(each: dict[str, float]) -> float:
    return each["predicted"] / each["measured"]


def _ratio(each: dict[str, float]) -> str:
    return f"{_quotient(each):.2f}" if each["measured"] > 0 else ""


def _spectra(found: dict[str, Any]) -> Iterator[Table | Text]:
    table = _table("block", "side", "size", "trace", "largest", "effective rank", words=2)
    for each in found["blocks"]:
        numbers = f"{each['trace']:.3g}", f"{each['eigenvalues'][0]:.3g}", f"{each['effective_rank']:.1f}"
        table.add_row(Text(printable(each["name"]), overflow="fold"), each["side"], f"{each['size']:,}", *numbers)
    yield table


def _table(*headings: str, words: int = 1) -> Table:
    """The first columns are words, the others numbers."""
    table = Table(*headings[:words], box=None, header_style="bold", pad_edge=False)
    for heading in headings[words:]:
        table.add_column(heading, justify="right")
    return table


TABLES: dict[str, Callable[[dict[str, Any]], Iterator[Table | Text]]] = {
    "disentanglement": _disentanglement,
    "localisation": _localisation,
    "drift": _drift,
    "spectra": _spectra,
}
