"""What Ctrl-C means to long work."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from .console import show_note

AT_LEAST = 1.0
"""Seconds between two requests: launchers pass on to their processes what the terminal has told these already."""


@contextmanager
def stopping(kept: str) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C, or a polite request to end, lets the batch at hand finish; the second one does not wait.

    Work that has stopped ends the command. `kept`: what is said of it then.
    """
    from kfacpack.running.partial import Interrupted

    asked: list[float] = []

    def ask(number: int, frame: object) -> None:
        now = time.monotonic()
        if asked and now - asked[0] > AT_LEAST:
            raise KeyboardInterrupt
        if asked:
            return
        asked.append(now)
        show_note("stopping after this batch; press Ctrl-C again to stop at once")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    except Interrupted as interruption:
        show_note(f"interrupted; {kept}")
        raise typer.Exit(130) from interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
