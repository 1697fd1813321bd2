"""What Ctrl-C means to long work."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .console import show_note


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C, or a polite request to end, lets the batch at hand finish; the second one does not wait."""
    asked: list[int] = []

    def ask(number: int, frame: object) -> None:
        asked.append(number)
        if len(asked) > 1:
            raise KeyboardInterrupt
        show_note("stopping after this batch; press Ctrl-C again to stop at once")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
