"""The tables of RESULTS.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from measures import Results, points, spread


def row(*cells: object) -> str:
    """Returns a row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def table_of(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Returns a Markdown table."""
    return [row(*headings), f"|{'---|' * len(headings)}", *(row(*cells) for cells in rows)]


def arms_table(results: Results, paper: Mapping[str, str], heading: str) -> list[str]:
    """Returns a table with the accuracies of all arms, and further numbers that the plan measured.

    Args:
        results: The results of the plan.
        paper: The paper's numbers by arm.
        heading: Heading of the paper's numbers.
    """
    seeds = [seed for arm in results.arms.values() for seed in arm["seeds"]]
    has_best = all(next(iter(seed["methods"].values()))["best"] for seed in seeds)
    swept = has_best and len(next(iter(seeds[0]["methods"].values()))["sweep"]["alphas"]) > 1
    has_auroc = any(seed["auroc"] is not None for seed in seeds)
    stored = [arm["bundle_bytes"] for arm in results.arms.values() if arm["bundle_bytes"]]
    sizes = bool(stored) and max(stored) > 1.01 * min(stored)  # headers differ by a few bytes
    headings = ["", "own vector", "sum, α = 1", *(["sum, best α"] if swept else [])]
    headings += [*(["AUROC"] if has_auroc else []), *(["bundle"] if sizes else []), *([heading] if paper else [])]
    rows = []
    for name, arm in results.arms.items():
        cells: list[object] = [name, points(results.individual(name)), points(results.sum_at_one(name))]
        cells += [points(results.at_best(name))] if swept else []
        if has_auroc:
            located = arm["seeds"][0]["auroc"] is not None
            cells.append(f"{fmean(results.auroc(name)):.3f} ± {spread(results.auroc(name)):.3f}" if located else "")
        if sizes:
            cells.append(f"{arm['bundle_bytes'] / 1e6:.2f} MB" if arm["bundle_bytes"] else "")
        rows.append([*cells, *([paper.get(name, "")] if paper else [])])
    return table_of(headings, rows)


def negation_table(results: Results, paper: Mapping[str, str], heading: str) -> list[str]:
    """Returns a table with the accuracy of the negated task and of the control."""
    rows = [
        [name, points(results.negation(name, "accuracy")), points(results.negation(name, "control")),
         paper.get(name, "")]
        for name in results.arms
    ]  # fmt: skip
    first = next(iter(results.arms))
    before = points(results.negation(first, "before")), points(results.negation(first, "control_before"))
    return table_of(
        ["", "target ↓", "control ↑", f"{heading}: target, control"],
        [["base model", *before, paper.get("base", "")], *rows],
    )


def methods_table(results: Results, paper: Mapping[str, str], heading: str) -> list[str]:
    """Returns a table with the accuracies of all merge methods and arms, at α = 1 and at the best α."""
    headings = ["", *(f"{arm}, {alpha}" for arm in results.arms for alpha in ("α = 1", "best α")), heading]
    rows = []
    for method in results.methods(next(iter(results.arms))):
        cells = [points(read(arm, method)) for arm in results.arms for read in (results.sum_at_one, results.at_best)]
        rows.append([method, *cells, paper.get(method, "")])
    return table_of(headings, rows)


def cost_table(results: Results, paper: Mapping[str, str], heading: str) -> list[str]:
    """Returns a table with times and memory."""
    rows = [
        [name, f"{entry['seconds']:.3g} s", f"{entry['bytes'] / 1e6:.0f} MB", paper.get(name, "")]
        for name, entry in results.content["costs"].items()
    ]
    return table_of(["", "CPU time", "peak memory", heading], rows)
