"""What each step showed, as lines of JSON beside the vector."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from kfacpack.errors import KfacpackError


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
        try:
            print(json.dumps(asdict(metrics)), file=self._file, flush=True)
        except OSError as error:
            raise KfacpackError(f"{self._file.name}: cannot be written: {error.strerror}") from error


class MetricsWarning(UserWarning):
    """Steps of a run that is taken up again are no longer in its file of metrics."""


def metrics_path(output: Path) -> Path:
    """FILE.metrics.jsonl for FILE.safetensors, and NAME-metrics.jsonl for any other name: no two vectors share one."""
    if output.suffix == ".safetensors":
        return output.with_name(f"{output.stem}.metrics.jsonl")
    return output.with_name(f"{output.name}-metrics.jsonl")


def require_metrics_place(output: Path) -> None:
    """Better told before the work."""
    if output.is_dir():
        raise KfacpackError(f"{output}: is a folder; give the path of a file to write the vector to")
    path = metrics_path(output)
    if path.is_dir():
        problem = "is a folder, and the metrics of each step are to be written there"
        raise KfacpackError(f"{path}: {problem}. Move it, or write the vector to another file")


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
    if len(kept) != done:
        found = f"{len(kept)} of {done} steps that are done are in it" if kept else "is not there any more, or empty"
        warnings.warn(f"{path}: {found}; it goes on from step {done + 1}", MetricsWarning, stacklevel=4)
    try:
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise KfacpackError(f"{path}: cannot be written: {error.strerror}") from error
    with file:
        yield Log(file)
