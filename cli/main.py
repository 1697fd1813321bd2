"""The command-line app: subcommands, help panels and exit codes.

Exit codes: 0 for success, 1 if a check failed, 2 for invalid input or usage, 130 if interrupted.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Container
from functools import wraps
from itertools import pairwise
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

import kfacpack
from kfacpack.format.hub_client import progress_bars

from . import (
    add,
    bundles,
    estimate,
    eval,
    experiments,
    export,
    hub,
    inspect,
    measure,
    models,
    tasks,
    train,
    vectors,
)
from .console import err, show_error
from .options import IMPLIED_VALUES, PLAN_SUFFIXES


class PlainHelp:
    """Mixin that removes the metavars (placeholders for values) of flags from the help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the parameters of the command, after removing the metavars of flags."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class PlainCommand(PlainHelp, TyperCommand):
    """A command whose usage line lists the metavars of its arguments. Optional arguments are in brackets."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Returns the parts of the usage line."""
        arguments = [parameter for parameter in self.get_params(ctx) if parameter.param_type_name == "argument"]
        metavars = [argument.metavar if argument.required else f"[{argument.metavar}]" for argument in arguments]
        return [self.options_metavar or "", *metavars]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the command-line arguments. Options in `IMPLIED_VALUES` may be given without a value."""
        options = {name for parameter in self.get_params(ctx) for name in parameter.opts}
        rest: list[str] = super().parse_args(ctx, _with_implied_values(args, options))
        return rest


def _with_implied_values(args: list[str], options: Container[str]) -> list[str]:
    """Inserts the implied value after each option in `IMPLIED_VALUES` that is given without a value.

    An option has no value if the next argument is another option or a plan file, or if there is no next argument.
    """
    complete = []
    for argument, following in pairwise([*args, "-"]):
        complete.append(argument)
        if argument == "--":
            return complete + args[len(complete) :]
        has_value = not following.startswith("-") and not following.endswith(PLAN_SUFFIXES)
        if argument in IMPLIED_VALUES and argument in options and not has_value:
            complete.append(IMPLIED_VALUES[argument])
    return complete


WRITE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
"""Values of `errno` that indicate a failed write. They are checked only if an exception does not name a file."""


class CommandGroup(PlainHelp, TyperGroup):
    """The top-level command group. Converts errors to messages and exit codes."""

    def invoke(self, ctx: Any) -> Any:
        """Invokes a command. If the command fails, prints the error and exits with the code for this kind of error."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except kfacpack.KfacpackError as error:
            show_error(str(error))
            raise typer.Exit(2) from error
        except OSError as error:
            reason = error.strerror or str(error)
            if isinstance(error.filename, str | bytes):
                reason = f"{os.fsdecode(error.filename)}: could not be read or written: {reason}"
            elif error.errno in WRITE_ERRORS:
                reason = f"could not write the output: {reason}"
            show_error(reason)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as interruption:
            show_error("interrupted")
            raise typer.Exit(130) from interruption


app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"kfacpack {kfacpack.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_print_version, help="Show the version and exit."
    ),
) -> None:
    """Curvature for task arithmetic: estimate, share and merge curvature, and train task vectors with it.

    Bundles and task vectors are read from local paths or from hf://OWNER/REPO/FILE. To get started, run: kfacpack demo

    Exit codes: 0 for success, 1 if a check failed, 2 for invalid input or usage, 130 if interrupted.
    """


COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Curvature": {
        "estimate": estimate.estimate,
        "inspect": inspect.inspect,
        "verify": inspect.verify,
        "compress": bundles.compress,
        "merge": bundles.merge,
        "import": export.import_,
        "export": export.export,
    },
    "Task vectors": {
        "train": train.train,
        "extract": vectors.extract,
        "add": add.add,
        "negate": vectors.negate,
        "refine": vectors.refine,
        "eval": eval.evaluate,
        "measure": measure.measure,
    },
    "Experiments": {"run": experiments.run, "report": experiments.report, "demo": experiments.demo},
    "Hub": {"push": hub.push, "pull": hub.pull, "search": hub.search},
    "Lists": {"models": models.models, "tasks": tasks.tasks},
}
"""The function of each command, by help panel and command name."""


def _unwrap_help(text: str) -> str:
    """Joins the lines of each paragraph, because rich wraps the help to the width of the terminal."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _with_hub_bars(command: Callable[..., None]) -> Callable[..., None]:
    """Wraps a command so that it shows the progress bars of huggingface_hub.

    The bars are hidden if the command is called with --quiet or --json, or if stderr is not a terminal.
    """

    @wraps(command)
    def wrapped(**arguments: Any) -> None:
        with progress_bars(show=err.is_terminal and not (arguments.get("quiet") or arguments.get("as_json"))):
            command(**arguments)

    return wrapped


for panel, commands in COMMANDS.items():
    for name, command in commands.items():
        text = escape(_unwrap_help(command.__doc__ or ""))
        app.command(name, cls=PlainCommand, help=text, rich_help_panel=panel)(_with_hub_bars(command))


class _OutputDescriptor(io.FileIO):
    """An unbuffered stdout or stderr stream that ends the command if a write fails.

    The default action of SIGPIPE would also end the command when the reader of stdout closes the pipe. That action is
    not used, because it would also end the process without a message when a server or worker closes a connection.
    """

    def write(self, data: Any) -> int:
        """Writes bytes.

        Raises:
            SystemExit: If the write fails. If the reader has closed the pipe, as in `| head`, no error is printed, and
                the exit code is the one that shells report for SIGPIPE.
        """
        try:
            return super().write(data)
        except OSError as error:
            # Python flushes the stream again at exit, which must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if isinstance(error, BrokenPipeError):
                raise SystemExit(128 + signal.SIGPIPE) from None
            show_error(f"could not write the output: {error.strerror}")
            raise SystemExit(2) from None


def _wrap_stream(stream: Any) -> Any:
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    buffer = io.BufferedWriter(_OutputDescriptor(stream.fileno(), "w", closefd=False))
    # Characters that the output encoding cannot represent, such as Δ and ─, are replaced by question marks.
    return io.TextIOWrapper(buffer, stream.encoding, "replace", line_buffering=stream.line_buffering)


def run_app() -> None:
    """Runs the app with the command-line arguments of the process."""
    sys.stdout, sys.stderr = _wrap_stream(sys.stdout), _wrap_stream(sys.stderr)
    app(prog_name="kfacpack")
