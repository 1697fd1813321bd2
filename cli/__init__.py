"""The `kfacpack` command. Each module holds one command or a few related ones; all of them call the library."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import TextIO


def run() -> None:
    """Entry point of the shell command. Imports nothing else before it handles Ctrl-C and SIGTERM."""
    try:
        # The default action of SIGTERM ends the process without removing temporary files, and with another exit code.
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        sys.stdout, sys.stderr = sys.stdout or _null_stream(), sys.stderr or _null_stream()
        _load_app()()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _null_stream() -> TextIO:
    """Returns a stream to the null device, in place of a closed stdout or stderr.

    It occupies the descriptor, which output files would otherwise reuse.
    """
    return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", closefd=False)


def _load_app() -> Callable[[], None]:
    """Imports the commands; exits with a message if a package that all of them need is too old."""
    from kfacpack._compat import require
    from kfacpack.errors import KfacpackError

    try:
        require("rich", "typer")
        from .main import run_app
    except KfacpackError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    return run_app
