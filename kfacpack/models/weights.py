"""Where weights come from: safetensors files, the user's or the Hub's. No pickle is loaded, or even fetched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from torch import Tensor

from kfacpack.bundle.container import Container
from kfacpack.errors import KfacpackError, first_line
from kfacpack.hub.files.client import speaking

LOCAL_WEIGHTS = "Give the weights as a safetensors file, --weights FILE, or ask for --weights random"

_SAFE_NAMES = {
    "pytorch_model.bin": "model.safetensors",
    "open_clip_pytorch_model.bin": "open_clip_model.safetensors",
}
"""What the safetensors file is called in a Hub repository whose registry entry names a pickle."""


def checked(path: Path) -> Path:
    """A safetensors file whose header is sound and covers the whole file."""
    Container(path).tensors  # noqa: B018 - reading the header is the check
    if path.suffix != ".safetensors":
        # open_clip and timm take any other ending for a pickle.
        raise KfacpackError(f"{path}: a weights file's name must end in .safetensors; rename it")
    return path


def safe_name(filename: str) -> str:
    """What the safetensors file is called where a registry lists this one."""
    return _SAFE_NAMES.get(filename, str(Path(filename).with_suffix(".safetensors")))


def fetched(repository: str, filename: str, model: str) -> Path:
    """The safetensors file in a Hub repository, from the local cache if it is there.

    `filename` is the one a registry lists; `repository` may end in @revision.
    """
    from huggingface_hub import hf_hub_download

    safe = safe_name(filename)
    repository, _, revision = repository.partition("@")
    otherwise = LOCAL_WEIGHTS[0].lower() + LOCAL_WEIGHTS[1:]
    with speaking(f"{model}: {safe} of {repository}", repository, revision or None, otherwise=otherwise):
        file = Path(hf_hub_download(repository, safe, revision=revision or None))
    return checked(file)


def misfit(path: Path, expected: Mapping[str, Tensor], resized: tuple[str, ...] = ()) -> str | None:
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


def refuse(
    path: Path,
    model: str,
    error: Exception,
    expected: Callable[[], Mapping[str, Tensor]],
    resized: tuple[str, ...] = (),
) -> KfacpackError:
    """The error to raise when a library could not load a file. `expected`: the state dict of such a model."""
    if problem := misfit(path, expected(), resized):
        return KfacpackError(f"{path}: these are not the weights of {model}: {problem}")
    return KfacpackError(f"{path}: could not be loaded into {model}: {first_line(error)}")
