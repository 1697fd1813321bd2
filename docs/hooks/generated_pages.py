"""Adds generated pages to the site and to its navigation; not a hook itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files


def add_pages(
    files: Files, config: Any, folder: str, pages: Mapping[str, str], attachments: Mapping[str, str] | None = None
) -> Files:
    """Adds the pages of a folder, and lists them in the navigation after the folder's index page.

    Args:
        files: Files of the site.
        config: Configuration of the site.
        folder: Folder of the pages, which has an `index.md`.
        pages: Markdown by the name of the page, without suffix.
        attachments: Text of other files by their name.

    Returns:
        The files, with those that were added.
    """
    from mkdocs.structure.files import File  # here, so that tests need no mkdocs

    contents = {f"{name}.md": text for name, text in pages.items()} | dict(attachments or {})
    for name, text in contents.items():
        files.append(File.generated(config, f"{folder}/{name}", content=text))
    for children in _lists(config.nav):
        if f"{folder}/index.md" in children:
            children += [{name: f"{folder}/{name}.md"} for name in pages]
    return files


def _lists(entries: list[Any]) -> Iterator[list[Any]]:
    """Yields all lists of a navigation, from the outside in."""
    yield entries
    for entry in entries:
        for children in entry.values() if isinstance(entry, dict) else ():
            if isinstance(children, list):
                yield from _lists(children)
