"""Figures as files."""

from __future__ import annotations

import io
import os
from pathlib import Path

from matplotlib.figure import Figure

from kfacpack.errors import KfacpackError
from kfacpack.figures.style import saving
from kfacpack.running.files import write_whole

# What would say when, and by which version, a file was made.
_UNSAID: dict[str, dict[str, None]] = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}


def render(figure: Figure, kind: str) -> bytes:
    """The figure as "svg" or "png": the same bytes for the same figure."""
    if kind not in _UNSAID:
        raise KfacpackError(f"figures are made as svg or png, found {kind!r}")
    stream = io.BytesIO()
    with saving():
        figure.savefig(stream, format=kind, dpi=200, facecolor=figure.get_facecolor(), metadata=_UNSAID[kind])
    return stream.getvalue()


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write FILE.svg or FILE.png, whole or not at all."""
    target = Path(path)
    if target.suffix[1:].lower() not in _UNSAID:
        raise KfacpackError(f"{target}: a figure's file ends in .svg or .png, found {target.suffix!r}")
    write_whole(target, render(figure, target.suffix[1:].lower()))
    return target
