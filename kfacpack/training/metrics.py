"""Metrics of each training step: a JSON Lines file beside the vector, and a check that the penalty is not too strong.

The check compares the penalty with the loss in the first steps, and the loss at the end with the loss in the first
steps.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import RawIOBase
from pathlib import Path
from statistics import fmean

from kfacpack.errors import KfacpackError
from kfacpack.format.writer import write_atomically

_MIN_STEPS = 10
"""Runs with fewer steps are not checked, because their losses are too noisy."""
_LEARNED = 0.3
"""A task whose loss is below this value counts as learned, whether by the base model or by the vector."""
_NOT_LEARNED = 0.95
"""If the final loss is above this fraction of the first loss, the loss is considered not to have decreased."""

_LOWEST_PENALTY = -0.01
"""A penalty below this value, in the units of the loss, is not a rounding error."""


@dataclass(frozen=True)
class Metrics:
    """Metrics of one training step."""

    step: int
    """Number of the step, counted from 1."""
    loss: float
    """Mean cross-entropy of the step's batch."""
    accuracy: float
    """Accuracy on the step's batch, before the update."""
    penalty: float | None
    """Value of the penalty, including λ; None if no penalty applies to the step."""
    lr: float
    """Learning rate of the step."""


class MetricsLog:
    """A log that appends metrics to an open JSON Lines file."""

    def __init__(self, file: RawIOBase, path: Path):
        self._file, self._path = file, path

    def add(self, metrics: Metrics) -> None:
        """Writes the metrics of one step.

        Raises:
            KfacpackError: If the file cannot be written.
        """
        try:
            self._file.write(f"{json.dumps(asdict(metrics))}\n".encode())
        except OSError as error:
            raise _write_error(self._path, error) from error


class PenaltyWarning(UserWarning):
    """Issued if the penalty may have prevented learning: it exceeded the loss, or the loss did not decrease."""


def check_not_negative(step: int, penalty: float) -> None:
    """Checks that a penalty is not negative, apart from rounding errors.

    Factors that were compressed with a codec that rounds or removes single entries may have negative eigenvalues. The
    penalty then has no minimum, and training would move τ along the eigenvectors of negative eigenvalues.

    Args:
        step: Index of the step, from 0.
        penalty: Value of the penalty, including λ.

    Raises:
        KfacpackError: If the penalty is negative.
    """
    if penalty < _LOWEST_PENALTY:
        cause = "the factors have negative eigenvalues, as they can after the codecs int8, prune, fp16 and bf16"
        remedy = "Use uncompressed bundles, or the codec svd:R, alone or followed by one of these"
        raise KfacpackError(f"step {step + 1}: the penalty is negative ({penalty:.3g}): {cause}. {remedy}")


def penalty_problem(steps: Sequence[Metrics], strength: float) -> str | None:
    """Checks whether the penalty was too strong for the task to be learned.

    Args:
        steps: Metrics of all steps, in order.
        strength: λ of the run.

    Returns:
        A description of the problem, with the λ at which the penalty and the loss would have been equal in the first
        steps, or None if there is no problem.
    """
    if len(steps) < _MIN_STEPS:
        return None
    window = max(4, len(steps) // 8)
    # At the first step, τ is zero, and so is the penalty.
    early = [metrics for metrics in steps[1 : 1 + window] if metrics.penalty is not None]
    penalty = fmean(metrics.penalty or 0.0 for metrics in early) if early else 0.0
    if penalty <= 0:
        return None
    loss = fmean(metrics.loss for metrics in early)
    balance = strength * loss / penalty
    # The loss of the first batch alone is noisy.
    first, last = max(steps[0].loss, loss), fmean(metrics.loss for metrics in steps[-window:])
    if penalty > loss:
        remedy = f"Use a smaller λ; at λ = {balance:.2g}, the penalty and the loss would have been equal"
        return f"in the first steps, the penalty ({penalty:.3g}) was larger than the loss ({loss:.3g}). {remedy}"
    if last > max(_NOT_LEARNED * first, _LEARNED):
        cause = f"The penalty was smaller than the loss; they would have been equal at λ = {balance:.2g}"
        remedy = f"{cause}. A different learning rate or more steps may therefore help more than a smaller λ"
        return f"the loss did not decrease noticeably: {first:.3g} in the first steps, {last:.3g} at the end. {remedy}"
    return None


class MetricsWarning(UserWarning):
    """Issued if the metrics file of a resumed run does not contain the metrics of all completed steps."""


def metrics_path(output: Path) -> Path:
    """Returns the path of the metrics file for a vector file.

    The metrics for FILE.safetensors are in FILE.metrics.jsonl. The metrics for a file with any other name NAME are in
    NAME-metrics.jsonl. Two vectors therefore never share a metrics file.
    """
    if output.suffix == ".safetensors":
        return output.with_name(f"{output.stem}.metrics.jsonl")
    return output.with_name(f"{output.name}-metrics.jsonl")


def require_metrics_path(output: Path) -> None:
    """Checks that a vector and its metrics can be written to `output`, before any work is done.

    Raises:
        KfacpackError: If `output` or its metrics file is a folder.
    """
    if output.is_dir():
        raise KfacpackError(f"{output}: is a folder; expected the path of a file for the vector")
    path = metrics_path(output)
    if path.is_dir():
        problem = "is a folder, but the metrics of each step are written to a file with this name"
        raise KfacpackError(f"{path}: {problem}. Move the folder, or write the vector to another file")


def read_metrics(path: Path) -> list[Metrics]:
    """Returns the metrics in a file up to the first damaged line, or an empty list if the file cannot be read."""
    steps: list[Metrics] = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            steps.append(Metrics(**json.loads(line)))
    except (OSError, ValueError, TypeError):
        pass
    return steps


@contextmanager
def open_metrics_log(path: Path, done: int) -> Iterator[MetricsLog]:
    """Opens a metrics file to continue after `done` steps. Metrics of later steps are removed from the file.

    Args:
        path: The metrics file. It is created if it does not exist.
        done: Number of completed steps.

    Yields:
        The log, to which the metrics of further steps can be added.

    Raises:
        KfacpackError: If the file cannot be written.
    """
    kept = []
    if done and path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                if json.loads(line)["step"] <= done:
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                break  # the process died while it wrote this line
    if len(kept) != done:
        some = f"contains metrics of only {len(kept)} of {done} completed steps"
        problem = some if kept else "is missing or contains no metrics"
        warnings.warn(f"{path}: {problem}; continuing from step {done + 1}", MetricsWarning, stacklevel=4)
    # Replace the file, so that another run with the same output does not append to it.
    write_atomically(path, "".join(f"{line}\n" for line in kept).encode())
    try:
        file = path.open("ab", buffering=0)  # a buffered file would repeat a failed write on close
    except OSError as error:
        raise _write_error(path, error) from error
    with file:
        yield MetricsLog(file, path)


def _write_error(path: Path, error: OSError) -> KfacpackError:
    return KfacpackError(f"{path}: cannot be written: {error.strerror}")
