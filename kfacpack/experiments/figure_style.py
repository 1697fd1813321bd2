"""The style of all figures (two colour themes, one font, sizes for narrow screens), and functions that save figures.

Saving the same figure twice gives identical files.
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
from typing import ParamSpec

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from kfacpack.errors import KfacpackError
from kfacpack.format.writer import write_atomically

P = ParamSpec("P")

WIDTH = 5.0
"""Default width of a figure in inches. Five inches are 360 points.

On a screen that is 360 pixels wide, a font of 10 points is therefore 10 pixels high.
"""


@dataclass(frozen=True)
class Theme:
    """Colours of a figure."""

    paper: str
    """Background colour."""
    ink: str
    """Colour of text and reference lines."""
    faint: str
    """Colour of axes, grid lines and secondary marks."""
    series: tuple[str, ...]
    """Colours of the data series, in order."""


# Based on the colour-blind-safe palette of Okabe and Ito: darkened for the light theme, lightened for the dark theme.
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
"""Markers that distinguish series even if their colours cannot be told apart."""


@contextmanager
def _settings(theme: Theme) -> Iterator[None]:
    """Temporarily replaces the user's Matplotlib settings with Matplotlib's defaults and the kfacpack style."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        # Characters that DejaVu Sans does not contain are drawn as boxes.
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
                # A task name such as $x$ is not a formula.
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
    """Decorates a drawing function so that it draws in the theme named by its keyword argument `theme`."""

    @functools.wraps(draw)
    def draw_with_theme(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with _settings(theme_of(str(kwargs.get("theme", "light")))):
            figure = draw(*args, **kwargs)
            # Compute the layout only once. Otherwise, the layout would differ slightly between saved files.
            if engine := figure.get_layout_engine():
                engine.execute(figure)
            figure.set_layout_engine("none")
            return figure

    return draw_with_theme


def theme_of(name: str) -> Theme:
    """Returns the theme with the given name.

    Raises:
        KfacpackError: If there is no theme with this name.
    """
    if name not in THEMES:
        raise KfacpackError(f"unknown theme {name!r}; expected one of: {', '.join(THEMES)}")
    return THEMES[name]


def canvas(height: float, width: float = WIDTH) -> Figure:
    """Returns an empty figure; `height` and `width` are in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)  # type: ignore[union-attr,call-arg]
    return figure


def shortened(name: str, max_length: int = 22) -> str:
    """Shortens a name to at most `max_length` characters and replaces unprintable characters with `?`."""
    printable_name = "".join(char if char.isprintable() else "?" for char in name)
    return printable_name if len(printable_name) <= max_length else f"{printable_name[: max_length - 1]}…"


def legend_below(figure: Figure, axes: Axes, columns: int) -> None:
    """Places the legend below the axes, where it covers no data."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=max(1, min(columns, len(handles))))


def percent(axis: Axis) -> None:
    """Formats the tick labels of an axis as percentages."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))


def logarithmic(axis: Axis) -> None:
    """Makes an axis logarithmic, with tick labels such as `10⁻³`."""
    axis._set_axes_scale("log")  # type: ignore[attr-defined]
    axis.set_major_locator(LogLocator(numticks=7))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: power_of_ten(value)))


def power_of_ten(value: float) -> str:
    """Formats a value as the nearest power of ten, such as `10⁻³`.

    Returns an empty string if the value is not positive.
    """
    if value <= 0:
        return ""
    return f"10{str(round(math.log10(value))).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def log_limits(values: list[float]) -> tuple[float, float]:
    """Returns limits for a logarithmic axis: the two nearest powers of ten between which all values lie.

    The limits are at least one decade apart.

    Args:
        values: Positive values. If the list is empty, the limits are 1 and 10.
    """
    if not values:
        return 1.0, 10.0
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return 10.0**low, 10.0 ** max(high, low + 1)


def shows_on_axis(value: float | None) -> bool:
    """Returns whether a value is finite and positive, so that it can be shown on a logarithmic axis."""
    return value is not None and math.isfinite(value) and value > 0


# Metadata to omit: the date differs between calls, and the creator contains the version of Matplotlib.
_NO_METADATA: dict[str, dict[str, None]] = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}


def render(figure: Figure, kind: str) -> bytes:
    """Renders a figure.

    Args:
        figure: The figure.
        kind: `"svg"` or `"png"`.

    Returns:
        The content of the SVG or PNG file. Rendering the same figure twice gives identical bytes.

    Raises:
        KfacpackError: If `kind` is not supported.
    """
    if kind not in _NO_METADATA:
        raise KfacpackError(f"unsupported figure format {kind!r}; expected svg or png")
    stream = io.BytesIO()
    # The colours are already part of the figure; the other settings do not depend on the theme.
    with _settings(THEMES["light"]):
        figure.savefig(stream, format=kind, dpi=200, facecolor=figure.get_facecolor(), metadata=_NO_METADATA[kind])
    return stream.getvalue()


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Writes a figure to a file atomically.

    Args:
        figure: The figure.
        path: Path of the file. Its suffix must be .svg or .png.

    Returns:
        The path of the file.

    Raises:
        KfacpackError: If the suffix is not supported or the file cannot be written.
    """
    target = Path(path)
    if target.suffix[1:].lower() not in _NO_METADATA:
        raise KfacpackError(f"{target}: unsupported suffix {target.suffix!r}; expected .svg or .png")
    write_atomically(target, render(figure, target.suffix[1:].lower()))
    return target
