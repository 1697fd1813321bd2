"""Renders formulas to MathML when the site is built, so that the pages need no script for them.

`pymdownx.arithmatex` finds the formulas, `$…$` in a line and `$$…$$` on lines of their own.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def render(match: re.Match[str]) -> str:
    """Returns the MathML of one formula."""
    element, bracket, latex = match.groups()
    display = "inline" if bracket == "(" else "block"
    return f'<{element} class="formula">{convert(html.unescape(latex).strip(), display=display)}</{element}>'


def on_page_content(content: str, **_: Any) -> str:
    """Replaces the formulas of a page."""
    return FORMULA.sub(render, content)
