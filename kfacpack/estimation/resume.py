"""Unfinished work on disk: its tensors and how far it got, so that it can be taken up again to the same bytes."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from glob import escape
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kfacpack.curvature.matrices.components import raw_bytes
from kfacpack.errors import KfacpackError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


SAVE_INTERVAL = 30.0
"""Seconds of work after which it is stored, at the end of a batch."""

_SHARE = 20
"""Storing takes at most one in so many seconds."""
_KEY = "kfacpack_partial"


class Interrupted(Exception):  # noqa: N818 - not an error: it was asked for, and nothing is lost
    """Work was asked to stop, and has stored what it had."""


class Resumable(Protocol):
    """Work that can be stored and taken up again."""

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """All that it is made of so far, by name; to be written to when it is taken up again."""


@dataclass
class PartialFile:
    """The file, and what the work in it must have been asked for to be the same as ours."""

    path: Path
    what: str
    """What it is, with its article: "an estimate"."""
    request: dict[str, Any]
    every: float = SAVE_INTERVAL
    _last: float = field(default_factory=time.monotonic)
    _took: float = 0.0

    def keep(self, work: Resumable, done: int, *, now: bool = False) -> None:
        """Store the work after `done` batches, if it is time to."""
        begun = time.monotonic()
        if not now and begun - self._last < max(self.every, _SHARE * self._took):
            return
        tensors = {name: tensor.cpu().contiguous() for name, tensor in work.tensors()}
        digests = {name: _digest(tensor) for name, tensor in tensors.items()}
        said = json.dumps({"request": self.request, "batches": done, "sha256": digests}, sort_keys=True)
        beside = self.path.with_name(f".{self.path.name}")
        try:
            save_file(tensors, beside, {_KEY: said})
            beside.replace(self.path)
        except (OSError, SafetensorError) as error:
            beside.unlink(missing_ok=True)
            raise KfacpackError(f"{self.path}: what is done so far cannot be stored: {error}") from error
        self._last = time.monotonic()
        self._took = self._last - begun

    def restore(self, work: Resumable) -> int:
        """Put the stored tensors back; how many batches went into them, 0 if nothing was stored."""
        if not self.path.exists():
            return 0
        try:
            with safe_open(self.path, "pt") as stored:
                said = json.loads((stored.metadata() or {})[_KEY])
                self._compare(said["request"])
                for name, tensor in work.tensors():
                    found = stored.get_tensor(name)
                    if _digest(found) != said["sha256"][name]:
                        raise KeyError(f"{name!r} is not what was stored")
                    tensor.copy_(found)
                return int(said["batches"])
        # What a foreign or edited file says may be of any type and any shape.
        except (SafetensorError, OSError, LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            problem = f"{self.path}: is not {self.what} that was interrupted, or it is damaged ({error})"
            raise KfacpackError(f"{problem}. Remove it to start anew") from error

    def require_absent(self) -> int:
        """Do not write over somebody's unfinished work. 0, as many batches as there are in nothing."""
        if self.path.exists():
            problem = f"there is {self.what} from before that was interrupted"
            raise KfacpackError(f"{self.path}: {problem}. Go on with it (--resume), or remove it to start anew")
        return 0

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _compare(self, stored: dict[str, Any]) -> None:
        ours = json.loads(json.dumps(self.request))
        for key in sorted(ours.keys() | stored.keys()):
            if ours.get(key) != stored.get(key):
                problem = f"was begun with {key} = {stored.get(key)!r}, now it is {ours.get(key)!r}"
                raise KfacpackError(f"{self.path}: {problem}. Use the same options, or remove it to start anew")


def _digest(tensor: Tensor) -> str:
    return sha256(raw_bytes(tensor)).hexdigest()


def require_unfinished(output: Path) -> None:
    """Who wants to go on with work does not mean to make finished work anew, and write over it."""
    if output.exists() and not any(output.parent.glob(f"{escape(output.name)}.partial*")):
        problem = "is finished: there is nothing beside it to go on with"
        raise KfacpackError(f"{output}: {problem}. Without --resume it is made anew")


def require_writable_folder(output: Path) -> None:
    """Better told now than after an hour of work."""
    if output.is_dir() or not output.parent.is_dir() or not os.access(output.parent, os.W_OK):
        problem = "is a folder" if output.is_dir() else f"cannot be written: no writable folder {str(output.parent)!r}"
        raise KfacpackError(f"{output}: {problem}. Give the path of a file in a folder that exists")
