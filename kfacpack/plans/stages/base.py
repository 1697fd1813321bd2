"""What a stage is: one file, made from others, called by what decides its content.

A stage's key is the hash of its kind, its settings, the keys of its inputs, the model, the data, the versions of
kfacpack and torch and the kind of device. It is part of the file's name, so a file that is there need not be made
again, and one that was made otherwise has another name.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kfacpack.bundle.reader import Bundle
from kfacpack.errors import BundleError, KfacpackError
from kfacpack.running.files import write_whole
from kfacpack.running.partial import Interrupted
from kfacpack.vectors.leaf import VectorFile

if TYPE_CHECKING:
    from kfacpack.plans.shop import Shop


_LONGEST = 160
"""Bytes of a stage's name in that of its file. File systems take 255, and a key and endings follow."""


@dataclass
class Watch:
    """Who is told how far a stage is, and asked whether it should stop."""

    progress: Callable[[int, int, str], None] = lambda done, total, words: None
    stopped: Callable[[], bool] = lambda: False

    def counted(self, done: int, total: int) -> None:
        self.progress(done, total, "")

    def of_one_piece(self) -> Watch:
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

    shop: Shop
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
    def make(self, watch: Watch) -> None:
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
class Measurement(Stage):
    """A stage whose file is JSON."""

    @abstractmethod
    def measure(self, watch: Watch) -> Mapping[str, Any]: ...

    def make(self, watch: Watch) -> None:
        found = self.measure(watch.of_one_piece())
        write_whole(self.path, json.dumps({"sha256": _digest(found), "found": found}, indent=1).encode())

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
class Sealed(Stage):
    """A stage whose file is a bundle or a vector."""

    opens: ClassVar[type[Bundle] | type[VectorFile]]
    """Refuses a file whose header is not what was sealed, or that is not as long as it says."""

    def intact(self) -> bool:
        try:
            self.opens(self.path)
        except BundleError:
            return False
        return True
