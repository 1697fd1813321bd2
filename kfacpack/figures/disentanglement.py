"""ξ(α₁, α₂): how much two vectors, added, disturb each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from kfacpack.figures.style import canvas, shortened, theme_of, themed


@themed
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
    i, j = least(alphas, xi)
    one = nearest(alphas, 1.0)
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


def least(alphas: Sequence[float], xi: Sequence[Sequence[float]]) -> tuple[int, int]:
    """Where ξ is smallest with both α other than zero; with neither, if there are no such."""
    moved = [k for k, alpha in enumerate(alphas) if alpha != 0] or list(range(len(alphas)))
    return min(((i, j) for i in moved for j in moved), key=lambda place: xi[place[0]][place[1]])


def nearest(alphas: Sequence[float], wanted: float) -> int:
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
