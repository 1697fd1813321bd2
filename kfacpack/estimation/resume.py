"""Writes and reads partial files, which contain the state of interrupted runs.

The output of a resumed run has the same bytes as the output of an uninterrupted run.

A layer-by-layer estimate also stores the inputs, arguments and gradients of the model's layers (see `StreamFiles`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from glob import escape
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kfacpack.curvature.matrices.components import raw_bytes, spec_of
from kfacpack.errors import BundleError, KfacpackError
from kfacpack.format.writer import write_plain
from kfacpack.models.layer_list import ORDINARY

if TYPE_CHECKING:
    from collections.abc import Iterable


SAVE_INTERVAL = 30.0
"""Default minimum number of seconds between two saves. The state is saved only at the end of a batch."""

_MIN_INTERVAL = 20
"""Minimum interval between two saves, as a multiple of the time that a save takes."""
_KEY = "kfacpack_partial"


class Interrupted(Exception):  # noqa: N818 - not an error, because the user requested the stop
    """Raised when a run is stopped on request, after its state has been saved."""


class Resumable(Protocol):
    """Work that can be saved and resumed."""

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Returns all tensors of the state, as pairs of a name and a tensor. Resuming modifies the tensors in place."""


@dataclass
class PartialFile:
    """The file to which the state of unfinished work is saved."""

    path: Path
    description: str
    """Description of the work in error messages, with an article, for example "an estimate"."""
    request: dict[str, Any]
    """Settings of the work. A file that was saved with other settings is rejected."""
    every: float = SAVE_INTERVAL
    """Minimum number of seconds between two saves."""
    _last_save: float = field(default_factory=time.monotonic)
    _save_seconds: float = 0.0

    def is_due(self) -> bool:
        """Returns whether enough time has passed since the last save to save again."""
        return time.monotonic() - self._last_save >= max(self.every, _MIN_INTERVAL * self._save_seconds)

    def save(self, work: Resumable, done: int, *, now: bool = False) -> None:
        """Saves the work if enough time has passed since the last save.

        Args:
            work: The work to save.
            done: Number of completed batches, or of completed steps of a layer-by-layer estimate.
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
        specs = {name: spec_of(tensor) for name, tensor in tensors.items()}
        try:
            with write_plain(self.path, specs, {_KEY: metadata}) as write:
                for name, tensor in tensors.items():
                    write(name, raw_bytes(tensor))
        except BundleError as error:
            problem = f"cannot save the state of {self.description}: {error.problem}"
            raise KfacpackError(f"{self.path}: {problem}") from error
        self._last_save = time.monotonic()
        self._save_seconds = self._last_save - start

    def restore(self, work: Resumable) -> int:
        """Restores the saved tensors.

        Args:
            work: The work to restore. Its tensors are modified in place.

        Returns:
            The number of batches or steps that were completed; 0 if there is no file.

        Raises:
            KfacpackError: If the file is damaged or was saved with other settings.
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
                        raise ValueError(f"the digest of the tensor {name!r} differs from the saved digest")
                    tensor.copy_(saved)
                return int(metadata["batches"])
        # The metadata of other or edited files may have any type and structure.
        except (SafetensorError, OSError, LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            problem = f"{self.path}: the file is damaged, or is not the saved state of {self.description} ({error})"
            raise KfacpackError(f"{problem}. Remove the file to start over") from error

    def require_absent(self) -> int:
        """Checks that there is no saved state that a new run would overwrite.

        Returns:
            0, the number of completed batches in a new run.

        Raises:
            KfacpackError: If the file exists.
        """
        if self.path.exists():
            problem = f"{self.path}: the file exists because {self.description} was interrupted"
            raise KfacpackError(f"{problem}. Continue with --resume (resume=True), or remove the file to start over")
        return 0

    def remove(self) -> None:
        """Removes the partial file if it exists."""
        self.path.unlink(missing_ok=True)

    def _compare(self, saved: dict[str, Any]) -> None:
        """Checks that the settings saved in the file match the current settings."""
        current = json.loads(json.dumps(self.request))
        # All differences are listed: the default of one option may depend on another, such as lr on the seed.
        changed = [
            f"expected {key} = {saved.get(key)!r}, got {current.get(key)!r}"
            for key in sorted(current.keys() | saved.keys())
            if current.get(key) != saved.get(key)
        ]
        if changed:
            problem = f"{self.path}: the settings differ from those of the saved state: {'; '.join(changed)}"
            raise KfacpackError(f"{problem}. Use the same options, or remove the file to start over")


def _digest(tensor: Tensor) -> str:
    return sha256(raw_bytes(tensor)).hexdigest()


def require_unfinished(output: Path) -> None:
    """Checks that the run to be resumed is not finished.

    Raises:
        KfacpackError: If the output exists and there is no partial file beside it.
    """
    partial = output.parent.glob(f"{escape(output.name)}.partial*")
    if output.exists() and not any(path.is_file() for path in partial):
        problem = "the run is finished, so there is no partial file to resume from"
        raise KfacpackError(f"{output}: {problem}. Omit --resume (resume=True) to run it again")


@contextmanager
def output_path(output: str | os.PathLike[str] | None, filename: str, *, resume: bool) -> Iterator[Path]:
    """Context manager that yields the path of an output file.

    Args:
        output: Path of the file; None for a file in a temporary folder, which is removed on exit.
        filename: Name of the temporary file.
        resume: Whether to resume an interrupted run, which requires an output.

    Yields:
        The path.

    Raises:
        KfacpackError: If `resume` is set without an output, or the output is not a path.
    """
    if not isinstance(output, str | os.PathLike | None):
        raise KfacpackError(f"output: expected a path, got {type(output).__name__}")
    if output is not None:
        yield Path(output)
    elif resume:
        raise KfacpackError("resume=True needs an output, because the state of a run is saved beside the output")
    else:
        with TemporaryDirectory() as folder:
            yield Path(folder) / filename


def require_writable_folder(output: Path) -> None:
    """Checks, before any work is done, that the output can be written.

    Raises:
        KfacpackError: If the output is a folder, or its folder does not exist or is not writable.
    """
    if output.is_dir() or not output.parent.is_dir() or not os.access(output.parent, os.W_OK):
        missing = f"there is no writable folder {str(output.parent)!r}"
        problem = "is a folder" if output.is_dir() else f"cannot be written: {missing}"
        raise KfacpackError(f"{output}: {problem}. Use the path of a file in an existing, writable folder")


class StreamFiles:
    """The temporary files of a layer-by-layer estimate.

    Args:
        folder: Folder that contains the files.
        device: Device to which tensors are loaded.
    """

    def __init__(self, folder: Path, device: torch.device):
        self.folder = folder
        self._device = device

    def create_folder(self) -> None:
        """Creates the folder if it does not exist.

        Raises:
            KfacpackError: If the folder cannot be created.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"{self.folder}: cannot be created: {error.strerror}"
            raise KfacpackError(f"{problem}. Choose another folder") from error

    def save(self, name: str, tensors: Mapping[str, Tensor], description: object = None) -> None:
        """Writes tensors to a file, together with a description that is stored as JSON.

        Raises:
            KfacpackError: If the file cannot be written.
        """
        content = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
        path = self.folder / f"{name}.safetensors"
        try:
            save_file(content, path, {"description": json.dumps(description)})
        except (SafetensorError, OSError) as error:
            remedy = "Free up disk space, then continue with --resume (resume=True)"
            raise KfacpackError(f"{path}: cannot be written: {error}. {remedy}") from error

    def load(self, name: str) -> tuple[dict[str, Tensor], Any]:
        """Reads the tensors and the description from a file that `save` has written.

        Raises:
            KfacpackError: If the file is missing or damaged.
        """
        path = self.folder / f"{name}.safetensors"
        try:
            with safe_open(path, "pt") as file:
                tensors = {key: file.get_tensor(key).to(self._device) for key in file.keys()}  # noqa: SIM118
                return tensors, json.loads(file.metadata()["description"])
        except (SafetensorError, OSError, LookupError, ValueError, TypeError) as error:
            problem = f"{path}: this file is needed to resume the estimate, but is missing or damaged ({error})"
            raise KfacpackError(
                f"{problem}. Remove {self.folder} and the partial file beside the output to start over"
            ) from error

    def remove(self, pattern: str) -> None:
        """Removes the files whose names, without the suffix, match a glob pattern."""
        for path in self.folder.glob(f"{pattern}.safetensors"):
            path.unlink()


class ArgumentEncoder:
    """Encodes the arguments of layers as JSON values and named tensors.

    A tensor that several layers receive is stored only once.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}

    def encode(self, value: Any) -> Any:
        """Returns an argument as JSON values, in which tensors are replaced by their names in `tensors`.

        Raises:
            KfacpackError: If the argument contains anything other than tensors, numbers, strings, None, and lists,
                tuples or mappings of these.
        """
        if isinstance(value, Tensor):
            name = self._names.setdefault(id(value), f"argument-{len(self._names)}")
            self.tensors[name] = value
            return {"tensor": name}
        if isinstance(value, list | tuple):
            return {"list": [self.encode(item) for item in value], "tuple": isinstance(value, tuple)}
        if isinstance(value, Mapping):
            return {"mapping": {key: self.encode(item) for key, item in value.items()}}
        if value is None or isinstance(value, bool | int | float | str):
            return {"value": value}
        problem = f"a layer receives an argument of the unsupported type {type(value).__name__}"
        raise KfacpackError(f"the curvature cannot be estimated layer by layer: {problem}. {ORDINARY}")


def decode_arguments(entry: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Decodes an argument that `ArgumentEncoder` has encoded, given the tensors by name."""
    if "tensor" in entry:
        return tensors[entry["tensor"]]
    if "list" in entry:
        items = [decode_arguments(item, tensors) for item in entry["list"]]
        return tuple(items) if entry["tuple"] else items
    if "mapping" in entry:
        return {key: decode_arguments(item, tensors) for key, item in entry["mapping"].items()}
    return entry["value"]
