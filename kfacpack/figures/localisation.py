"""How far a vector moves f on its own task's examples, and on those of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from kfacpack.figures.style import canvas, is_shown, legend_below, log_limits, logarithmic, shortened, theme_of, themed


@themed
def localisation(data: Mapping[str, Any], *, theme: str = "light") -> Figure:
    """For each vector: the quantiles 5, 25, 50, 75 and 95 % of ‖Δf‖², on its task and off it, and the AUROC.

    Δf is J τ in the linearised model, f(θ₀ + τ) − f(θ₀) in others.
    """
    look = theme_of(theme)
    vectors = data["vectors"]
    figure = canvas(1.5 + 0.46 * len(vectors))
    axes = figure.subplots()
    shown: list[float] = []
    for row, each in enumerate(vectors.values()):
        for side, colour, marker, offset in (
            ("on", look.series[0], "o", -0.16),
            ("off", look.series[1], "D", 0.16),
        ):
            q05, q25, q50, q75, q95 = each[side]["quantiles"]
            positive = [q for q in (q05, q25, q50, q75, q95) if is_shown(q)]
            if not positive:
                continue
            shown += positive
            low = min(positive)
            label = {"on": "its own task", "off": "other tasks"}[side] if row == 0 else None
            axes.plot([max(q05, low), q95], [row + offset] * 2, color=colour, linewidth=1.2)
            axes.plot([max(q25, low), max(q75, low)], [row + offset] * 2, color=colour, linewidth=6, alpha=0.55)
            axes.plot(
                [max(q50, low)], [row + offset], marker, color=colour, markersize=5, label=label, linestyle="none"
            )
        axes.annotate(
            f"{each['auroc']:.3f}",
            (1.02, row),
            xycoords=("axes fraction", "data"),
            va="center",
            annotation_clip=False,
        )
    axes.annotate("AUROC", (1.02, -0.62), xycoords=("axes fraction", "data"), va="bottom", annotation_clip=False)
    logarithmic(axes.xaxis)
    axes.set_xlim(*log_limits(shown))
    axes.set_ylim(len(vectors) - 0.5, -0.5)
    axes.set_yticks(range(len(vectors)), [shortened(name, 16) for name in vectors])
    axes.grid(False, axis="y")
    axes.set_xlabel("‖Δf‖², how far f moves (5, 25, 50, 75, 95 %)")
    axes.set_ylabel("vector of")
    legend_below(figure, axes, 2)
    return figure
