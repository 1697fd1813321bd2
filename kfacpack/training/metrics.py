"""What each step showed, as lines of JSON beside the vector."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO


@dataclass(frozen=True)
class Metrics:
    step: int
    """From 1: how many steps are done."""
    loss: float
    """Mean cross-entropy of the step's batch."""
    accuracy: float
    """Of the step's batch, before the step."""
    penalty: float | None
    """λ included; None where there is none at this step."""
    lr: float


class Log:
    def __init__(self, file: TextIO):
        self._file = file

    def add(self, metrics: Metrics) -> None:
        print(json.dumps(asdict(metrics)), file=self._file, flush=True)


def metrics_path(output: Path) -> Path:
    return output.with_suffix(".metrics.jsonl")


@contextmanager
def opened(path: Path, done: int) -> Iterator[Log]:
    """To go on writing after `done` steps. What an interrupted run wrote of later ones is dropped."""
    kept = []
    if done and path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                if json.loads(line)["step"] <= done:
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                break  # it was cut off in the middle of a line
    path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    with path.open("a", encoding="utf-8") as file:
        yield Log(file)
