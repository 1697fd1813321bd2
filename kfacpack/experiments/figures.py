"""Figures for reports. Each drawing function takes numbers from `results.json` and returns a Matplotlib figure.

Every drawing function has the keyword argument `theme`, a name in `kfacpack.experiments.figure_style.THEMES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from kfacpack.experiments.figure_style import (
    MARKERS,
    canvas,
    legend_below,
    log_limits,
    logarithmic,
    percent,
    power_of_ten,
    shortened,
    shows_on_axis,
    theme_of,
    with_themes,
)


@with_themes
def sweep(
    data: Mapping[str, Any],
    *,
    references: Mapping[str, float] | None = None,
    quantity: str = "mean accuracy",
    theme: str = "light",
) -> Figure:
    """Draws accuracy as a function of α, the factor by which the merged task vector is multiplied.

    Args:
        data: One sweep, `{"alphas": […], "tasks": {task: […]}, "mean": […]}`, or several sweeps by name,
            `{name: sweep, …}`. A single sweep is drawn as one line per task and a line for the mean. If there are
            several sweeps, only their means are drawn.
        references: Accuracies to draw as horizontal lines, by label, such as `{"individual": 0.93}`.
        quantity: Label of the vertical axis.
        theme: Name of the colour theme.
    """
    palette = theme_of(theme)
    single = "alphas" in data
    figure = canvas(3.6)
    axes = figure.subplots()
    if single:
        for number, (task, accuracies) in enumerate(data["tasks"].items()):
            colour = palette.series[number % len(palette.series)]
            axes.plot(data["alphas"], accuracies, color=colour, linewidth=1, label=shortened(task))
        axes.plot(data["alphas"], data["mean"], color=palette.ink, linewidth=2.4, label="mean")
    else:
        for number, (arm, curve) in enumerate(data.items()):
            axes.plot(
                curve["alphas"],
                curve["mean"],
                color=palette.series[number % len(palette.series)],
                marker=MARKERS[number % len(MARKERS)],
                markevery=max(1, len(curve["alphas"]) // 10),
                markersize=4.5,
                linewidth=1.8,
                label=shortened(arm, 34),
            )
    for (name, level), dashes in zip((references or {}).items(), ("--", ":", "-.", "--"), strict=False):
        axes.axhline(level, color=palette.ink, linewidth=1.1, linestyle=dashes, label=shortened(name, 34))
    axes.set(xlabel="α, scale of the merged vector", ylabel=quantity)
    percent(axes.yaxis)
    axes.margins(x=0.02)
    legend_below(figure, axes, 3 if single else 2)
    return figure


@with_themes
def disentanglement(data: Mapping[str, Any], *, top: float | None = None, theme: str = "light") -> Figure:
    """Draws the disentanglement error ξ(α₁, α₂) of two vectors as a heat map.

    ξ is the sum of two fractions, one for each task: the fraction of the task's examples whose predictions change when
    the vector of the other task is added. A circle marks the smallest ξ among the points where both α are nonzero. A
    square marks the point where both α are 1 or, if `alphas` does not contain 1, nearest to 1.

    Args:
        data: `{"tasks": (first, second), "alphas": […], "xi": [[…], …]}`. The rows of "xi" correspond to the α of the
            first task, and the columns to the α of the second task.
        top: Upper end of the colour scale. Defaults to the largest ξ.
        theme: Name of the colour theme.
    """
    palette = theme_of(theme)
    alphas, xi = data["alphas"], data["xi"]
    figure = canvas(4.6)
    axes = figure.subplots()
    highest = max(max(row) for row in xi) if top is None else top
    image = axes.imshow(
        xi, origin="lower", cmap="cividis", vmin=0, vmax=max(highest, 0.01), interpolation="none", aspect="equal"
    )
    axes.grid(False)
    ticks = _ticks(alphas)
    axes.set_xticks(ticks, [f"{alphas[k]:g}" for k in ticks])
    axes.set_yticks(ticks, [f"{alphas[k]:g}" for k in ticks])
    first, second = (shortened(task) for task in data["tasks"])
    axes.set(xlabel=f"α of {second}", ylabel=f"α of {first}")
    bar = figure.colorbar(image, ax=axes, label="ξ, disagreement", shrink=0.9)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _percent(value)))
    bar.outline.set_visible(False)
    i, j = smallest_nonzero(alphas, xi)
    one = nearest_index(alphas, 1.0)
    minimum = f"minimum, α = {alphas[i]:g} ({first}), {alphas[j]:g} ({second})"
    for row, column, marker, size, name in (
        (i, j, "o", 6, minimum),
        (one, one, "s", 9, f"α = {alphas[one]:g} for both tasks"),
    ):
        axes.plot(column, row, marker, markersize=size, markerfacecolor="none", markeredgecolor="w", markeredgewidth=3)
        axes.plot(
            column,
            row,
            marker,
            markersize=size,
            markerfacecolor="none",
            markeredgecolor="#e02020",
            markeredgewidth=1.5,
            linestyle="none",
            label=f"{name}: ξ = {_percent(xi[row][column])}",
        )
    figure.legend(loc="outside lower center", ncols=1, labelcolor=palette.ink)
    return figure


def smallest_nonzero(alphas: Sequence[float], xi: Sequence[Sequence[float]]) -> tuple[int, int]:
    """Returns the row and the column of the smallest ξ among the points where both α are nonzero.

    If every α is zero, all points are considered.
    """
    nonzero = [k for k, alpha in enumerate(alphas) if alpha != 0] or list(range(len(alphas)))
    return min(((i, j) for i in nonzero for j in nonzero), key=lambda point: xi[point[0]][point[1]])


def nearest_index(alphas: Sequence[float], target: float) -> int:
    """Returns the index of the α nearest to `target`."""
    return min(range(len(alphas)), key=lambda k: abs(alphas[k] - target))


def _ticks(alphas: Sequence[float], max_ticks: int = 8) -> list[int]:
    """Returns the indices of the values of α to label on the axes: at most `max_ticks`, preferably round values."""
    for step in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0):
        indices = [k for k, alpha in enumerate(alphas) if abs(alpha / step - round(alpha / step)) < 1e-6]
        if 3 <= len(indices) <= max_ticks:
            return indices
    return list(range(0, len(alphas), max(1, -(-len(alphas) // max_ticks))))


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


@with_themes
def localisation(data: Mapping[str, Any], *, theme: str = "light") -> Figure:
    """Draws how much each task vector changes the output f of the model, on its own task and on other tasks.

    Each row shows the 5, 25, 50, 75 and 95 % quantiles of ‖Δf‖² over examples. If the vector τ was trained in the
    linearised model, Δf is J τ, where J is the Jacobian of f at the base weights θ₀. Otherwise, Δf is equal to
    f(θ₀ + τ) − f(θ₀). The AUROC of the vector is written beside its row.

    Args:
        data: `{"vectors": {task: {"on": …, "off": …, "auroc": …}}}`, where "on" contains the quantiles on the vector's
            own task, and "off" the quantiles on the other tasks.
        theme: Name of the colour theme.
    """
    palette = theme_of(theme)
    vectors = data["vectors"]
    figure = canvas(1.5 + 0.46 * len(vectors))
    axes = figure.subplots()
    plotted: list[float] = []
    for row, vector in enumerate(vectors.values()):
        for side, colour, marker, offset in (
            ("on", palette.series[0], "o", -0.16),
            ("off", palette.series[1], "D", 0.16),
        ):
            q05, q25, q50, q75, q95 = vector[side]["quantiles"]
            positive = [q for q in (q05, q25, q50, q75, q95) if shows_on_axis(q)]
            if not positive:
                continue
            plotted += positive
            low = min(positive)
            label = {"on": "own task", "off": "other tasks"}[side] if row == 0 else None
            axes.plot([max(q05, low), q95], [row + offset] * 2, color=colour, linewidth=1.2)
            axes.plot([max(q25, low), max(q75, low)], [row + offset] * 2, color=colour, linewidth=6, alpha=0.55)
            axes.plot(
                [max(q50, low)], [row + offset], marker, color=colour, markersize=5, label=label, linestyle="none"
            )
        axes.annotate(
            f"{vector['auroc']:.3f}",
            (1.02, row),
            xycoords=("axes fraction", "data"),
            va="center",
            annotation_clip=False,
        )
    axes.annotate("AUROC", (1.02, -0.62), xycoords=("axes fraction", "data"), va="bottom", annotation_clip=False)
    logarithmic(axes.xaxis)
    axes.set_xlim(*log_limits(plotted))
    axes.set_ylim(len(vectors) - 0.5, -0.5)
    axes.set_yticks(range(len(vectors)), [shortened(name, 16) for name in vectors])
    axes.grid(False, axis="y")
    axes.set(xlabel="‖Δf‖², change in f (5, 25, 50, 75, 95 % quantiles)", ylabel="vector")
    legend_below(figure, axes, 2)
    return figure


@with_themes
def drift(data: Mapping[str, Any], *, theme: str = "light") -> Figure:
    """Draws measured drift against predicted drift, for whole task vectors and for individual layers.

    The measured drift is the mean over examples of ‖Δf‖², where Δf is the change in the model's output that the vector
    τ causes. The predicted drift is τᵀGτ, where G is the curvature in a bundle.

    Args:
        data: `{"pairs": […], "layers": […]}`. Each entry has the keys "vector", "task", "predicted" and "measured".
        theme: Name of the colour theme.
    """
    palette = theme_of(theme)
    layers, pairs = data.get("layers") or [], data["pairs"]
    groups = (
        ("individual layers", layers, palette.faint, "o", 2.5, 0.6),
        ("other task", [p for p in pairs if p["vector"] != p["task"]], palette.series[1], "D", 5.5, 0.9),
        ("own task", [p for p in pairs if p["vector"] == p["task"]], palette.series[0], "o", 7, 0.9),
    )
    figure = canvas(4.8)
    axes = figure.subplots()
    logarithmic(axes.xaxis)
    logarithmic(axes.yaxis)
    values: list[float] = []
    for name, group, colour, marker, size, opacity in groups:
        points = [
            (p["predicted"], p["measured"])
            for p in group
            if shows_on_axis(p["predicted"]) and shows_on_axis(p["measured"])
        ]
        if points:
            x, y = zip(*points, strict=True)
            values += [*x, *y]
            # Without clip_on=False, markers at the limits of the axes would be cut in half.
            mark = axes.plot(x, y, marker, color=colour, markersize=size, alpha=opacity, label=name, clip_on=False)
            mark[0].set_markeredgewidth(0)
    limits = log_limits(values)
    axes.plot(limits, limits, "--", color=palette.ink, linewidth=1, label="measured = predicted", zorder=1.5)
    axes.set(xlim=limits, ylim=limits, aspect="equal")
    axes.set(xlabel="predicted by the bundle, τᵀGτ", ylabel="measured on data, mean ‖Δf‖²")
    legend_below(figure, axes, 2)
    return figure


@with_themes
def interference(data: Mapping[str, Any], *, theme: str = "light") -> Figure:
    """Draws a heat map of predicted drift with a logarithmic colour scale: one row per vector, one column per bundle.

    The predicted drift is τᵀGτ, where τ is the vector and G is the curvature in the bundle. A frame marks the cells
    whose bundle contains the vector's own task.

    Args:
        data: `{"vectors": […], "tasks": [{"task": …}, …], "pairs": […]}`. Each pair has the keys "vector", "task",
            "predicted" and "own". "own" is true if the bundle contains the vector's own task.
        theme: Name of the colour theme.
    """
    palette = theme_of(theme)
    rows, columns = data["vectors"], [task["task"] for task in data["tasks"]]
    cells = {(rows.index(p["vector"]), columns.index(p["task"])): p for p in data["pairs"]}
    positive = sorted(p["predicted"] for p in data["pairs"] if shows_on_axis(p["predicted"])) or [1.0]
    unit = 10.0 ** math.floor(math.log10(positive[len(positive) // 2]))
    norm = LogNorm(positive[0], max(positive[-1], 1.01 * positive[0]))
    values = [[cells[i, j]["predicted"] for j in range(len(columns))] for i in range(len(rows))]
    figure = canvas(2.1 + 0.36 * len(rows))
    axes = figure.subplots()
    # Values that are not positive have no logarithm, so their cells have no colour.
    shown = np.ma.masked_less_equal(np.array(values), 0.0)
    image = axes.imshow(shown, cmap="cividis", norm=norm, interpolation="none", aspect="auto")
    axes.grid(False)
    axes.tick_params(length=0)
    axes.set_xticks(
        range(len(columns)),
        [shortened(name, 16) for name in columns],
        rotation=35,
        ha="right",
        rotation_mode="anchor",
    )
    axes.set_yticks(range(len(rows)), [shortened(name, 16) for name in rows])
    axes.set(xlabel="task of the bundle", ylabel="vector")
    framed = False
    for (i, j), pair in cells.items():
        value = pair["predicted"]
        light = shows_on_axis(value) and norm(value) > 0.55
        colour = "#000000" if light else "#ffffff" if shows_on_axis(value) else palette.ink
        axes.text(j, i, _in_unit(value, unit), ha="center", va="center", color=colour, fontsize=8)
        if pair["own"]:
            label = None if framed else "own task"
            box: Any = {"xy": (j - 0.46, i - 0.46), "width": 0.92, "height": 0.92, "facecolor": "none"}
            axes.add_patch(Rectangle(**box, edgecolor="w", linewidth=3))
            axes.add_patch(Rectangle(**box, edgecolor="#e02020", linewidth=1.5, label=label))
            framed = True
    scale = "" if unit == 1 else f" × {power_of_ten(unit)}"
    bar = figure.colorbar(image, ax=axes, label=f"predicted drift,\nτᵀGτ (cell values{scale})", shrink=0.9)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: power_of_ten(value)))
    bar.ax.yaxis.set_major_locator(LogLocator(numticks=7))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.outline.set_visible(False)
    legend_below(figure, axes, 1)
    return figure


def _in_unit(value: float, unit: float) -> str:
    """Divides a value by a unit and formats the quotient.

    Quotients of at least 100 are rounded to integers, smaller quotients to two significant digits, and quotients close
    to zero to 0.
    """
    scaled = value / unit
    return f"{scaled:.0f}" if abs(scaled) >= 99.5 else f"{scaled:.2g}" if abs(scaled) >= 5e-5 else "0"


SIDES = {"A": "A (inputs)", "B": "B (gradients)", "G": "G (whole blocks)"}
MAX_LABELLED = 6
"""Lines are labelled individually only if there are at most this many factors."""


@with_themes
def spectra(data: Mapping[str, Any], *, theme: str = "light") -> Figure:
    """Draws the eigenvalues of curvature factors against the rank of the eigenvalue, with one line for each factor.

    If there are at most `MAX_LABELLED` factors, each line has its own colour and label. Otherwise, the colour shows the
    kind of factor: A (inputs), B (gradients) or G (whole blocks).

    Args:
        data: `{"blocks": […]}`. Each entry describes one factor, with the keys "name", "side" (the kind of factor),
            "ranks" and "eigenvalues".
        theme: Name of the colour theme.
    """
    palette = theme_of(theme)
    blocks = data["blocks"]
    figure = canvas(3.8)
    axes = figure.subplots()
    logarithmic(axes.xaxis)
    logarithmic(axes.yaxis)
    labelled: set[str] = set()
    for number, block in enumerate(blocks):
        points = [(r, v) for r, v in zip(block["ranks"], block["eigenvalues"], strict=True) if shows_on_axis(v)]
        side = SIDES.get(block["side"], block["side"])
        label: str | None = side if side not in labelled else None
        colour = palette.series[list(SIDES).index(block["side"]) if block["side"] in SIDES else 3]
        if len(blocks) <= MAX_LABELLED:
            colour, label = palette.series[number], f"{shortened(block['name'], 24)} {block['side']}"
        if not points:
            continue
        labelled.add(side)
        ranks, values = zip(*points, strict=True)
        dashes = {"B": (0, (4, 1.5))}.get(block["side"], "-")
        axes.plot(
            ranks,
            values,
            color=colour,
            linestyle=dashes,
            linewidth=1.6 if len(blocks) <= MAX_LABELLED else 0.9,
            alpha=1 if len(blocks) <= MAX_LABELLED else 0.6,
            label=label,
        )
    axes.set(xlabel="rank of the eigenvalue", ylabel="eigenvalue")
    legend_below(figure, axes, 2)
    return figure


@with_themes
def bars(data: Mapping[str, Any], *, theme: str = "light") -> Figure:
    """Draws bar charts of accuracy by task, for the base model, the task's own vector and all vectors combined.

    Each arm has its own bar chart. The charts are stacked, so that eight tasks fit on a narrow screen.

    Args:
        data: `{"base": {task: accuracy}, "arms": {arm: {"individual": {task: accuracy}, "added": {task: accuracy}}}}`,
            where "individual" contains the accuracies with each task's own vector, and "added" the accuracies with all
            vectors combined.
        theme: Name of the colour theme.
    """
    palette = theme_of(theme)
    base, arms = data["base"], data["arms"]
    tasks = list(base)
    figure = canvas(1.3 + 1.35 * len(arms))
    rows = figure.subplots(len(arms), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (arm, by_vector) in zip(rows, arms.items(), strict=True):
        for offset, name, accuracies, colour in (
            (-0.27, "base model", base, palette.faint),
            (0.0, "own vector", by_vector["individual"], palette.series[5]),
            (0.27, "all vectors added", by_vector["added"], palette.series[1]),
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


FIGURES: dict[str, Callable[..., Figure]] = {
    "sweep": sweep,
    "disentanglement": disentanglement,
    "localisation": localisation,
    "drift": drift,
    "interference": interference,
    "spectra": spectra,
    "bars": bars,
}
"""Drawing functions by figure name."""
