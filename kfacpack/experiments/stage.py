"""Stages as a person would type them, in the folder of the run: that is where every path in them is meant from.

What a stage is: one file, made from others, called by what decides its content.

A stage's key is the hash of its kind, its settings, the keys of its inputs, the model, the data, the versions of
kfacpack and torch and the kind of device. It is part of the file's name, so a file that is there need not be made
again, and one that was made otherwise has another name.
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
    """A word as the shell is to read it: quoted already, with variables in it."""

    __slots__ = ()


def command(*words: object) -> str:
    typed = ["kfacpack", *(word if isinstance(word, QuotedWord) else shlex.quote(str(word)) for word in words)]
    return " ".join(typed)


def model_options(plan: Plan, root: Path) -> tuple[object, ...]:
    said = plan.model
    prefix, _, folder = said.name.partition(":")
    name = command_path(plan, folder, root, f"{prefix}:") if plan.model_folder() else said.name
    weights = command_path(plan, said.weights, root) if said.weights not in (None, "random") else said.weights
    return (
        *("--model", name),
        *(("--weights", weights) if weights else ()),
        *(("--image-size", said.image_size) if said.image_size else ()),
        *(("--prompts", said.prompts) if said.prompts else ()),
        *(("--dtype", said.dtype) if said.dtype != "float32" else ()),
    )


def task_options(plan: Plan, name: str, root: Path) -> tuple[object, ...]:
    said = plan.task(name)
    data = ("--data", command_path(plan, said.data, root)) if said.data else ()
    return ("--task", name, *data, *(("--columns", said.columns) if said.columns else ()))


def task_data_option(plan: Plan, name: str, root: Path) -> str:
    """TASK, or TASK=DIR."""
    data = plan.task(name).data
    return command_path(plan, data, root, f"{name}=") if data else name


def command_path(plan: Plan, said: str, root: Path, before: str = "") -> str:
    """A path of the plan, from the run's folder; one that is absolute stays as it is written, variables and all."""
    if is_dataset_address(said):
        return before + said
    full = expand_user(os.path.expandvars(said))
    if not full.is_absolute():
        # Through no links: the shell and the system disagree on what is above one.
        return before + os.path.relpath(plan.place(said).resolve(), root.resolve())
    if "$" not in said and not said.startswith("~"):
        return before + said
    text = re.sub(r"^~(?=/|$)", "$HOME", said)
    text = str(full) if text.startswith("~") else text
    # In double quotes, a dollar that begins no name, and these three, would mean something else.
    escaped = re.sub(r'([\\"`]|\$(?![\w{]))', r"\\\1", before + text)
    return QuotedWord(f'"{escaped}"')


_LONGEST = 160
"""Bytes of a stage's name in that of its file. File systems take 255, and a key and endings follow."""


@dataclass
class StageProgress:
    """Who is told how far a stage is, and asked whether it should stop."""

    progress: Callable[[int, int, str], None] = lambda done, total, words: None
    stopped: Callable[[], bool] = lambda: False

    def counted(self, done: int, total: int) -> None:
        self.progress(done, total, "")

    def of_one_piece(self) -> StageProgress:
        """For work that stores nothing on the way: asked to stop, it ends where it is."""

        def progress(done: int, total: int, words: str) -> None:
            self.progress(done, total, words)
            if self.stopped():
                raise Interrupted

        return replace(self, progress=progress)


@dataclass(frozen=True, eq=False)
class Stage(ABC):
    kind: ClassVar[str]
    """The folder that its files are in."""
    suffix: ClassVar[str] = ".json"
    why: ClassVar[str]
    """What stages of this kind are for, in one short line."""

    shop: RunContext
    root: Path

    @property
    @abstractmethod
    def name(self) -> str:
        """Among those of its kind, for people."""

    @property
    def inputs(self) -> tuple[Stage, ...]:
        return ()

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """All that decides what is made, besides model, inputs and version."""

    @abstractmethod
    def make(self, watch: StageProgress) -> None:
        """Write `path`, whole or not at all."""

    @abstractmethod
    def cost(self) -> float:
        """Roughly, how many examples' forward passes it takes."""

    def command(self) -> str | None:
        """What a person would type in the run's folder for the same file; None where there is no such command."""
        return None

    @cached_property
    def key(self) -> str:
        said = {
            "kind": self.kind,
            "settings": self.settings(),
            "inputs": [each.key for each in self.inputs],
            "model": self.shop.model_key,
            "version": version("kfacpack"),
            "environment": self.shop.environment,
        }
        return sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()

    @property
    def path(self) -> Path:
        """The file of this key that is there, whatever it is called; else the one that will be."""
        end = f"{self.key[:12]}{self.suffix}"
        # What is longer than a file's name may be is known by its key all the same.
        name = self.name.replace("/", "-").replace(" ", "-").encode()[:_LONGEST].decode(errors="ignore")
        place = self.root / self.kind / f"{name}.{end}"
        if place.exists():
            return place
        return next(iter(sorted(place.parent.glob(f"[!.]*.{end}"))), place)

    @property
    def done(self) -> bool:
        """Whether its file is there, and is one that was written whole; else it is made, again."""
        return self.path.exists() and self.intact()

    @abstractmethod
    def intact(self) -> bool:
        """Of tensors the header alone is looked at, which seals them: each is checked when it is used."""


@dataclass(frozen=True, eq=False)
class MeasurementStage(Stage):
    """A stage whose file is JSON."""

    @abstractmethod
    def measure(self, watch: StageProgress) -> Mapping[str, Any]: ...

    def make(self, watch: StageProgress) -> None:
        found = self.measure(watch.of_one_piece())
        write_atomically(self.path, json.dumps({"sha256": _digest(found), "found": found}, indent=1).encode())

    def read(self) -> dict[str, Any]:
        if (found := self._found()) is None:
            raise KfacpackError(f"{self.path}: is not what was measured. Remove it, and run the plan again")
        return found

    def intact(self) -> bool:
        return self._found() is not None

    def _found(self) -> dict[str, Any] | None:
        """What was measured, if the file still says so."""
        try:
            said = json.loads(self.path.read_bytes())
            found: dict[str, Any] = said["found"]
            return found if said["sha256"] == _digest(found) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _digest(found: Mapping[str, Any]) -> str:
    return sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class SealedStage(Stage):
    """A stage whose file is a bundle or a vector."""

    opens: ClassVar[type[Bundle] | type[VectorFile]]
    """Refuses a file whose header is not what was sealed, or that is not as long as it says."""

    def intact(self) -> bool:
        try:
            self.opens(self.path)
        except BundleError:
            return False
        return True
