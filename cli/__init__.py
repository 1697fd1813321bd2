"""The `kfacpack` command. One file a command; each is thin and calls the library."""

from __future__ import annotations


def run() -> None:
    """What the shell calls. Nothing else is imported yet, so that Ctrl-C is answered from the first moment."""
    try:
        from .main import run_app

        run_app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
