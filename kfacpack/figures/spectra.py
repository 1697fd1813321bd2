"""Eigenvalues of the factors, over their rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from kfacpack.figures.style import canvas, is_shown, legend_below, logarithmic, shortened, theme_of, themed

SIDES = {"A": "A, of the inputs", "B": "B, of the gradients", "G": "G, whole blocks"}
FEW = 6
"""So many lines can each be named."""


@themed
def spectra(data: Mapping[str, Any], *, theme: str = "light") -> Figure:
    """One line for each side of each block: few are named, many are coloured by side."""
    look = theme_of(theme)
    blocks = data["blocks"]
    figure = canvas(3.8)
    axes = figure.subplots()
    logarithmic(axes.xaxis)
    logarithmic(axes.yaxis)
    named: set[str] = set()
    for number, block in enumerate(blocks):
        points = [(r, v) for r, v in zip(block["ranks"], block["eigenvalues"], strict=True) if is_shown(v)]
        side = SIDES.get(block["side"], block["side"])
        label: str | None = side if side not in named else None
        colour = look.series[list(SIDES).index(block["side"]) if block["side"] in SIDES else 3]
        if len(blocks) <= FEW:
            colour, label = look.series[number], f"{shortened(block['name'], 24)} {block['side']}"
        if not points:
            continue
        named.add(side)
        ranks, values = zip(*points, strict=True)
        dashes = {"B": (0, (4, 1.5))}.get(block["side"], "-")
        axes.plot(
            ranks,
            values,
            color=colour,
            linestyle=dashes,
            linewidth=1.6 if len(blocks) <= FEW else 0.9,
            alpha=1 if len(blocks) <= FEW else 0.6,
            label=label,
        )
    axes.set_xlabel("rank of the eigenvalue")
    axes.set_ylabel("eigenvalue")
    legend_below(figure, axes, 2)
    return figure
