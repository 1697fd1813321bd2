"""Accuracy by task: the model as it was, with one vector, with the sum of all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from kfacpack.figures.style import canvas, legend_below, percent, shortened, theme_of, themed


@themed
def bars(data: Mapping[str, Any], *, theme: str = "light") -> Figure:
    """{"base": {task: accuracy}, "arms": {arm: {"individual": {task: accuracy}, "added": {task: accuracy}}}}.

    One row of bars for each arm, so that eight tasks still have room on a phone.
    """
    look = theme_of(theme)
    base, arms = data["base"], data["arms"]
    tasks = list(base)
    figure = canvas(1.3 + 1.35 * len(arms))
    rows = figure.subplots(len(arms), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (arm, each) in zip(rows, arms.items(), strict=True):
        for offset, name, accuracies, colour in (
            (-0.27, "base model", base, look.faint),
            (0.0, "its own vector", each["individual"], look.series[5]),
            (0.27, "sum of all vectors", each["added"], look.series[1]),
        ):
            axes.bar(
                [k + offset for k in range(len(tasks))],
                [accuracies[task] for task in tasks],
                width=0.27,
                color=colour,
                label=name,
            )
        axes.set_title(shortened(arm, 48), loc="left")
        axes.set_ylim(0, 1)
        axes.set_yticks([0, 0.5, 1])
        percent(axes.yaxis)
        axes.grid(False, axis="x")
        axes.tick_params(axis="x", length=0)
    crowded = len(tasks) > 4 or max(map(len, tasks), default=0) > 12
    rows[-1].set_xticks(
        range(len(tasks)),
        [shortened(task, 16) for task in tasks],
        rotation=35 if crowded else 0,
        ha="right" if crowded else "center",
        rotation_mode="anchor",
    )
    rows[-1].set_xlim(-0.6, len(tasks) - 0.4)
    legend_below(figure, rows[0], 3)
    return figure
