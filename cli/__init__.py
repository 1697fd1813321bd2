"""The `kfacpack` command. Each module implements one command, or a few related ones, by calling the library."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import TextIO


def run() -> None:
    """Runs the `kfacpack` command. Ctrl-C and SIGTERM end it with exit code 130, even during the imports."""
    try:
        # By default, SIGTERM ends the process without removing temporary files, and the exit code is not 130.
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        sys.stdout, sys.stderr = sys.stdout or _null_stream(), sys.stderr or _null_stream()
        _load_app()()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _null_stream() -> TextIO:
    """Returns a stream that writes to the null device, as a replacement for a closed stdout or stderr.

    The new stream takes the file descriptor of the closed one. Otherwise, the next file to be opened would get this
    descriptor, and output for stdout or stderr would be written to that file.
    """
    return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", closefd=False)


def _load_app() -> Callable[[], None]:
    """Imports the commands and returns `run_app`. Exits with a message if typer or rich is missing or too old."""
    from kfacpack._compat import require
    from kfacpack.errors import KfacpackError

    try:
        require("rich", "typer")
        from .main import run_app
    except KfacpackError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    return run_app
