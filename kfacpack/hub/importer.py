"""What every import is asked, and what it says afterwards.

Where published files are: in a folder, or on the Hub, from which only those that are needed are fetched.

The one place where pickles are read: by a process of its own, that may do little and is not trusted afterwards.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy
import torch

from kfacpack.curvature.matrices.components import TORCH_TYPES
from kfacpack.errors import HubError, KfacpackError, printable
from kfacpack.format.container import DOWNLOAD_AGAIN, MAGIC_BYTES, Container, TensorSpec
from kfacpack.format.hub_client import hub_api, hub_errors, snapshot
from kfacpack.format.manifest import Fisher
from kfacpack.format.reference import SCHEME, expand_user, is_reference, read_address

if TYPE_CHECKING:
    from kfacpack.models.model import Model


ImportProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class ImportResult:
    """What was made of which files, and what was not."""

    path: Path
    task: str
    files: tuple[str, ...]
    """Those that were read."""
    blocks: int
    parameters: int
    examples: int
    positions: int
    """R, of the layers that see every token."""
    weights_compared: bool
    """Whether the factors themselves showed that they were computed at the model's weights."""
    left_out: tuple[tuple[str, str], ...]
    """(what was not imported, why)."""


class Importer(Protocol):
    def __call__(
        self,
        source: str | Path,
        model: Model,
        output: Path,
        *,
        task: str | None = None,
        files: str | None = None,
        fisher: Fisher = "mc",
        samples: int | None = None,
        params: Sequence[str] | None = None,
        dataset_size: int | None = None,
        progress: ImportProgress = lambda done, total: None,
    ) -> ImportResult: ...


DOWNLOAD_HINT = "download it by other means, and give the folder"


class HubFolder(NamedTuple):
    """owner/repo, a folder in it ("" for all of it), and a revision."""

    repository: str
    folder: str
    revision: str | None
    kept: Path | None = None
    """Where the Hub cannot be reached, all that its cache has of the repository."""

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        said = f"{SCHEME}{self.repository}{at}" + (f"/{self.folder}" if self.folder else "")
        return f"{said}, as far as the cache has it (the Hub cannot be reached)" if self.kept else said


def published_folder(source: str | Path) -> Path | HubFolder:
    """A folder, or hf://owner/repo[@revision][/folder]; mammoth writes the revision last: hf://owner/repo/folder@main."""
    if not is_reference(source):
        folder = expand_user(source)
        if not folder.is_dir():
            raise KfacpackError(f"{folder}: is no folder; give the one with the .pt files, or hf://owner/repo/folder")
        return folder
    text = str(source).rstrip("/")
    address = read_address(text)
    if address is None or address.kind != "model":
        raise KfacpackError(f"{printable(text)}: expected hf://owner/repo, hf://owner/repo/folder")
    inner, _, last = (address.path or "").partition("@")
    return HubFolder(address.repository, inner, address.revision or last or None)


def listing(place: Path | HubFolder) -> tuple[Path | HubFolder, list[str]]:
    """The names of all files there, those in folders below left aside; and the place that has them: without a network,
    that is the cache."""
    if isinstance(place, Path):
        return place, sorted(each.name for each in place.iterdir() if each.is_file())
    try:
        with hub_errors(place, place.repository, place.revision, otherwise=DOWNLOAD_HINT):
            told = hub_api().model_info(place.repository, revision=place.revision)
    except HubError as error:
        kept = snapshot(place.repository, place.revision) if error.unreachable else None
        if kept is None or not (kept / place.folder).is_dir():
            raise
        return place._replace(kept=kept), listing(kept / place.folder)[1]
    paths = [Path(each.rfilename) for each in told.siblings or ()]
    return place, sorted(path.name for path in paths if path.parent == Path(place.folder))


def fetch_file(place: Path | HubFolder, names: Iterable[str]) -> tuple[Path, str | None]:
    """A folder that has these files, and, from the Hub, the commit that they are of."""
    if isinstance(place, Path):
        return place, None
    if place.kept:
        return place.kept / place.folder, place.kept.name
    from huggingface_hub import snapshot_download

    wanted = [f"{place.folder}/{name}" if place.folder else name for name in names]
    with hub_errors(place, place.repository, place.revision, otherwise=DOWNLOAD_HINT):
        root = Path(snapshot_download(place.repository, revision=place.revision, allow_patterns=wanted))
    return root / place.folder, root.name


PROGRAM = Path(__file__).with_name("unpickle_worker.py")
TIMEOUT_SECONDS = 60
SINGLE_TENSOR = "tensor"
"""What a file's only tensor is called, where it is in no dictionary."""
BYTES_A_SECOND = 20e6
"""How slowly a file may be read before it is given up, beside SECONDS."""


class UnpickledTensors:
    """What was in one file: names and shapes now, numbers when asked for."""

    def __init__(self, origin: Path, converted: Path):
        self.origin = origin
        """The file as it was published."""
        self._container = Container(converted)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self._container.tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        spec = self.specs[name]
        data = self._container.read(name, 0, spec.nbytes)
        return torch.frombuffer(data, dtype=TORCH_TYPES[spec.dtype]).view(spec.shape)


@contextmanager
def read_pickle(files: Mapping[str, Path], beside: Path) -> Iterator[dict[str, UnpickledTensors]]:
    """The tensors of each file; their copies lie in a folder in `beside` until the context is left."""
    for path in files.values():
        _require_archive(path)
    with TemporaryDirectory(prefix=".kfacpack-import-", dir=beside) as folder:
        targets = {key: Path(folder) / f"{key}.safetensors" for key in files}
        _run(files, targets, Path(folder))
        yield {key: UnpickledTensors(path, targets[key]) for key, path in files.items()}


def _require_archive(path: Path) -> None:
    try:
        with path.open("rb") as stream:
            start = stream.read(64)
    except OSError as error:
        raise KfacpackError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not start.startswith(b"PK\x03\x04"):
        found = next((words for first, words in MAGIC_BYTES.items() if start.startswith(first)), "is none")
        expected = "expected an archive that torch.save wrote, as it has done since version 1.6"
        raise KfacpackError(f"{path}: {found if start else 'is empty'}; {expected}. {DOWNLOAD_AGAIN}")


def _run(files: Mapping[str, Path], targets: Mapping[str, Path], folder: Path) -> None:
    paths = list(files.values())
    seconds = TIMEOUT_SECONDS + int(sum(path.stat().st_size for path in paths) / BYTES_A_SECOND)
    asked = {
        "packages": sorted({str(Path(each.__file__ or "").parents[1]) for each in (torch, numpy)}),
        "files": [{"path": str(path.resolve()), "target": str(targets[key].resolve())} for key, path in files.items()],
        "seconds": seconds,
        "single": SINGLE_TENSOR,
    }
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    try:
        done = subprocess.run(
            [sys.executable, "-I", str(PROGRAM)],
            input=json.dumps(asked).encode(),
            capture_output=True,
            timeout=4 * seconds,
            cwd=folder,
            env={**kept, "OMP_NUM_THREADS": "1", "HOME": str(folder)},
        )
    except subprocess.TimeoutExpired as error:
        raise KfacpackError(f"{paths[0].parent}: its files were not read within {4 * seconds} s; given up") from error
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        how = f"was stopped by signal {-done.returncode}" if done.returncode < 0 else "failed"
        problem = f"the process that reads its files {how}" + (f": {printable(last[0])}" if last else "")
        raise KfacpackError(f"{paths[0].parent}: {problem}. {DOWNLOAD_AGAIN}")
    answer = json.loads(done.stdout)
    if answer["refused"] is not None:
        raise KfacpackError(f"{paths[answer['refused']]}: {printable(answer['why'])}")
