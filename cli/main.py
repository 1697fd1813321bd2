"""What `--help` says of a command, where typer's own words would mislead.

The command `kfacpack`: its subcommands, and what an error or an interruption turns into.
"""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

import kfacpack
from kfacpack.format.hub_client import progress_bars

from . import add, compress, estimate, eval, experiments, export, hub, inspect, measure, merge, models, tasks, train
from .console import err, show_error


class PlainHelp:
    """A flag takes no value, so that none is named behind it."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in found:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return found


class PlainCommand(PlainHelp, TyperCommand):
    """Its usage has arguments as they are typed: their metavars, in brackets where they may be left out."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [each for each in self.get_params(ctx) if each.param_type_name == "argument"]
        named = [each.metavar if each.required else f"[{each.metavar}]" for each in arguments]
        return [self.options_metavar or "", *named]


class CommandGroup(PlainHelp, TyperGroup):
    """Exit codes: 0 done, 1 an honest failure, 2 bad input or usage, 130 interrupted."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except kfacpack.KfacpackError as error:
            show_error(str(error))
            raise typer.Exit(2) from error
        except OSError as error:
            show_error(f"could not write the output: {error.strerror or error}")
            raise typer.Exit(2) from error
        except KeyboardInterrupt as interruption:
            show_error("interrupted")
            raise typer.Exit(130) from interruption


app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"kfacpack {kfacpack.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_version, help="Print the version and exit."
    ),
) -> None:
    """Curvature as an artifact, for task arithmetic: estimate it, merge it, train under it, add vectors up, measure.

    Wherever a bundle or vector is read, hf://owner/repo/FILE is one on the Hub. To see what it is about: kfacpack demo.
    """


COMMANDS: dict[str, Callable[..., None]] = {
    "estimate": estimate.estimate,
    "inspect": inspect.inspect,
    "verify": inspect.verify,
    "compress": compress.compress,
    "merge": merge.merge,
    "import": export.import_,
    "export": export.export,
    "train": train.train,
    "add": add.add,
    "negate": add.negate,
    "eval": eval.evaluate,
    "measure": measure.measure,
    "run": experiments.run,
    "report": experiments.report,
    "push": hub.push,
    "pull": hub.pull,
    "search": hub.search,
    "demo": experiments.demo,
    "models": models.models,
    "tasks": tasks.tasks,
}


def _unwrap_help(text: str) -> str:
    """Paragraphs without the line breaks of the source, which fit no terminal."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _with_bars(command: Callable[..., None]) -> Callable[..., None]:
    """What is fetched from the Hub or sent there shows a bar, wherever other bars are shown."""

    @wraps(command)
    def called(**given: Any) -> None:
        with progress_bars(show=err.is_terminal and not (given.get("quiet") or given.get("as_json"))):
            command(**given)

    return called


for name, command in COMMANDS.items():
    app.command(name, cls=PlainCommand, help=_unwrap_help(command.__doc__ or ""))(_with_bars(command))


def run_app() -> None:
    # Who pipes into head has seen enough: end like any other program then, not with a failure of our own.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    # A terminal or pipe that cannot show Δ or ─ gets a question mark, not a crash.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app(prog_name="kfacpack")
