"""What each step showed, as lines of JSON beside the vector."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TextIO

from kfacpack.errors import KfacpackError

_FEWEST_STEPS = 10
"""Shorter trainings are not checked: their losses are noise."""
_NOT_LEARNED = 0.95
"""A loss above this share of the first one has not fallen."""


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


class MetricsLog:
    def __init__(self, file: TextIO):
        self._file = file

    def add(self, metrics: Metrics) -> None:
        try:
            print(json.dumps(asdict(metrics)), file=self._file, flush=True)
        except OSError as error:
            raise KfacpackError(f"{self._file.name}: cannot be written: {error.strerror}") from error


class PenaltyWarning(UserWarning):
    """The penalty kept the task from being learned, or outweighed the loss from the first steps."""


def penalty_problem(steps: Sequence[Metrics], strength: float) -> str | None:
    """Checks whether the penalty was too strong for the task to be learned.

    Args:
        steps: Metrics of all steps, in order.
        strength: λ of the run.

    Returns:
        What was observed and the λ at which penalty and loss would have balanced in the first steps, or None.
    """
    if len(steps) < _FEWEST_STEPS:
        return None
    window = max(4, len(steps) // 8)
    # At the first step τ is zero, and so is the penalty.
    early = [each for each in steps[1 : 1 + window] if each.penalty is not None]
    penalty = fmean(each.penalty or 0.0 for each in early) if early else 0.0
    if penalty <= 0:
        return None
    loss = fmean(each.loss for each in early)
    balance = strength * loss / penalty
    first, last = steps[0].loss, fmean(each.loss for each in steps[-window:])
    if penalty > loss:
        remedy = f"They would balance at λ = {balance:.2g}"
        return f"the penalty outweighed the loss in the first steps: {penalty:.3g} against {loss:.3g}. {remedy}"
    if last > _NOT_LEARNED * first:
        cause = f"The penalty was the smaller one and would balance the loss at λ = {balance:.2g}, so that"
        remedy = f"{cause} another learning rate or more steps may help more than a smaller λ"
        return f"the loss ended where it began: {first:.3g} at the first step, {last:.3g} at the end. {remedy}"
    return None


class MetricsWarning(UserWarning):
    """Steps of a run that is taken up again are no longer in its file of metrics."""


def metrics_path(output: Path) -> Path:
    """FILE.metrics.jsonl for FILE.safetensors, and NAME-metrics.jsonl for any other name: no two vectors share one."""
    if output.suffix == ".safetensors":
        return output.with_name(f"{output.stem}.metrics.jsonl")
    return output.with_name(f"{output.name}-metrics.jsonl")


def require_metrics_path(output: Path) -> None:
    """Better told before the work."""
    if output.is_dir():
        raise KfacpackError(f"{output}: is a folder; give the path of a file to write the vector to")
    path = metrics_path(output)
    if path.is_dir():
        problem = "is a folder, and the metrics of each step are to be written there"
        raise KfacpackError(f"{path}: {problem}. Move it, or write the vector to another file")


def read_metrics(path: Path) -> list[Metrics]:
    """Returns the steps recorded in a metrics file; a missing or damaged file gives those before the damage."""
    steps: list[Metrics] = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            steps.append(Metrics(**json.loads(line)))
    except (OSError, ValueError, TypeError):
        pass
    return steps


@contextmanager
def open_metrics_log(path: Path, done: int) -> Iterator[MetricsLog]:
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
        yield MetricsLog(file)
