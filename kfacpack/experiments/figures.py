"""Accuracy over α.

ξ(α₁, α₂): how much two vectors, added, disturb each other.

How far a vector moves f on its own task's examples, and on those of others.

The drift that a bundle predicts, against the one that data show: whether a bundle is any good.

Eigenvalues of the factors, over their rank.

Accuracy by task: the model as it was, with one vector, with the sum of all.

The figures, one file each. They are given plain numbers, as they stand in JSON, and know nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from kfacpack.experiments.figure_style import (
    MARKERS,
    canvas,
    legend_below,
    log_limits,
    logarithmic,
    percent,
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


@with_themes
def disentanglement(data: Mapping[str, Any], *, top: float | None = None, theme: str = "light") -> Figure:
    """The share of examples on which the pair and the vector alone disagree; `top` is where the colours end.

    ξ is (α of A, α of B); A goes up, B to the right. The least is looked for where neither α is zero, since with no
    vectors at all ξ is zero for anything.
    """
    look = theme_of(theme)
    alphas, xi = data["alphas"], data["xi"]
    figure = canvas(4.6)
    axes = figure.subplots()
    highest = max(max(row) for row in xi) if top is None else top
    picture = axes.imshow(
        xi, origin="lower", cmap="cividis", vmin=0, vmax=max(highest, 0.01), interpolation="none", aspect="equal"
    )
    axes.grid(False)
    places = _ticks(alphas)
    axes.set_xticks(places, [f"{alphas[k]:g}" for k in places])
    axes.set_yticks(places, [f"{alphas[k]:g}" for k in places])
    first, second = (shortened(task) for task in data["tasks"])
    axes.set_ylabel(f"α of {first}")
    axes.set_xlabel(f"α of {second}")
    bar = figure.colorbar(picture, ax=axes, label="ξ, disagreement", shrink=0.9)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _percent(value)))
    bar.outline.set_visible(False)
    i, j = smallest_positive(alphas, xi)
    one = nearest_index(alphas, 1.0)
    where = f"least with both, at {alphas[i]:g} of {first}, {alphas[j]:g} of {second}"
    for row, column, marker, size, name in (
        (i, j, "o", 6, where),
        (one, one, "s", 9, f"at {alphas[one]:g} of each"),
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
    figure.legend(loc="outside lower center", ncols=1, labelcolor=look.ink)
    return figure


def smallest_positive(alphas: Sequence[float], xi: Sequence[Sequence[float]]) -> tuple[int, int]:
    """Where ξ is smallest with both α other than zero; with neither, if there are no such."""
    moved = [k for k, alpha in enumerate(alphas) if alpha != 0] or list(range(len(alphas)))
    return min(((i, j) for i in moved for j in moved), key=lambda place: xi[place[0]][place[1]])


def nearest_index(alphas: Sequence[float], wanted: float) -> int:
    return min(range(len(alphas)), key=lambda k: abs(alphas[k] - wanted))


def _ticks(alphas: Sequence[float], most: int = 8) -> list[int]:
    """Which of the α are written at the axes: the round ones, if some are."""
    for step in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0):
        places = [k for k, alpha in enumerate(alphas) if abs(alpha / step - round(alpha / step)) < 1e-6]
        if 3 <= len(places) <= most:
            return places
    return list(range(0, len(alphas), max(1, -(-len(alphas) // most))))


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


@with_themes
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
            positive = [q for q in (q05, q25, q50, q75, q95) if shows_on_axis(q)]
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


@with_themes
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
            (p["predicted"], p["measured"])
            for p in group
            if shows_on_axis(p["predicted"]) and shows_on_axis(p["measured"])
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


SIDES = {"A": "A, of the inputs", "B": "B, of the gradients", "G": "G, whole blocks"}
FEW = 6
"""So many lines can each be named."""


@with_themes
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
        points = [(r, v) for r, v in zip(block["ranks"], block["eigenvalues"], strict=True) if shows_on_axis(v)]
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


@with_themes
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


FIGURES: dict[str, Callable[..., Figure]] = {
    "sweep": sweep,
    "disentanglement": disentanglement,
    "localisation": localisation,
    "drift": drift,
    "spectra": spectra,
    "bars": bars,
}
