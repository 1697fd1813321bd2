"""Links code in the text to the reference: public names, such as `kp.train`, and commands, such as `kfacpack train`.

Options, such as `--task`, get a class of their own, so that they are not broken into two lines.
"""

from __future__ import annotations

import re
from typing import Any

from command_pages import FOLDER, command_pages
from mkdocs.utils import get_relative_url

import kfacpack

CODE = re.compile(r"<(a|pre|h[1-6])\b.*?</\1>|<code>(?:(?:kp|kfacpack)\.(\w+)[^<]*|kfacpack (\w+))</code>", re.DOTALL)
"""Code in text. Links, code blocks and headings are matched too, so that they can be left unchanged."""
OPTION = re.compile(r"<code>(--?[a-z][a-z-]*)</code>")
COMMANDS = {page.name for page in command_pages()}


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Adds the links and classes to a page."""

    def link(match: re.Match[str]) -> str:
        _, name, command = match.groups()
        if name in kfacpack.__all__:
            return f'<autoref identifier="kfacpack.{name}" optional>{match[0]}</autoref>'
        if command in COMMANDS and page.file.src_uri != f"{FOLDER}/{command}.md":
            return f'<a href="{get_relative_url(f"{FOLDER}/{command}.html", page.url)}">{match[0]}</a>'
        return match[0]

    return OPTION.sub(r'<code class="option">\1</code>', CODE.sub(link, content))
