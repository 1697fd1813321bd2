"""Accuracy over α."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from kfacpack.figures.style import MARKERS, canvas, legend_below, percent, shortened, theme_of, themed


@themed
def sweep(
    data: Mapping[str, Any],
    *,
    references: Mapping[str, float] | None = None,
    quantity: str = "mean accuracy",
    theme: str = "light",
) -> Figure:
    """Several arms' means, {"arm": sweep, …}; or one sweep, with a thin line for each of its tasks.

    `references` are levels to compare with, drawn across: {"individual": 0.93}.
    """
    look = theme_of(theme)
    alone = "alphas" in data
    figure = canvas(3.6)
    axes = figure.subplots()
    if alone:
        for number, (task, accuracies) in enumerate(data["tasks"].items()):
            colour = look.series[number % len(look.series)]
            axes.plot(data["alphas"], accuracies, color=colour, linewidth=1, label=shortened(task))
        axes.plot(data["alphas"], data["mean"], color=look.ink, linewidth=2.4, label="mean")
    else:
        for number, (arm, each) in enumerate(data.items()):
            axes.plot(
                each["alphas"],
                each["mean"],
                color=look.series[number % len(look.series)],
                marker=MARKERS[number % len(MARKERS)],
                markevery=max(1, len(each["alphas"]) // 10),
                markersize=4.5,
                linewidth=1.8,
                label=shortened(arm, 34),
            )
    for (name, level), dashes in zip((references or {}).items(), ("--", ":", "-.", "--"), strict=False):
        axes.axhline(level, color=look.ink, linewidth=1.1, linestyle=dashes, label=shortened(name, 34))
    axes.set_xlabel("α, the factor before the sum of the vectors")
    axes.set_ylabel(quantity)
    percent(axes.yaxis)
    axes.margins(x=0.02)
    legend_below(figure, axes, 3 if alone else 2)
    return figure
