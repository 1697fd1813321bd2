"""The one place where pickles are read: by a process of its own, that may do little and is not trusted afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy
import torch

from kfacpack.bundle.container import DOWNLOAD_AGAIN, LOOKS_LIKE, Container, TensorSpec
from kfacpack.curvature.matrices.components import TORCH_TYPES
from kfacpack.errors import KfacpackError, printable

PROGRAM = Path(__file__).with_name("unpickle.py")
SECONDS = 60
SINGLE = "tensor"
"""What a file's only tensor is called, where it is in no dictionary."""
BYTES_A_SECOND = 20e6
"""How slowly a file may be read before it is given up, beside SECONDS."""


class Tensors:
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
def unpickled(files: Mapping[str, Path], beside: Path) -> Iterator[dict[str, Tensors]]:
    """The tensors of each file; their copies lie in a folder in `beside` until the context is left."""
    for path in files.values():
        _require_archive(path)
    with TemporaryDirectory(prefix=".kfacpack-import-", dir=beside) as folder:
        targets = {key: Path(folder) / f"{key}.safetensors" for key in files}
        _run(files, targets, Path(folder))
        yield {key: Tensors(path, targets[key]) for key, path in files.items()}


def _require_archive(path: Path) -> None:
    try:
        with path.open("rb") as stream:
            start = stream.read(64)
    except OSError as error:
        raise KfacpackError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not start.startswith(b"PK\x03\x04"):
        found = next((words for first, words in LOOKS_LIKE.items() if start.startswith(first)), "is none")
        expected = "expected an archive that torch.save wrote, as it has done since version 1.6"
        raise KfacpackError(f"{path}: {found if start else 'is empty'}; {expected}. {DOWNLOAD_AGAIN}")


def _run(files: Mapping[str, Path], targets: Mapping[str, Path], folder: Path) -> None:
    paths = list(files.values())
    seconds = SECONDS + int(sum(path.stat().st_size for path in paths) / BYTES_A_SECOND)
    asked = {
        "packages": sorted({str(Path(each.__file__ or "").parents[1]) for each in (torch, numpy)}),
        "files": [{"path": str(path.resolve()), "target": str(targets[key].resolve())} for key, path in files.items()],
        "seconds": seconds,
        "single": SINGLE,
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
