"""Stages of a run. Each stage computes one file, usually from the files of other stages.

The key of a stage is a hash of everything that determines the content of its file: its kind, its settings, the keys of
its inputs, the model, the data, the versions of kfacpack and torch, the kind of device and, on a CPU, the number of
threads. The key is part of the file name. An existing file is therefore up to date, and different settings lead to a
different name.

This module also contains functions that build the `kfacpack` command line equivalent to a stage. The command line is to
be run in the folder of the run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kfacpack.errors import BundleError, KfacpackError
from kfacpack.estimation.resume import Interrupted
from kfacpack.format.reader import Bundle
from kfacpack.format.reference import expand_user
from kfacpack.format.writer import write_atomically
from kfacpack.tasks.data_sources import is_dataset_address
from kfacpack.vectors.storage import VectorFile

if TYPE_CHECKING:
    from kfacpack.experiments.plan import Plan
    from kfacpack.experiments.run import RunContext


class QuotedWord(str):
    """A word of a command line that is already quoted for the shell and may contain variables."""

    __slots__ = ()


def command(*words: object) -> str:
    """Joins words into a `kfacpack` command line, quoting each word for the shell unless it is a `QuotedWord`."""
    quoted = (word if isinstance(word, QuotedWord) else shlex.quote(str(word)) for word in words)
    return " ".join(["kfacpack", *quoted])


def optional(flag: str, value: object, default: object = None) -> tuple[object, ...]:
    """Returns a command-line flag and its value, or an empty tuple if the value is the default."""
    return () if value == default else (flag, value)


def model_options(plan: Plan, root: Path) -> tuple[object, ...]:
    """Returns the command-line options for the model of a plan; `root` is the folder of the run."""
    model = plan.model
    prefix, _, folder = model.name.partition(":")
    name = command_path(plan, folder, root, f"{prefix}:") if plan.model_folder() else model.name
    weights = command_path(plan, model.weights, root) if model.weights not in (None, "random") else model.weights
    return (
        *("--model", name),
        *optional("--weights", weights),
        *optional("--image-size", model.image_size),
        *optional("--prompts", model.prompts),
        *optional("--dtype", model.dtype, default="float32"),
    )


def params_setting(plan: Plan) -> dict[str, Any]:
    """Returns the parameter patterns of the plan as the setting `params` of a stage.

    Returns an empty dictionary if the plan has no parameter patterns.
    """
    return {"params": list(plan.model.params)} if plan.model.params else {}


def params_options(plan: Plan) -> tuple[str, ...]:
    """Returns the words of a command line with one option `--params` for each parameter pattern of the plan."""
    return tuple(word for pattern in plan.model.params or () for word in ("--params", pattern))


def task_options(plan: Plan, name: str, root: Path) -> tuple[object, ...]:
    """Returns the command-line options for the task `name`; `root` is the folder of the run."""
    task = plan.task(name)
    data = command_path(plan, task.data, root) if task.data else None
    return ("--task", name, *optional("--data", data), *optional("--columns", task.columns))


def task_data_option(plan: Plan, name: str, root: Path) -> str:
    """Returns the value of `--reg-data` for a task: `TASK`, or `TASK=DIR` if the plan gives the data of the task."""
    data = plan.task(name).data
    return command_path(plan, data, root, f"{name}=") if data else name


def command_path(plan: Plan, path: str, root: Path, prefix: str = "") -> str:
    """Converts a path in the plan to a path for a command line.

    Args:
        plan: The plan, which defines the base folder of relative paths.
        path: The path as written in the plan.
        root: Folder of the run, in which the command is executed.
        prefix: Text to put before the path in the same word.

    Returns:
        The converted path. Relative paths become relative to `root`. Absolute paths and dataset addresses are kept as
        written. An absolute path with variables or `~` is returned as a `QuotedWord`.
    """
    if is_dataset_address(path):
        return prefix + path
    expanded = expand_user(os.path.expandvars(path))
    if not expanded.is_absolute():
        # Resolve links: the shell and the operating system resolve the parent of a link differently.
        return prefix + os.path.relpath(plan.resolve_path(path).resolve(), root.resolve())
    if "$" not in path and not path.startswith("~"):
        return prefix + path
    text = re.sub(r"^~(?=/|$)", "$HOME", path)
    text = str(expanded) if text.startswith("~") else text
    # Inside double quotes, \, ", ` and $ are special. All of them are escaped, except a $ that starts a variable.
    escaped = re.sub(r'([\\"`]|\$(?![\w{]))', r"\\\1", prefix + text)
    return QuotedWord(f'"{escaped}"')


_MAX_NAME_BYTES = 160
"""Maximum length in bytes of the stage name in a file name. File systems allow 255 bytes for the whole file name."""


@dataclass
class StageProgress:
    """Callbacks of a running stage: `progress` receives the progress, and `stopped` returns whether to stop."""

    progress: Callable[[int, int, str], None] = lambda done, total, status: None
    stopped: Callable[[], bool] = lambda: False

    def report(self, done: int, total: int) -> None:
        """Reports that `done` of `total` units are finished."""
        self.progress(done, total, "")

    def interruptible(self) -> StageProgress:
        """Returns callbacks for work that saves no state: `progress` raises `Interrupted` if a stop is requested."""

        def progress(done: int, total: int, status: str) -> None:
            self.progress(done, total, status)
            if self.stopped():
                raise Interrupted

        return replace(self, progress=progress)


@dataclass(frozen=True, eq=False)
class Stage(ABC):
    """A unit of work in a run, which writes one output file."""

    kind: ClassVar[str]
    """Name of the kind of stage, and of the folder for its files."""
    suffix: ClassVar[str] = ".json"
    purpose: ClassVar[str]
    """Short description of the files that this kind of stage writes."""

    context: RunContext
    root: Path

    @property
    @abstractmethod
    def name(self) -> str:
        """Readable name, unique among the stages of this kind."""

    @property
    def inputs(self) -> tuple[Stage, ...]:
        """Stages whose files this stage reads."""
        return ()

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Returns all settings that determine the output, except for the model, the inputs and the versions."""

    @abstractmethod
    def make(self, monitor: StageProgress) -> None:
        """Computes the output and writes it to `path` atomically."""

    @abstractmethod
    def cost(self) -> float:
        """Returns the approximate cost of the stage, measured in forward passes on one example."""

    def command(self) -> str | None:
        """Returns the command line that writes the same file in the folder of the run, or None if no command does."""
        return None

    @cached_property
    def key(self) -> str:
        """Hash of everything that determines the output."""
        content = {
            "kind": self.kind,
            "settings": self.settings(),
            "inputs": [stage.key for stage in self.inputs],
            "model": self.context.model_key,
            "version": version("kfacpack"),
            "environment": self.context.environment,
        }
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def path(self) -> Path:
        """Path of the output file of this stage.

        If a file with the key of this stage exists, returns the path of this file, even if the readable part of its
        name differs. Otherwise, returns the path to which the file will be written.
        """
        end = f"{self.key[:12]}{self.suffix}"
        # The name may be truncated, because the key alone identifies the file.
        name = self.name.replace("/", "-").replace(" ", "-").encode()[:_MAX_NAME_BYTES].decode(errors="ignore")
        path = self.root / self.kind / f"{name}.{end}"
        if path.exists():
            return path
        return next(iter(sorted(path.parent.glob(f"[!.]*.{end}"))), path)

    @property
    def file(self) -> str:
        """Path of the output file, relative to the folder of the run."""
        return str(self.path.relative_to(self.root))

    @property
    def done(self) -> bool:
        """Whether the output file exists and is intact."""
        return self.path.exists() and self.intact()

    @abstractmethod
    def intact(self) -> bool:
        """Returns whether the output file is complete. The values of tensors are not checked."""


@dataclass(frozen=True, eq=False)
class MeasurementStage(Stage):
    """Base class for stages whose output is a JSON file with measured values."""

    @abstractmethod
    def measure(self, monitor: StageProgress) -> Mapping[str, Any]:
        """Performs the measurement and returns the values to write."""

    def make(self, monitor: StageProgress) -> None:
        """Performs the measurement and writes the values together with their hash."""
        values = self.measure(monitor.interruptible())
        write_atomically(self.path, json.dumps({"sha256": _digest(values), "values": values}, indent=1).encode())

    def read(self) -> dict[str, Any]:
        """Reads the measured values.

        Raises:
            KfacpackError: If the file is missing or has been changed since it was written.
        """
        if (values := self._read_intact()) is None:
            problem = f"{self.path}: the file is missing, or does not match its SHA-256"
            raise KfacpackError(f"{problem}. Delete the file if it exists, and run the plan again")
        return values

    def intact(self) -> bool:
        """Returns whether the file matches its hash."""
        return self._read_intact() is not None

    def _read_intact(self) -> dict[str, Any] | None:
        try:
            content = json.loads(self.path.read_bytes())
            values: dict[str, Any] = content["values"]
            return values if content["sha256"] == _digest(values) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _digest(values: Mapping[str, Any]) -> str:
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class SealedStage(Stage):
    """Base class for stages whose output is a bundle or a task vector."""

    opens: ClassVar[type[Bundle] | type[VectorFile]]
    """Class that opens the file; its constructor raises `BundleError` if the header or the file size is wrong."""

    def intact(self) -> bool:
        """Returns whether the header is valid and the file is complete; the tensors are checked when they are read."""
        try:
            self.opens(self.path)
        except BundleError:
            return False
        return True


@dataclass(frozen=True, eq=False)
class BundleStage(SealedStage):
    """Base class for stages whose output is a bundle."""

    suffix: ClassVar[str] = ".kfac"
    opens = Bundle


@dataclass(frozen=True, eq=False)
class VectorStage(SealedStage):
    """Base class for stages whose output is a task vector."""

    suffix: ClassVar[str] = ".safetensors"
    opens = VectorFile
