"""A report as one page of HTML that needs nothing else: no script, no network, no file beside it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from kfacpack.figures.style import THEMES
from kfacpack.reporting.content import Report


def render_page(report: Report, drawings: Mapping[str, Mapping[str, bytes]]) -> str:
    """`drawings` are the SVGs of each picture's file, by theme."""
    folder = files("kfacpack.reporting")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((folder / "page.html.j2").read_text(encoding="utf-8"))
    return template.render(
        report=report,
        # Ours, and in a <style>, where escaping would break it.
        style=Markup((folder / "page.css").read_text(encoding="utf-8")),
        themes=THEMES,
        inline={
            file: {theme: f"data:image/svg+xml;base64,{b64encode(svg).decode()}" for theme, svg in themes.items()}
            for file, themes in drawings.items()
        },
    )
