"""Common parts of the importers for published factors: the result class, access to files, and isolated unpickling.

Files are read from a local folder or from the Hub, where only the required files are downloaded. Pickles are read in a
separate process with limited resources (`unpickle_worker.py`), whose output is validated like any untrusted file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy
import torch

from kfacpack.curvature.matrices.components import TORCH_TYPES
from kfacpack.errors import HubError, KfacpackError, printable
from kfacpack.format.container import MAGIC_BYTES, Container, TensorSpec
from kfacpack.format.hub_client import hub_api, hub_errors, snapshot
from kfacpack.format.reference import SCHEME, expand_user, is_reference, parse_address


@dataclass(frozen=True)
class ImportResult:
    """A summary of an import of published factors and of the bundle that was written."""

    path: Path
    """Path of the bundle."""
    task: str
    files: tuple[str, ...]
    """Names of the files that were read."""
    blocks: int
    """Number of blocks in the bundle."""
    parameters: int
    """Number of parameters that the bundle covers."""
    examples: int
    """Number of examples used for the estimate."""
    positions: int
    """Number of positions R per example in layers that process every token."""
    weights_compared: bool
    """Whether it was verified that the factors were computed at the model's weights.

    False if the files do not contain the factors that this check needs.
    """
    left_out: tuple[tuple[str, str], ...]
    """Blocks, parameters and files that were not imported, each with the reason."""


Importer = Callable[..., ImportResult]
"""A function that converts published factors into a bundle. It takes the arguments of `import_mammoth`."""


DOWNLOAD_HINT = "download the files by other means and pass the folder that contains them"


class HubFolder(NamedTuple):
    """A folder in a repository on the Hub."""

    repository: str
    folder: str
    """Path of the folder in the repository; empty for the top-level folder."""
    revision: str | None
    cached: Path | None = None
    """Local snapshot of the repository, which may be incomplete; set only if the Hub cannot be reached."""

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        name = f"{SCHEME}{self.repository}{at}" + (f"/{self.folder}" if self.folder else "")
        return f"{name} (cached files only, because the Hub cannot be reached)" if self.cached else name


def published_folder(source: str | Path) -> Path | HubFolder:
    """Parses the location of published files.

    Args:
        source: A local folder or `hf://owner/repo[@revision][/folder]`. The notation of the framework mammoth, with the
            revision at the end, is accepted as well: `hf://owner/repo/folder@main`.

    Returns:
        The local folder, or the folder on the Hub.

    Raises:
        KfacpackError: If `source` is neither an existing folder nor an address on the Hub.
    """
    if not is_reference(source):
        folder = expand_user(source)
        if not folder.is_dir():
            problem = "is not a folder; expected the folder with the .pt files, or hf://owner/repo/folder"
            raise KfacpackError(f"{folder}: {problem}")
        return folder
    text = str(source).rstrip("/")
    address = parse_address(text)
    if address is None or address.kind != "model":
        raise KfacpackError(f"{printable(text)}: invalid address; expected hf://owner/repo or hf://owner/repo/folder")
    inner, _, last = (address.path or "").partition("@")
    return HubFolder(address.repository, inner, address.revision or last or None)


def list_files(location: Path | HubFolder) -> tuple[Path | HubFolder, list[str]]:
    """Lists the files in a folder, excluding subfolders.

    Returns:
        The location, with `cached` set if the Hub cannot be reached, and the names of the files.

    Raises:
        HubError: If the repository cannot be read and is not cached.
    """
    if isinstance(location, Path):
        return location, sorted(file.name for file in location.iterdir() if file.is_file())
    try:
        with hub_errors(location, location.repository, location.revision, offline_remedy=DOWNLOAD_HINT):
            info = hub_api().model_info(location.repository, revision=location.revision)
    except HubError as error:
        cached = snapshot(location.repository, location.revision) if error.unreachable else None
        if cached is None or not (cached / location.folder).is_dir():
            raise
        return location._replace(cached=cached), list_files(cached / location.folder)[1]
    paths = [Path(file.rfilename) for file in info.siblings or ()]
    return location, sorted(path.name for path in paths if path.parent == Path(location.folder))


def fetch_files(location: Path | HubFolder, names: Iterable[str]) -> tuple[Path, str | None]:
    """Makes files available in a local folder, downloading them if necessary.

    Args:
        location: Location of the files, as returned by `list_files`.
        names: File names.

    Returns:
        A local folder with the files and, for files from the Hub, their commit.

    Raises:
        HubError: If the files cannot be downloaded.
    """
    if isinstance(location, Path):
        return location, None
    if location.cached:
        return location.cached / location.folder, location.cached.name
    from huggingface_hub import snapshot_download

    patterns = [f"{location.folder}/{name}" if location.folder else name for name in names]
    with hub_errors(location, location.repository, location.revision, offline_remedy=DOWNLOAD_HINT):
        root = Path(snapshot_download(location.repository, revision=location.revision, allow_patterns=patterns))
    return root / location.folder, root.name


WORKER = Path(__file__).with_name("unpickle_worker.py")
TIMEOUT_SECONDS = 60
"""CPU time limit of the worker process in seconds, not including the time to read the files."""
MIN_BYTES_PER_SECOND = 20e6
"""Assumed minimum reading speed. The time to read the files at this speed is added to the CPU time limit."""
SINGLE_TENSOR = "tensor"
"""Name that is given to the tensor if a file contains a single tensor instead of a dictionary."""


class UnpickledTensors:
    """The tensors in one published file. Names and shapes are read immediately, tensors when they are accessed.

    Args:
        origin: The published file.
        converted: The safetensors file to which the tensors were converted.
    """

    def __init__(self, origin: Path, converted: Path):
        self.origin = origin
        self._container = Container(converted)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The dtype, shape and position of each tensor, by name."""
        return self._container.tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        spec = self.specs[name]
        data = self._container.read(name, 0, spec.nbytes)
        return torch.frombuffer(data, dtype=TORCH_TYPES[spec.dtype]).view(spec.shape)


@contextmanager
def read_pickle(files: Mapping[str, Path], scratch: Path) -> Iterator[dict[str, UnpickledTensors]]:
    """Reads tensors from files that were written by `torch.save`. Unpickling takes place in a separate process.

    Args:
        files: Paths of the files. The keys are used in the names of the temporary copies.
        scratch: Folder for temporary copies of the tensors. The copies are deleted on exit from the context.

    Yields:
        The tensors of each file, under the same keys as in `files`.

    Raises:
        KfacpackError: If a file cannot be read, or contains anything but tensors.
    """
    for path in files.values():
        _require_archive(path)
    with TemporaryDirectory(prefix=".kfacpack-import-", dir=scratch) as folder:
        targets = {key: Path(folder) / f"{key}.safetensors" for key in files}
        _run_worker(files, targets, Path(folder))
        yield {key: UnpickledTensors(path, targets[key]) for key, path in files.items()}


def _require_archive(path: Path) -> None:
    """Checks that a file begins with the magic bytes of the zip archives that `torch.save` writes."""
    try:
        with path.open("rb") as stream:
            start = stream.read(64)
    except OSError as error:
        raise KfacpackError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not start.startswith(b"PK\x03\x04"):
        kind = next((kind for magic, kind in MAGIC_BYTES.items() if start.startswith(magic)), "is not an archive")
        expected = "expected an archive written by torch.save in PyTorch 1.6 or later"
        remedy = "If the file is incomplete or damaged, download it again from its publisher"
        raise KfacpackError(f"{path}: {kind if start else 'is empty'}; {expected}. {remedy}")


def _run_worker(files: Mapping[str, Path], targets: Mapping[str, Path], folder: Path) -> None:
    """Converts files to safetensors in a separate process with a minimal environment and limited resources."""
    paths = list(files.values())
    seconds = TIMEOUT_SECONDS + int(sum(path.stat().st_size for path in paths) / MIN_BYTES_PER_SECOND)
    request = {
        "packages": sorted({str(Path(package.__file__ or "").parents[1]) for package in (torch, numpy)}),
        "files": [{"path": str(path.resolve()), "target": str(targets[key].resolve())} for key, path in files.items()],
        "seconds": seconds,
        "single": SINGLE_TENSOR,
    }
    environment = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    try:
        worker = subprocess.run(
            [sys.executable, "-I", str(WORKER)],
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=4 * seconds,
            cwd=folder,
            env={**environment, "OMP_NUM_THREADS": "1", "HOME": str(folder)},
        )
    except subprocess.TimeoutExpired as error:
        raise KfacpackError(f"{paths[0].parent}: reading the files took longer than {4 * seconds} s") from error
    if worker.returncode != 0:
        last = worker.stderr.decode(errors="replace").strip().splitlines()[-1:]
        outcome = f"was stopped by signal {-worker.returncode}" if worker.returncode < 0 else "failed"
        problem = f"the process that reads the files {outcome}" + (f": {printable(last[0])}" if last else "")
        remedy = "A file may be incomplete or damaged: download the files again from their publisher"
        raise KfacpackError(f"{paths[0].parent}: {problem}. {remedy}")
    answer = json.loads(worker.stdout)
    if answer["refused"] is not None:
        raise KfacpackError(f"{paths[answer['refused']]}: {printable(answer['why'])}")
