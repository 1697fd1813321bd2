"""The `kfacpack` command. Each module holds one command or a few related ones; all of them call the library."""

from __future__ import annotations


def run() -> None:
    """Entry point of the shell command. Imports nothing else before it handles Ctrl-C."""
    try:
        from .main import run_app

        run_app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
