"""Libraries that announce what they do on stderr. Here the library prints nothing, and the commands draw."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """No log records up to errors. What matters in them (keys left random, say) the caller has to check and raise."""
    root, before = logging.getLogger(), logging.root.manager.disable
    # logging.warning() gives a root logger without handlers one that prints, for good, even while it is disabled.
    silence = logging.NullHandler()
    root.addHandler(silence)
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
        root.removeHandler(silence)
