"""The reference covers every public name, command and option."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from command_pages import command_pages
from kfacpack_cli.main import COMMANDS, app
from typer.testing import CliRunner

import kfacpack as kp

ROOT = Path(__file__).resolve().parents[2]
PAGES = {page.name: page for page in command_pages()}
ENTRY = re.compile(r"^::: kfacpack\.(\w+)$", re.MULTILINE)


def test_every_public_name_has_one_entry():
    pages = (ROOT / "docs" / "reference" / "api").glob("*.md")
    entries = Counter(name for page in pages for name in ENTRY.findall(page.read_text(encoding="utf-8")))
    assert sorted(entries) == sorted(kp.__all__)
    assert not [name for name, count in entries.items() if count > 1]


@pytest.mark.parametrize("name", [name for commands in COMMANDS.values() for name in commands])
def test_the_page_of_a_command_has_its_options(name):
    page = PAGES[name]
    # The help is the truth: it is what typer makes of the same declarations.
    help = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "400", "TERM": "dumb"}).stdout
    shown = set(re.findall(r"^│\s+(?:\*\s+)?(--[a-z-]+)", help, re.MULTILINE)) - {"--help"}
    flags = {flag for parameter in page.parameters for names in parameter.names for flag in names.split("/")}
    assert shown
    assert shown <= flags
    assert {flag for flag in flags if flag.startswith("--") and flag not in help} == set()
    text = page.markdown()
    assert all(f"`{names}`" in text for parameter in page.parameters for names in parameter.names)
    panels = set(re.findall(r"^╭─ (.+?) ─", help, re.MULTILINE)) - {"Options"}
    assert panels <= set(re.findall(r"^## (.+)$", text, re.MULTILINE))
