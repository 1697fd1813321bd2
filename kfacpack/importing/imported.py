"""What every import is asked, and what it says afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kfacpack.bundle.manifest import Fisher

if TYPE_CHECKING:
    from kfacpack.models import Model

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Imported:
    """What was made of which files, and what was not."""

    path: Path
    task: str
    files: tuple[str, ...]
    """Those that were read."""
    blocks: int
    parameters: int
    examples: int
    positions: int
    """R, of the layers that see every token."""
    weights_compared: bool
    """Whether the factors themselves showed that they were computed at the model's weights."""
    left_out: tuple[tuple[str, str], ...]
    """(what was not imported, why)."""


class Importer(Protocol):
    def __call__(
        self,
        source: str | Path,
        model: Model,
        output: Path,
        *,
        task: str | None = None,
        files: str | None = None,
        fisher: Fisher = "mc",
        samples: int | None = None,
        params: Sequence[str] | None = None,
        dataset_size: int | None = None,
        progress: Progress = lambda done, total: None,
    ) -> Imported: ...
