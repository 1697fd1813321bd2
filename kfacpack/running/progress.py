"""How far long work is, for whoever wants to hear."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

OnProgress: TypeAlias = Callable[[int, int], None]
"""Hears how much is done, and how much there is."""


class Count:
    """Several pieces of work, heard of as one."""

    def __init__(self, total: int, on_progress: OnProgress):
        self._done, self._total, self._on_progress = 0, total, on_progress
        on_progress(0, total)

    def add(self, more: int) -> None:
        self._done += more
        self._on_progress(self._done, self._total)

    def piece(self) -> OnProgress:
        """What a piece that counts by itself is to tell."""
        before = self._done
        return lambda done, total: self.add(before + done - self._done)
