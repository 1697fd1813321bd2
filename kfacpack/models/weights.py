"""Where weights come from: safetensors files, the user's or the Hub's. No pickle is loaded, or even fetched.

A model's weights as a checkpoint that its own library loads: a safetensors file, or a folder of transformers'.
"""

from __future__ import annotations

import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from torch import Tensor, nn

from kfacpack.curvature.matrices.components import raw_bytes, spec_of
from kfacpack.errors import KfacpackError, first_line
from kfacpack.format.container import Container
from kfacpack.format.hub_client import hub_errors
from kfacpack.format.writer import replace_atomically, tensor_offsets

LOCAL_WEIGHTS = "Give the weights as a safetensors file, --weights FILE, or ask for --weights random"

_SAFE_NAMES = {
    "pytorch_model.bin": "model.safetensors",
    "open_clip_pytorch_model.bin": "open_clip_model.safetensors",
}
"""What the safetensors file is called in a Hub repository whose registry entry names a pickle."""


def check_safetensors(path: Path) -> Path:
    """A safetensors file whose header is sound and covers the whole file."""
    Container(path).tensors  # noqa: B018 - reading the header is the check
    if path.suffix != ".safetensors":
        # open_clip and timm take any other ending for a pickle.
        raise KfacpackError(f"{path}: a weights file's name must end in .safetensors; rename it")
    return path


def safe_name(filename: str) -> str:
    """What the safetensors file is called where a registry lists this one."""
    return _SAFE_NAMES.get(filename, str(Path(filename).with_suffix(".safetensors")))


def download_weights(repository: str, filename: str, model: str) -> Path:
    """The safetensors file in a Hub repository, from the local cache if it is there.

    `filename` is the one a registry lists; `repository` may end in @revision.
    """
    from huggingface_hub import hf_hub_download

    safe = safe_name(filename)
    repository, _, revision = repository.partition("@")
    otherwise = LOCAL_WEIGHTS[0].lower() + LOCAL_WEIGHTS[1:]
    with hub_errors(f"{model}: {safe} of {repository}", repository, revision or None, otherwise=otherwise):
        file = Path(hf_hub_download(repository, safe, revision=revision or None))
    return check_safetensors(file)


def mismatched_tensors(path: Path, expected: Mapping[str, Tensor], resized: tuple[str, ...] = ()) -> str | None:
    """The first tensor of a state dict that a file lacks or has in another shape, in words that name it, or None.

    `resized`: patterns of names whose shape the loader adapts.
    """
    found = Container(path).tensors
    for name, tensor in expected.items():
        if name not in found:
            return f"{name!r} is missing"
        if found[name].shape != tuple(tensor.shape) and not any(fnmatchcase(name, pattern) for pattern in resized):
            return f"{name!r} has shape {list(found[name].shape)}, the model's has {list(tensor.shape)}"
    return None


def refuse_weights(
    path: Path,
    model: str,
    error: Exception,
    expected: Callable[[], Mapping[str, Tensor]],
    resized: tuple[str, ...] = (),
) -> KfacpackError:
    """The error to raise when a library could not load a file. `expected`: the state dict of such a model."""
    if problem := mismatched_tensors(path, expected(), resized):
        return KfacpackError(f"{path}: these are not the weights of {model}: {problem}")
    return KfacpackError(f"{path}: could not be loaded into {model}: {first_line(error)}")


class Checkpoint(ABC):
    def __init__(self, how_to_load: Callable[[Path], str]):
        self.how_to_load = how_to_load
        """A path -> the line of Python that loads what was saved there."""

    @abstractmethod
    def check(self, path: Path) -> None:
        """Refuse a path that cannot be saved to: better told before long work than after it."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """The module's weights as they are now, whole or not at all."""


class CheckpointFile(Checkpoint):
    """The state dict, under its own names, as open_clip and timm have it."""

    def __init__(self, module: nn.Module, how_to_load: Callable[[Path], str], only: str = ""):
        """`only`: what the names that are saved begin with."""
        super().__init__(how_to_load)
        self._module, self._only = module, only

    def check(self, path: Path) -> None:
        if path.suffix != ".safetensors":
            # open_clip and timm take any other ending for a pickle.
            raise KfacpackError(f"{path}: the name of a checkpoint of this model must end in .safetensors")
        if path.is_dir():
            raise KfacpackError(f"{path}: is a folder, expected the name of a file to write")

    def save(self, path: Path) -> None:
        self.check(path)
        state = self._module.state_dict()
        write_weights(path, {name: value for name, value in state.items() if name.startswith(self._only)})


class CheckpointFolder(Checkpoint):
    """Config, tokenizer and weights, as transformers has them."""

    def __init__(self, fill: Callable[[Path], None], how_to_load: Callable[[Path], str]):
        super().__init__(how_to_load)
        self._fill = fill

    def check(self, path: Path) -> None:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            problem = "a checkpoint of this model is a folder, and this is a file or a folder with something in it"
            raise KfacpackError(f"{path}: {problem}. Name one that does not exist")

    def save(self, path: Path) -> None:
        self.check(path)
        path = path.absolute()
        try:
            partial = Path(mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
            try:
                partial.chmod(0o777 & ~_umask())
                self._fill(partial)
                partial.replace(path)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        except OSError as error:
            raise KfacpackError(f"{path}: could not be written: {error.strerror or error}") from error


def write_weights(path: Path, state: Mapping[str, Tensor]) -> None:
    """A safetensors file, whole or not at all, a tensor at a time."""
    places = tensor_offsets({name: spec_of(tensor) for name, tensor in state.items()})
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, place in places.items():
        offsets = [place.start, place.stop]
        header[name] = {"dtype": place.dtype, "shape": list(place.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replace_atomically(path) as descriptor, os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in places:
            file.write(raw_bytes(state[name]))


def as_call(function: str, *values: object, **named: object) -> str:
    """A line of Python; what is None is left out."""
    said = [*map(repr, values), *(f"{name}={value!r}" for name, value in named.items() if value is not None)]
    return f"{function}({', '.join(said)})"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
