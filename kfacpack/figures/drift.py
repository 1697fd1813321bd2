"""The drift that a bundle predicts, against the one that data show: whether a bundle is any good."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from kfacpack.figures.style import canvas, is_shown, legend_below, log_limits, logarithmic, theme_of, themed


@themed
def drift(data: Mapping[str, Any], *, theme: str = "light") -> Figure:
    """The mean of ‖Δf‖² over τᵀGτ: each pair of a vector and a task, and each layer of each."""
    look = theme_of(theme)
    layers, pairs = data.get("layers") or [], data["pairs"]
    groups = (
        ("single layers", layers, look.faint, "o", 2.5, 0.6),
        ("other task", [p for p in pairs if p["vector"] != p["task"]], look.series[1], "D", 5.5, 0.9),
        ("own task", [p for p in pairs if p["vector"] == p["task"]], look.series[0], "o", 7, 0.9),
    )
    figure = canvas(4.8)
    axes = figure.subplots()
    logarithmic(axes.xaxis)
    logarithmic(axes.yaxis)
    values: list[float] = []
    for name, group, colour, marker, size, opacity in groups:
        points = [
            (p["predicted"], p["measured"]) for p in group if is_shown(p["predicted"]) and is_shown(p["measured"])
        ]
        if points:
            x, y = zip(*points, strict=True)
            values += [*x, *y]
            # A value just below a power of ten lies at the frame, which would cut its mark in half.
            mark = axes.plot(x, y, marker, color=colour, markersize=size, alpha=opacity, label=name, clip_on=False)
            mark[0].set_markeredgewidth(0)
    limits = log_limits(values)
    axes.plot(limits, limits, "--", color=look.ink, linewidth=1, label="as predicted", zorder=1.5)
    axes.set_xlim(*limits)
    axes.set_ylim(*limits)
    axes.set_aspect("equal")
    axes.set_xlabel("predicted by the bundle, τᵀGτ")
    axes.set_ylabel("measured on data, mean ‖Δf‖²")
    legend_below(figure, axes, 2)
    return figure
