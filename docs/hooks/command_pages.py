"""Writes one page per command from the typer app: usage, description, and the options by panel with their defaults."""

from __future__ import annotations

import inspect
import re
import typing
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from generated_pages import add_pages
from kfacpack_cli.main import app
from typer.models import ArgumentInfo, OptionInfo

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

FOLDER = "reference/cli"
INDEX = f"{FOLDER}/index.md"
ARGUMENTS = "Arguments"
"""Panel of the positional arguments, as in typer's help."""
STATED_DEFAULT = re.compile(r"\s*\[default: ([^\]]*)\]")
"""A default that a help text describes in words."""


@dataclass(frozen=True)
class ParameterPage:
    """An option or argument of a command, as text."""

    names: tuple[str, ...]
    """Flags, such as `--output` and `-o`; the metavar for an argument."""
    value: str
    """Metavar of the option's value; empty for flags and arguments."""
    panel: str
    help: str
    default: str | None
    required: bool
    repeatable: bool
    minimum: float | None

    @property
    def is_option(self) -> bool:
        """Whether this is an option, not a positional argument."""
        return self.panel != ARGUMENTS

    def markdown(self) -> str:
        """Returns an entry of a definition list."""
        flags = ", ".join(f"`{name}`" for name in self.names)
        value = f" `{self.value}`" if self.value else ""
        anchor = f'<a id="{self.names[0].split("/")[0].lstrip("-")}"></a>' if self.is_option else ""
        facts = [
            *(["Required."] if self.required and self.is_option else []),
            *([f"At least {self.minimum:g}."] if self.minimum is not None else []),
            *(["Repeatable."] if self.repeatable and self.is_option and "repeatable" not in self.help else []),
            *([f"Default: {self.default}."] if self.default is not None else []),
        ]
        details = f"\n    <small>{' '.join(facts)}</small>" if facts else ""
        return f"{anchor}{flags}{value}\n:   {literal(self.help)}{details}\n"


@dataclass(frozen=True)
class CommandPage:
    """A command of the app."""

    name: str
    panel: str
    help: str
    parameters: tuple[ParameterPage, ...]

    @property
    def summary(self) -> str:
        """First sentence of the help."""
        return re.split(r"(?<=\.)\s", self.help, maxsplit=1)[0]

    @property
    def description(self) -> str:
        """The help; a paragraph that is a command becomes a code block."""
        paragraphs = self.help.split("\n\n")
        return "\n\n".join(
            f"```text\n{text}\n```" if text.startswith("kfacpack ") else literal(text) for text in paragraphs
        )

    def markdown(self, links: str = "") -> str:
        """Returns the page.

        Args:
            links: Markdown that is added below the description.
        """
        arguments = [
            parameter.names[0] if parameter.required else f"[{parameter.names[0]}]"
            for parameter in self.parameters
            if not parameter.is_option
        ]
        usage = " ".join(["kfacpack", self.name, "[OPTIONS]", *arguments])
        parts = [f"# kfacpack {self.name}", f"```text\n{usage}\n```", self.description]
        if links:
            parts.append(links)
        panels: dict[str, list[ParameterPage]] = defaultdict(list)
        for parameter in sorted(self.parameters, key=lambda parameter: parameter.is_option):
            panels[parameter.panel].append(parameter)
        for panel, parameters in panels.items():
            parts += [f"## {panel}", *(parameter.markdown() for parameter in parameters)]
        return "\n\n".join(parts) + "\n"


def literal(text: str) -> str:
    """Returns text in which options are code and characters that Markdown would interpret are escaped."""
    pieces = re.split(r"(`[^`]*`)", text.replace("\\[", "["))
    return "".join(piece if piece.startswith("`") else _literal(piece) for piece in pieces)


def _literal(text: str) -> str:
    text = re.sub(r"([*_<>\[\]|])", r"\\\1", text)
    return re.sub(r"(?<![\w-])(--[a-z][a-z-]*[a-z])", r"`\1`", text)


def _values(annotation: Any) -> tuple[Any, ...]:
    """Returns the alternatives of a type without None: (str,) for `str | None`."""
    alternatives = typing.get_args(annotation) if typing.get_origin(annotation) not in (list, None) else ()
    if typing.get_origin(annotation) is typing.Literal:
        return (annotation,)
    return tuple(value for value in alternatives if value is not NoneType) or (annotation,)


def _choices(annotation: Any) -> tuple[str, ...]:
    return tuple(
        str(choice)
        for value in _values(annotation)
        if typing.get_origin(value) is typing.Literal
        for choice in typing.get_args(value)
    )


def parameter_page(name: str, annotation: Any, info: OptionInfo | ArgumentInfo) -> ParameterPage:
    """Describes a parameter of a command.

    Args:
        name: Name of the Python parameter.
        annotation: Its type.
        info: Its declaration.
    """
    is_option = isinstance(info, OptionInfo)
    text = (info.help or "").replace("\\[", "[")
    stated = STATED_DEFAULT.search(text)
    is_flag = annotation is bool or bool in _values(annotation)
    empty = info.default in (None, ..., []) or (is_flag and info.default is False)
    default = literal(stated[1]) if stated else None if empty or not info.show_default else f"`{info.default}`"
    choices = _choices(annotation)
    metavar = info.metavar or ("" if is_flag else name.upper())
    flags = tuple(info.param_decls or (f"--{name.replace('_', '-')}",)) if is_option else (metavar,)
    return ParameterPage(
        names=flags,
        value="" if not is_option or is_flag else (info.metavar or ("|".join(choices) or name.upper())),
        panel=(info.rich_help_panel or "Options") if is_option else ARGUMENTS,
        help=STATED_DEFAULT.sub("", text),
        default=default,
        required=info.default is ...,
        repeatable=any(typing.get_origin(value) is list for value in _values(annotation)),
        minimum=info.min,
    )


def command_pages() -> Iterator[CommandPage]:
    """Yields the commands of the app in the order of its help."""
    for command in app.registered_commands:
        callback = command.callback
        assert callback is not None
        annotations = typing.get_type_hints(callback)
        parameters = inspect.signature(callback).parameters.values()
        yield CommandPage(
            name=command.name or callback.__name__,
            panel=str(command.rich_help_panel),
            help=(command.help or "").replace("\\[", "["),
            parameters=tuple(
                parameter_page(parameter.name, annotations[parameter.name], parameter.default)
                for parameter in parameters
            ),
        )


def command_table() -> str:
    """Returns the list of all commands by panel, for the index page."""
    lines, panel = [], ""
    for page in command_pages():
        if page.panel != panel:
            panel = page.panel
            lines.append(f"\n## {panel}\n")
        lines.append(f"[`kfacpack {page.name}`]({page.name}.md)\n:   {literal(page.summary)}\n")
    return "\n".join(lines)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages."""
    with_json = Path(config.docs_dir, "reference", "json", "index.md").exists()
    pages = {}
    for page in command_pages():
        has_json = with_json and any("--json" in parameter.names for parameter in page.parameters)
        links = f"The output of `--json` is described in [JSON output](../json/{page.name}.md)." if has_json else ""
        pages[page.name] = page.markdown(links)
    return add_pages(files, config, FOLDER, pages)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Writes the list of commands into the index page."""
    return markdown.replace("<!-- commands -->", command_table()) if page.file.src_uri == INDEX else markdown
