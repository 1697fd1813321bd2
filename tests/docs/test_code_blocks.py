"""The code blocks of the README and of the documentation run, page by page, in an empty folder.

A block that needs a download, a GPU or much time follows a comment `<!-- not run: reason -->`. A block that needs the
Hub follows a comment `<!-- run with a local Hub -->` and is run with the Hub of the tests.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hub.conftest import hub, log_in  # noqa: F401 - fixtures
from kfacpack_cli.main import app
from typer.testing import CliRunner

FENCE = re.compile(
    r"(?:^[ ]*<!-- (?:not run: (?P<reason>[^\n]+?)|(?P<hub>run with a local Hub)) -->\n\s*?)?"
    r"^(?P<indent>[ ]*)```(?P<language>python|console|bash)\b[^\n]*\n(?P<text>.*?)^(?P=indent)```[ ]*$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A block of code."""

    language: str
    text: str
    line: int
    """Line of the page at which the block starts."""
    reason: str | None
    """Why the block is not run; None if it is."""
    needs_hub: bool = False
    """Whether the block is run with a local Hub."""


def blocks_of(page: str) -> list[Block]:
    """Returns the blocks of Python and shell code of a page."""
    return [
        Block(
            match["language"],
            "".join(line.removeprefix(match["indent"]) for line in match["text"].splitlines(keepends=True)),
            page.count("\n", 0, match.start("text")),
            match["reason"],
            match["hub"] is not None,
        )
        for match in FENCE.finditer(page)
    ]


def shell_text(block: Block) -> str:
    """Returns the commands of a shell block; in a console block, those are the lines that begin with `$`."""
    if block.language == "bash":
        return block.text
    lines = [re.match(r"(?:\$|>) (.*)", line) for line in block.text.splitlines()]
    return "\n".join(line[1] for line in lines if line)


def kfacpack_commands(text: str) -> list[list[str]] | None:
    """Returns the arguments of each command, or None if the text has anything but simple `kfacpack` commands."""
    commands = []
    for line in text.replace("\\\n", " ").splitlines():
        try:
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.wordchars += "@%+:,~=/*?[]{}α"
            words = list(lexer)
        except ValueError:
            return None
        if not words:
            continue
        shell = any(re.fullmatch(r"[();<>|&]+", word) for word in words) or re.search(r"[$`]|[*?\[{~]", line)
        if words[0] != "kfacpack" or (shell and not (words[-2:-1] == [">"] and words.count(">") == 1)):
            return None
        commands.append(words[1:])
    return commands


@dataclass
class Page:
    """A page whose blocks are run one after the other; Python blocks share their variables."""

    file: str
    variables: dict[str, Any] = field(default_factory=dict)

    def run(self, block: Block) -> None:
        """Runs a block; the test fails if it does."""
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            if block.language == "python":
                exec(compile("\n" * block.line + block.text, str(ROOT / self.file), "exec"), self.variables)
                return
            text = shell_text(block)
            commands = kfacpack_commands(text)
            if commands is None:
                self.run_shell(text)
            for command in commands or ():
                self.run_command(command)

    def run_command(self, words: list[str]) -> None:
        """Runs `kfacpack` in this process, which saves the time of importing torch."""
        output = Path(words[-1]) if ">" in words else None
        done = CliRunner().invoke(app, words[:-2] if output else words, catch_exceptions=False)
        assert done.exit_code == 0, f"kfacpack {shlex.join(words)}\n{done.output}"
        if output:
            output.write_text(done.stdout, encoding="utf-8")

    def run_shell(self, text: str) -> None:
        """Runs shell commands, with the `python` and `kfacpack` of this environment."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        command = ["bash", "-euo", "pipefail", "-c", text]
        done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"


ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = {str(path.relative_to(ROOT)): blocks_of(path.read_text(encoding="utf-8")) for path in PAGES}


@pytest.mark.parametrize("page", [page for page, blocks in BLOCKS.items() if any(not b.reason for b in blocks)])
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch, request):
    folder = tmp_path / "page"
    folder.mkdir()
    monkeypatch.chdir(folder)
    if any(block.needs_hub for block in BLOCKS[page]):
        request.getfixturevalue("hub")
        request.getfixturevalue("log_in")("owner")
    running = Page(page)
    for block in BLOCKS[page]:
        if block.reason is None:
            running.run(block)


def test_most_blocks_are_run():
    blocks = [block for page in BLOCKS.values() for block in page]
    left_out = [block for block in blocks if block.reason]
    assert 2 * len(left_out) < len(blocks), f"{len(left_out)} of {len(blocks)} blocks are not run"


def test_blocks_are_found_with_the_reason_for_not_running_them():
    page = "text\n\n```python\na = 1\n```\n"
    page += "<!-- not run: needs a GPU -->\n```bash\nkfacpack train\n```\n```text\nx\n```\n"
    page += "<!-- run with a local Hub -->\n```bash\nkfacpack push a b/c\n```\n"
    page += "1. item\n\n    ```console\n    $ kfacpack tasks\n    digits\n    ```\n"
    found = [(block.language, block.text, block.line, block.reason, block.needs_hub) for block in blocks_of(page)]
    assert found == [
        ("python", "a = 1\n", 3, None, False),
        ("bash", "kfacpack train\n", 7, "needs a GPU", False),
        ("bash", "kfacpack push a b/c\n", 14, None, True),
        ("console", "$ kfacpack tasks\ndigits\n", 19, None, False),
    ]


def test_simple_commands_are_told_from_shell_code():
    text = "kfacpack compress a.kfac block:8+int8 -o b.kfac  # smaller\n"
    text += "kfacpack eval --alpha 0:2:0.1 \\\n  --task a > a.json\n"
    assert kfacpack_commands(text) == [
        ["compress", "a.kfac", "block:8+int8", "-o", "b.kfac"],
        ["eval", "--alpha", "0:2:0.1", "--task", "a", ">", "a.json"],
    ]
    for shell in ("kfacpack merge *.kfac -o m.kfac", "kfacpack tasks | head", "ls", "cat > p <<'E'\na\nE"):
        assert kfacpack_commands(shell) is None
