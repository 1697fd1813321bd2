"""Adds the specification of the file formats to the site: the texts in `spec`, the JSON Schema and the reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

SPEC = Path(__file__).parents[2] / "spec"
PAGES = {"README.md": "bundle.md", "vector.md": "vector.md"}
"""Text in `spec` -> page in `reference/format`."""
FOLDER = "reference/format"


def page_text(name: str) -> str:
    """Returns the text of a page, with links between the texts replaced by links between the pages.

    Args:
        name: File in `spec`.
    """
    text = (SPEC / name).read_text(encoding="utf-8")
    for source, page in PAGES.items():
        text = text.replace(f"]({source}", f"]({page}")
    return text


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Adds the pages and files."""
    for source, page in PAGES.items():
        files.append(File.generated(config, f"{FOLDER}/{page}", content=page_text(source)))
    for path in (*SPEC.glob("*.schema.json"), SPEC / "reader.py", SPEC / "shards.py"):
        files.append(File.generated(config, f"{FOLDER}/{path.name}", content=path.read_bytes()))
    return files
