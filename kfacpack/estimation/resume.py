"""Partial files: the state of interrupted work. Resumed work gives the same bytes as uninterrupted work."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from glob import escape
from hashlib import sha256
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kfacpack.curvature.matrices.components import raw_bytes
from kfacpack.errors import KfacpackError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


SAVE_INTERVAL = 30.0
"""Default number of seconds between two saves. Work is saved at the end of a batch."""

_MIN_INTERVAL = 20
"""Minimum interval between two saves, in multiples of the time that a save takes."""
_KEY = "kfacpack_partial"


class Interrupted(Exception):  # noqa: N818 - not an error: the user requested the stop
    """Raised when work is stopped on request, after its state was saved."""


class Resumable(Protocol):
    """Work that can be saved and resumed."""

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Returns all tensors of the state by name. They are modified in place when work is resumed."""


@dataclass
class PartialFile:
    """The file in which the state of some work is saved."""

    path: Path
    description: str
    """Description of the work with an article, such as "an estimate"."""
    request: dict[str, Any]
    """Settings of the work; a file with other settings is rejected."""
    every: float = SAVE_INTERVAL
    """Seconds between two saves."""
    _last_save: float = field(default_factory=time.monotonic)
    _save_seconds: float = 0.0

    def is_due(self) -> bool:
        """Returns whether enough time has passed since the last save."""
        return time.monotonic() - self._last_save >= max(self.every, _MIN_INTERVAL * self._save_seconds)

    def save(self, work: Resumable, done: int, *, now: bool = False) -> None:
        """Saves the work if enough time has passed since the last save.

        Args:
            work: The work.
            done: Number of batches that are done.
            now: Whether to save regardless of the interval.

        Raises:
            KfacpackError: If the file cannot be written.
        """
        if not (now or self.is_due()):
            return
        start = time.monotonic()
        tensors = {name: tensor.cpu().contiguous() for name, tensor in work.tensors()}
        digests = {name: _digest(tensor) for name, tensor in tensors.items()}
        metadata = json.dumps({"request": self.request, "batches": done, "sha256": digests}, sort_keys=True)
        try:
            # If the process is killed, safetensors leaves a file with a random name; in a folder it can be found.
            self._folder.mkdir(exist_ok=True)
            save_file(tensors, self._folder / "state", {_KEY: metadata})
            (self._folder / "state").replace(self.path)
            rmtree(self._folder)
        except (OSError, SafetensorError) as error:
            rmtree(self._folder, ignore_errors=True)
            raise KfacpackError(f"{self.path}: cannot save the state of {self.description}: {error}") from error
        self._last_save = time.monotonic()
        self._save_seconds = self._last_save - start

    def restore(self, work: Resumable) -> int:
        """Restores the saved tensors.

        Args:
            work: The work, whose tensors are modified in place.

        Returns:
            The number of batches that are done; 0 if there is no file.

        Raises:
            KfacpackError: If the file is damaged, or was saved with other settings.
        """
        if not self.path.exists():
            return 0
        try:
            with safe_open(self.path, "pt") as file:
                metadata = json.loads((file.metadata() or {})[_KEY])
                self._compare(metadata["request"])
                for name, tensor in work.tensors():
                    saved = file.get_tensor(name)
                    if _digest(saved) != metadata["sha256"][name]:
                        raise KeyError(f"{name!r} does not match the digest that was saved with it")
                    tensor.copy_(saved)
                return int(metadata["batches"])
        # The metadata of other or edited files may have any type and shape.
        except (SafetensorError, OSError, LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            problem = f"{self.path}: is damaged, or is not the saved state of {self.description} ({error})"
            raise KfacpackError(f"{problem}. Remove it to start over") from error

    def require_absent(self) -> int:
        """Checks that no interrupted work would be overwritten.

        Returns:
            0, the number of batches that are done.

        Raises:
            KfacpackError: If the file exists.
        """
        if self.path.exists():
            problem = f"{self.path}: exists, because {self.description} was interrupted"
            raise KfacpackError(f"{problem}. Resume it with --resume (resume=True), or remove the file to start over")
        return 0

    def remove(self) -> None:
        """Removes the file, if it exists, and incomplete copies that a killed process left."""
        self.path.unlink(missing_ok=True)
        rmtree(self._folder, ignore_errors=True)

    @property
    def _folder(self) -> Path:
        """Folder in which the file is written before it is moved to its path."""
        return self.path.with_name(f".{self.path.name}")

    def _compare(self, saved: dict[str, Any]) -> None:
        """Checks that the file was saved with the same settings."""
        current = json.loads(json.dumps(self.request))
        # All differences are listed: the default of one option may depend on another, such as lr on the seed.
        changed = [
            f"{key} = {saved.get(key)!r}, got {current.get(key)!r}"
            for key in sorted(current.keys() | saved.keys())
            if current.get(key) != saved.get(key)
        ]
        if changed:
            problem = f"{self.path}: was saved with {'; '.join(changed)}"
            raise KfacpackError(f"{problem}. Use the same options, or remove the file to start over")


def _digest(tensor: Tensor) -> str:
    return sha256(raw_bytes(tensor)).hexdigest()


def require_unfinished(output: Path) -> None:
    """Checks that work to be resumed is not finished yet.

    Raises:
        KfacpackError: If the output exists and there is no partial file beside it.
    """
    if output.exists() and not any(output.parent.glob(f"{escape(output.name)}.partial*")):
        problem = "is finished: there is no partial file to resume from"
        raise KfacpackError(f"{output}: {problem}. Run without --resume to compute it again")


@contextmanager
def output_path(output: str | os.PathLike[str] | None, filename: str, *, resume: bool) -> Iterator[Path]:
    """Context manager that yields the path to write.

    Args:
        output: The path; None for a file in a temporary folder, which is removed on exit.
        filename: Name of the temporary file.
        resume: Whether an interrupted run is resumed.

    Yields:
        The path.

    Raises:
        KfacpackError: If a run is resumed without an output.
    """
    if output is not None:
        yield Path(output)
    elif resume:
        raise KfacpackError("resume=True needs an output: without one, no state is kept on disk")
    else:
        with TemporaryDirectory() as folder:
            yield Path(folder) / filename


def require_writable_folder(output: Path) -> None:
    """Checks, before any work is done, that the output can be written.

    Raises:
        KfacpackError: If the output is a folder, or its folder does not exist or is not writable.
    """
    if output.is_dir() or not output.parent.is_dir() or not os.access(output.parent, os.W_OK):
        problem = "is a folder" if output.is_dir() else f"cannot be written: no writable folder {str(output.parent)!r}"
        raise KfacpackError(f"{output}: {problem}. Use the path of a file in an existing folder")
