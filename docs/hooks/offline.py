"""Fails the build if a page would load something from the network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

REMOTE = re.compile(
    r"""<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=["']?(?:https?:)?//[^"' >]*"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|icon|preconnect|preload))[^>]*\bhref=["']?(?:https?:)?//[^"' >]*"""
    r"""|<pre class="mermaid">"""
)
"""Elements that load a file from another server. Material loads mermaid from a CDN, so diagrams are SVG files."""


def on_post_build(config: Any, **_: Any) -> None:
    """Checks every page."""
    for page in Path(config.site_dir).rglob("*.html"):
        if found := REMOTE.search(page.read_text(encoding="utf-8")):
            raise PluginError(f"{page}: loads a resource from the network: {found[0]}")
