"""What every figure shares: two themes, one font, axes that can be read on a phone, and the same bytes each time.

Figures as files.
"""

from __future__ import annotations

import functools
import io
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from kfacpack.errors import KfacpackError
from kfacpack.format.writer import write_atomically

P = ParamSpec("P")

WIDTH = 5.0
"""Inches. On a phone of 360 pixels, ten points are then still ten pixels high."""


@dataclass(frozen=True)
class Theme:
    paper: str
    ink: str
    faint: str
    series: tuple[str, ...]


# Okabe and Ito's colours, which the colour-blind can tell apart: darkened where they are to be seen on white and
# lightened where on black, in the same order of hues.
THEMES = {
    "light": Theme(
        paper="#ffffff",
        ink="#1b1f24",
        faint="#8a929b",
        series=("#0068a8", "#c44e00", "#00805c", "#a8478a", "#a87400", "#3f93cf", "#555b61", "#7a3e1d"),
    ),
    "dark": Theme(
        paper="#14181d",
        ink="#e8ebee",
        faint="#7d8790",
        series=("#4ba3e3", "#ff8a4c", "#2cc79b", "#e39ac4", "#f2be3a", "#9bd3f5", "#b8bec4", "#c9936f"),
    ),
}
MARKERS = "osD^vPXd"
"""Beside the colours, for whoever sees or prints none."""


@contextmanager
def _settings(theme: Theme) -> Iterator[None]:
    """Matplotlib's own defaults, whatever the user's are, and ours."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        # A name in a script that DejaVu Sans does not have is drawn as boxes; that is no reason to stop.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "font.family": "DejaVu Sans",
                "font.size": 10,
                "axes.titlesize": 10,
                "axes.titleweight": "bold",
                "axes.labelsize": 10,
                "legend.fontsize": 9,
                "legend.frameon": False,
                # A task may be called $x$; it is a name, not a formula.
                "text.parse_math": False,
                "text.color": theme.ink,
                "figure.facecolor": theme.paper,
                "axes.facecolor": theme.paper,
                "axes.edgecolor": theme.faint,
                "axes.labelcolor": theme.ink,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.grid": True,
                "axes.axisbelow": True,
                "grid.color": theme.faint,
                "grid.alpha": 0.25,
                "grid.linewidth": 0.6,
                "xtick.color": theme.faint,
                "ytick.color": theme.faint,
                "xtick.labelcolor": theme.ink,
                "ytick.labelcolor": theme.ink,
                "svg.fonttype": "path",
                "svg.hashsalt": "kfacpack",
            }
        )
        yield


def with_themes(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """For a function with the keyword `theme`: it draws under the settings of the theme of that name."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with _settings(theme_of(str(kwargs.get("theme", "light")))):
            figure = draw(*args, **kwargs)
            # Once and for all: else each file that is made of it would move things a little, after the one before.
            if engine := figure.get_layout_engine():
                engine.execute(figure)
            figure.set_layout_engine("none")
            return figure

    return drawn


def saving() -> Any:
    """The settings that files depend on; colours are in the figure already."""
    return _settings(THEMES["light"])


def theme_of(name: str) -> Theme:
    if name not in THEMES:
        raise KfacpackError(f"there is no theme {name!r}, expected one of: {', '.join(THEMES)}")
    return THEMES[name]


def canvas(height: float, width: float = WIDTH) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)  # type: ignore[union-attr,call-arg]
    return figure


def shortened(name: str, longest: int = 22) -> str:
    """A name as it fits beside an axis."""
    shown = "".join(char if char.isprintable() else "?" for char in name)
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def legend_below(figure: Figure, axes: Axes, columns: int) -> None:
    """Under the axes, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=max(1, min(columns, len(handles))))


def percent(axis: Axis) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))


def logarithmic(axis: Axis) -> None:
    """An axis of powers of ten, written without formulas."""
    axis._set_axes_scale("log")  # type: ignore[attr-defined]
    axis.set_major_locator(LogLocator(numticks=7))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: power_of_ten(value)))


def power_of_ten(value: float) -> str:
    if value <= 0:
        return ""
    return f"10{str(round(math.log10(value))).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def log_limits(values: list[float]) -> tuple[float, float]:
    """Whole powers of ten that hold all values, which are positive, with at least one decade between."""
    if not values:
        return 1.0, 10.0
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return 10.0**low, 10.0 ** max(high, low + 1)


def shows_on_axis(value: float | None) -> bool:
    """On a logarithmic axis."""
    return value is not None and math.isfinite(value) and value > 0


# What would say when, and by which version, a file was made.
_NO_METADATA: dict[str, dict[str, None]] = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}


def render(figure: Figure, kind: str) -> bytes:
    """The figure as "svg" or "png": the same bytes for the same figure."""
    if kind not in _NO_METADATA:
        raise KfacpackError(f"figures are made as svg or png, found {kind!r}")
    stream = io.BytesIO()
    with saving():
        figure.savefig(stream, format=kind, dpi=200, facecolor=figure.get_facecolor(), metadata=_NO_METADATA[kind])
    return stream.getvalue()


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write FILE.svg or FILE.png, whole or not at all."""
    target = Path(path)
    if target.suffix[1:].lower() not in _NO_METADATA:
        raise KfacpackError(f"{target}: a figure's file ends in .svg or .png, found {target.suffix!r}")
    write_atomically(target, render(figure, target.suffix[1:].lower()))
    return target
