"""Writes the list of all public names, by topic, into the index of the API reference."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

INDEX = "reference/api/index.md"
ENTRY = re.compile(r"^::: kfacpack\.(\w+)$", re.MULTILINE)
"""An entry of a page of the API reference."""


def documented_names(folder: Path) -> dict[str, list[str]]:
    """Returns page -> public names that it documents.

    Args:
        folder: The folder of the API reference.
    """
    return {path.stem: ENTRY.findall(path.read_text(encoding="utf-8")) for path in folder.glob("*.md")}


def topics(config: Any) -> Iterator[tuple[str, str]]:
    """Yields the title and file of each page, in the order of the navigation."""

    def visit(entries: list[Any]) -> Iterator[tuple[str, str]]:
        for entry in entries:
            for title, value in entry.items() if isinstance(entry, dict) else ():
                if isinstance(value, list):
                    yield from visit(value)
                elif value.startswith("reference/api/"):
                    yield title, Path(value).stem

    return visit(config.nav)


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Replaces the marker in the index page."""
    if page.file.src_uri != INDEX:
        return markdown
    names = documented_names(Path(config.docs_dir, INDEX).parent)
    lists = [
        f"[{title}]({stem}.md)\n:   {', '.join(f'[`{name}`][kfacpack.{name}]' for name in names[stem])}\n"
        for title, stem in topics(config)
    ]
    return markdown.replace("<!-- names -->", "\n".join(lists))
