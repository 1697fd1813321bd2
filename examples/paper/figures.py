"""Figures of RESULTS.md, in the form of those of the paper."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FormatStrFormatter
from measures import Results, spread

COLORS = (
    "#6b7280",
    "#d97706",
    "#15803d",
    "#2563eb",
    "#9333ea",
    "#be123c",
    "#0e7490",
    "#a16207",
    "#4d7c0f",
    "#7c2d12",
    "#334155",
)


def arms(results: Results, figure: Any) -> None:
    """Accuracy of the sum of each arm at α = 1."""
    axes = figure.subplots()
    for position, (color, name) in enumerate(zip(COLORS, results.arms, strict=False)):
        values = [100 * value for value in results.sum_at_one(name)]
        axes.errorbar(position, fmean(values), yerr=spread(values), fmt="o", color=color, capsize=3)
    axes.set_xticks(range(len(results.arms)), list(results.arms), rotation=30, ha="right")
    axes.grid(axis="y", color="#e5e7eb")
    axes.set_ylabel("accuracy of the sum at α = 1, %")


def sweeps(results: Results, figure: Any) -> None:
    """Accuracy over α, and the distribution of ‖Δf‖² on the own task and on other tasks."""
    located = [name for name, arm in results.arms.items() if arm["seeds"][0]["scores"]]
    left, right = figure.subplots(1, 2) if located else (figure.subplots(), None)
    for color, name in zip(COLORS, results.arms, strict=False):
        table = [next(iter(seed["methods"].values()))["sweep"] for seed in results.arms[name]["seeds"]]
        means = [100 * fmean(values) for values in zip(*(sweep["mean"] for sweep in table), strict=True)]
        left.plot(table[0]["alphas"], means, color=color, label=name)
    left.axvline(1, color="#d1d5db", zorder=0)
    left.set_xlabel("α")
    left.set_ylabel("accuracy of the sum, %")
    left.legend(frameon=False, fontsize=8)
    if right is None:
        return
    for position, name in enumerate(located):
        for shift, side, color in ((-0.17, "on", "#15803d"), (0.17, "off", "#be123c")):
            quantiles = [
                fmean(values)
                for values in zip(*(seed["scores"][side] for seed in results.arms[name]["seeds"]), strict=True)
            ]
            place, label = [position + shift] * 2, None if position else {"on": "own task", "off": "other tasks"}[side]
            right.plot(place, [quantiles[0], quantiles[4]], color=color, lw=1)
            right.plot(place, quantiles[1:4:2], color=color, lw=6, solid_capstyle="butt", label=label)
    right.set_yscale("log")
    right.set_ylim(top=5 * right.get_ylim()[1])  # space for the legend
    right.set_xticks(range(len(located)), located, rotation=30, ha="right")
    right.set_ylabel("‖Δf‖²")
    right.legend(frameon=False, fontsize=8)


def maps(results: Results, figure: Any) -> None:
    """Disentanglement error ξ over the coefficients of two vectors: a row for each arm, a column for each pair."""
    grids = {name: arm["seeds"][0]["disentanglement"] for name, arm in results.arms.items()}
    grids = {name: of_arm for name, of_arm in grids.items() if of_arm}
    columns = max(len(of_arm) for of_arm in grids.values())
    figure.set_size_inches(2.4 * columns + 0.8, 2.2 * len(grids))
    all_axes = figure.subplots(len(grids), columns, squeeze=False, sharex=True, sharey=True)
    largest = max(value for of_arm in grids.values() for grid in of_arm for line in grid["xi"] for value in line)
    for axes_of_arm, (name, of_arm) in zip(all_axes, grids.items(), strict=True):
        for axes, grid in zip(axes_of_arm, of_arm, strict=True):
            first, second = grid["tasks"]
            # Rows of ξ are the coefficients of the first task, which are on the horizontal axis.
            values = list(zip(*grid["xi"], strict=True))
            mesh = axes.pcolormesh(grid["alphas"], grid["alphas"], values, vmin=0, vmax=largest, cmap="viridis")
            axes.set_aspect("equal")
            axes.set_title(f"{name}: {first}, {second}", fontsize=8)
    for axes in all_axes[-1]:
        axes.set_xlabel("α, first task")
    for axes in all_axes[:, 0]:
        axes.set_ylabel("α, second task")
    figure.colorbar(mesh, ax=all_axes, label="ξ", shrink=0.7)


def negation(results: Results, figure: Any) -> None:
    """Target and control accuracy after negation."""
    axes = figure.subplots()
    for color, name in zip(COLORS, results.arms, strict=False):
        control = [100 * value for value in results.values(name, lambda seed: seed["negation"]["control"])]
        target = [100 * value for value in results.values(name, lambda seed: seed["negation"]["accuracy"])]
        axes.errorbar(
            fmean(control), fmean(target), xerr=spread(control), yerr=spread(target), fmt="o", color=color, label=name
        )
    axes.set_xlabel("control, %")
    axes.set_ylabel("target, %")
    axes.legend(frameon=False, fontsize=8)


def size(results: Results, figure: Any) -> None:
    """Accuracy over the size of the bundles."""
    axes = figure.subplots()
    for position, (color, (name, arm)) in enumerate(zip(COLORS, results.arms.items(), strict=False)):
        values = [100 * value for value in results.sum_at_one(name)]
        if arm["bundle_bytes"] is None:
            axes.axhline(fmean(values), color="#d1d5db", zorder=0)
            axes.annotate(name, (0.01, fmean(values)), xycoords=("axes fraction", "data"), fontsize=8, va="bottom")
            continue
        axes.errorbar(arm["bundle_bytes"] / 1e6, fmean(values), yerr=spread(values), fmt="o", color=color)
        axes.annotate(
            name,
            (arm["bundle_bytes"] / 1e6, fmean(values)),
            textcoords="offset points",
            xytext=(5, (3, -10)[position % 2]),
            fontsize=8,
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.xaxis.set_minor_formatter(FormatStrFormatter("%g"))
    axes.margins(x=0.12, y=0.12)
    axes.set_xlabel("MB per task")
    axes.set_ylabel("accuracy of the sum at α = 1, %")


def methods(results: Results, figure: Any) -> None:
    """Accuracy of each merge method over α, by arm."""
    all_axes = figure.subplots(1, len(results.arms), sharey=True)
    for axes, (name, arm) in zip(all_axes, results.arms.items(), strict=True):
        for color, label in zip(COLORS, arm["seeds"][0]["methods"], strict=False):
            table = [seed["methods"][label]["sweep"] for seed in arm["seeds"]]
            means = [100 * fmean(values) for values in zip(*(sweep["mean"] for sweep in table), strict=True)]
            axes.plot(table[0]["alphas"], means, color=color, label=label)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("α")
    all_axes[0].set_ylabel("accuracy, %")
    all_axes[0].legend(frameon=False, fontsize=8)


FIGURES: dict[str, Callable[[Results, Any], None]] = {
    "arms": arms,
    "sweeps": sweeps,
    "maps": maps,
    "negation": negation,
    "bytes": size,
    "methods": methods,
}
"""Figures by name."""


def draw(name: str, results: Results, path: Path) -> None:
    """Writes a figure as SVG, with the same bytes for the same results."""
    with plt.rc_context({"svg.hashsalt": "kfacpack", "svg.fonttype": "none", "font.size": 9}):
        figure = plt.figure(figsize=(8, 3.2), layout="constrained")
        FIGURES[name](results, figure)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
