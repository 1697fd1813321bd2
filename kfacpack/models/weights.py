"""Weights in safetensors files, from the user or from the Hub, and checkpoints that the model's library can load.

Pickles are neither loaded nor downloaded.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import mkdtemp

import torch
from torch import Tensor, nn

from kfacpack.curvature.matrices.components import map_tensor, raw_bytes, spec_of
from kfacpack.errors import BundleError, KfacpackError, first_line
from kfacpack.format.container import Container
from kfacpack.format.hub_client import hub_errors
from kfacpack.format.writer import write_plain
from kfacpack.models.layer_list import main_list

LOCAL_WEIGHTS = "Pass a safetensors file with --weights FILE (weights=FILE), or use --weights random (weights='random')"
"""Remedy for weights that cannot be downloaded."""

_SAFETENSORS_NAMES = {
    "pytorch_model.bin": "model.safetensors",
    "open_clip_pytorch_model.bin": "open_clip_model.safetensors",
}
"""Names of safetensors files, by the name of the pickle file that a library's registry lists instead."""


def check_safetensors(path: Path) -> Path:
    """Checks that a weights file is a complete safetensors file.

    Returns:
        `path`, unchanged.

    Raises:
        KfacpackError: If the file is missing or invalid, or its name does not end in .safetensors.
    """
    Container(path).tensors  # noqa: B018 - reading the header is the check
    if path.suffix != ".safetensors":
        # open_clip and timm load files with any other suffix as pickles.
        raise KfacpackError(f"{path}: the name of a weights file must end in .safetensors; rename the file")
    return path


def safetensors_name(filename: str) -> str:
    """Returns the name of the safetensors file to use instead of a weights file from a library's registry."""
    return _SAFETENSORS_NAMES.get(filename, str(Path(filename).with_suffix(".safetensors")))


def download_weights(repository: str, filename: str, model: str) -> Path:
    """Downloads the safetensors file of a model, or finds it in the Hub cache.

    Args:
        repository: Hub repository, optionally with `@revision`.
        filename: Name of the file that the library's registry lists. This file may be a pickle.
        model: Name of the model, for error messages.

    Returns:
        The path of the file in the Hub cache.

    Raises:
        HubError: If the file cannot be downloaded.
    """
    from huggingface_hub import hf_hub_download

    file = safetensors_name(filename)
    repository, _, revision = repository.partition("@")
    offline_remedy = LOCAL_WEIGHTS[0].lower() + LOCAL_WEIGHTS[1:]
    with hub_errors(f"{model}: {file} of {repository}", repository, revision or None, offline_remedy=offline_remedy):
        path = Path(hf_hub_download(repository, file, revision=revision or None))
    return check_safetensors(path)


def mismatched_tensors(path: Path, expected: Mapping[str, Tensor], resized: tuple[str, ...] = ()) -> str | None:
    """Describes the first tensor that is missing from a file or has a wrong shape. Returns None if all tensors match.

    Args:
        path: Safetensors file.
        expected: State dict of the model.
        resized: fnmatch patterns of the tensors whose shapes may differ, because the library resizes them on loading.
    """
    specs = Container(path).tensors
    for name, tensor in expected.items():
        if name not in specs:
            return f"{name!r} is missing"
        if specs[name].shape != tuple(tensor.shape) and not any(fnmatchcase(name, pattern) for pattern in resized):
            return f"{name!r} has shape {list(specs[name].shape)}, expected {list(tensor.shape)}"
    return None


def weights_error(
    path: Path,
    model: str,
    error: Exception,
    expected: Callable[[], Mapping[str, Tensor]],
    resized: tuple[str, ...] = (),
) -> KfacpackError:
    """Returns the error to raise when a library could not load a weights file.

    Args:
        path: Safetensors file.
        model: Name of the model.
        error: The exception that the library raised.
        expected: Function that returns the model's state dict. If a tensor is missing from the file or has a wrong
            shape, the error names this tensor.
        resized: fnmatch patterns of the tensors whose shapes may differ, because the library resizes them on loading.
    """
    if problem := mismatched_tensors(path, expected(), resized):
        return KfacpackError(f"{path}: does not contain the weights of {model}: {problem}")
    return KfacpackError(f"{path}: could not be loaded into {model}: {first_line(error)}")


class UnloadedWeights(ABC):
    """The weights of a module that was built on the meta device. A layer's weights are loaded when the layer is used.

    Args:
        module: The module. Weights outside its main list of layers are loaded immediately.
        dtype: Dtype of the parameters.
        device: Device of the parameters.

    Raises:
        KfacpackError: If the module has no list of layers, or the weights cannot be read.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device):
        self._module, self._dtype, self._device = module, dtype, device
        self.layers = main_list(module, dict(module.named_parameters()))
        """Name of the main list of layers."""
        # A parameter with several names (tied weights) has to be replaced under all of them.
        self._names: dict[int, list[str]] = defaultdict(list)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._names[id(parameter)].append(name)
        self._tied = list(self._names.values())
        for buffer_name, buffer in module.named_buffers():
            path, _, key = buffer_name.rpartition(".")
            dtype_of = dtype if buffer.is_floating_point() and buffer_name in module.state_dict() else buffer.dtype
            module.get_submodule(path)._buffers[key] = buffer.to(device, dtype_of)
        self._load(names for names in self._tied if not names[0].startswith(f"{self.layers}."))

    def load(self, prefix: str) -> None:
        """Loads the parameters whose names begin with a prefix.

        Raises:
            KfacpackError: If the weights cannot be read.
        """
        self._load(names for names in self._tied if names[0].startswith(prefix))

    def _load(self, groups: Iterable[list[str]]) -> None:
        for names in groups:
            tensor = self._values(names, tuple(self._module.get_parameter(names[0]).shape))
            if tensor is None:
                continue
            parameter = nn.Parameter(tensor, requires_grad=False)
            for name in names:
                path, _, key = name.rpartition(".")
                self._module.get_submodule(path)._parameters[key] = parameter

    @abstractmethod
    def _values(self, names: Sequence[str], shape: tuple[int, ...]) -> Tensor | None:
        """Returns the values of a parameter, or None if they are missing and f does not use the parameter.

        Args:
            names: Names of the parameter. A tied parameter has several names.
            shape: Expected shape.
        """


class PlaceholderWeights(UnloadedWeights):
    """Arbitrary parameter values, for forecasts of time and memory, which depend only on the parameters' shapes.

    To save memory, a matrix outside the layers is a view of a short vector.
    """

    def _values(self, names: Sequence[str], shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        if len(shape) != 2:
            values: Tensor = 1 + 0.1 * torch.randn(shape, generator=generator)
            return values.to(self._device, self._dtype)
        # Entry (i, j) is element i + j of a random vector: no two rows or columns are equal.
        vector = torch.randn(sum(shape), generator=generator) / shape[1] ** 0.5
        matrix: Tensor = vector.to(self._device, self._dtype).as_strided(shape, (1, 1))
        return matrix.contiguous() if names[0].startswith(f"{self.layers}.") else matrix


class SafetensorsWeights(UnloadedWeights):
    """Weights in safetensors files, which are mapped into memory.

    Args:
        module: The module. Weights outside its main list of layers are loaded immediately.
        dtype: Dtype of the parameters.
        device: Device of the parameters.
        files: Safetensors files that together contain all weights.
        prefix: Prefix, such as `"model"`, that names may have in the files but not in the module, or vice versa.
        unused: Name prefixes of parameters that f does not use and that may be missing.
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        device: torch.device,
        files: Sequence[Path],
        prefix: str = "",
        unused: tuple[str, ...] = (),
    ):
        self._containers = {name: file for file in map(Container, files) for name in file.tensors}
        self._files, self._prefix, self._unused = files, f"{prefix}.", unused
        self.missing: set[str] = set()
        """Names of the parameters that are missing from the files. f does not use them."""
        super().__init__(module, dtype, device)
        for names in self._tied:
            self._stored_name(names)

    def _stored_name(self, names: Sequence[str]) -> str | None:
        for name in names:
            for stored in (name, f"{self._prefix}{name}", name.removeprefix(self._prefix)):
                if stored in self._containers:
                    return stored
        if not names[0].startswith(self._unused):
            where = self._files[0] if len(self._files) == 1 else self._files[0].parent
            problem = f"{where}: does not contain the weights of this model: {names[0]!r} is missing"
            remedy = "If the parameter names are those of an older transformers version, omit --stream (stream=False)"
            raise KfacpackError(f"{problem}. {remedy}")
        self.missing.update(names)
        return None

    def _values(self, names: Sequence[str], shape: tuple[int, ...]) -> Tensor | None:
        if (stored := self._stored_name(names)) is None:
            return None
        tensor = map_tensor(self._containers[stored], stored)
        if tuple(tensor.shape) != shape:
            problem = f"tensor {stored!r} has shape {list(tensor.shape)}, expected {list(shape)}"
            raise KfacpackError(f"{self._containers[stored].path}: {problem}")
        values = tensor.to(self._device, self._dtype)
        # Layers stay memory-mapped while they are used. The other weights are always in use, so they are copied.
        is_mapped = values.data_ptr() == tensor.data_ptr()
        return values.clone() if is_mapped and not names[0].startswith(f"{self.layers}.") else values


class Checkpoint(ABC):
    """Saves the current weights of a module in a format that the library of the module can load."""

    def __init__(self, load_command: Callable[[Path], str]):
        self.load_command = load_command
        """Function that maps the path of a checkpoint to a line of Python code that loads the checkpoint."""

    @abstractmethod
    def check(self, path: Path) -> None:
        """Checks, before a long computation, that a checkpoint can be saved to a path.

        Raises:
            KfacpackError: If the path cannot be used.
        """

    @abstractmethod
    def save(self, path: Path) -> None:
        """Writes the module's current weights atomically.

        Raises:
            KfacpackError: If the checkpoint cannot be written to `path`.
        """


class CheckpointFile(Checkpoint):
    """A safetensors file that contains the state dict of a module. open_clip and timm can load it."""

    def __init__(self, module: nn.Module, load_command: Callable[[Path], str], prefix: str = ""):
        """Creates the checkpoint of a module.

        Args:
            module: Module whose state dict is saved.
            load_command: Function that maps the path of the file to a line of Python code that loads the file.
            prefix: Only tensors whose names start with this prefix are saved.
        """
        super().__init__(load_command)
        self._module, self._prefix = module, prefix

    def check(self, path: Path) -> None:
        """Checks that the path ends in .safetensors and is not a folder."""
        if path.suffix != ".safetensors":
            # open_clip and timm load files with any other suffix as pickles.
            raise KfacpackError(f"{path}: the name of this model's checkpoint must end in .safetensors")
        if path.is_dir():
            raise KfacpackError(f"{path}: is a folder; expected a file name")

    def save(self, path: Path) -> None:
        """Writes the state dict atomically."""
        self.check(path)
        state = self._module.state_dict()
        write_weights(path, {name: value for name, value in state.items() if name.startswith(self._prefix)})


class CheckpointFolder(Checkpoint):
    """A folder that contains the config, tokenizer and weights of a model in transformers' layout."""

    def __init__(self, fill: Callable[[Path], None], load_command: Callable[[Path], str]):
        """Creates the checkpoint of a model.

        Args:
            fill: Function that writes the files into an empty folder.
            load_command: Function that maps the path of the folder to a line of Python code that loads the folder.
        """
        super().__init__(load_command)
        self._fill = fill

    def check(self, path: Path) -> None:
        """Checks that the path either does not exist or is an empty folder."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            problem = "is a file or a folder that is not empty; expected a new folder"
            raise KfacpackError(f"{path}: {problem}. Choose a path that does not exist")

    def save(self, path: Path) -> None:
        """Writes the folder atomically."""
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
        except Exception as error:  # safetensors and tokenizers raise their own errors if a disk is full
            # A BundleError names a file in `partial`, which no longer exists.
            cause = error.__cause__ if isinstance(error, BundleError) else error
            problem = first_line(getattr(cause, "strerror", None) or cause)
            raise KfacpackError(f"{path}: could not be written: {problem}") from error


def write_weights(path: Path, state: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file atomically, one tensor at a time.

    Args:
        path: File to write.
        state: Tensors by name.
    """
    specs = {name: spec_of(tensor) for name, tensor in state.items()}
    with write_plain(path, specs, {"format": "pt"}) as write:
        for name, tensor in state.items():
            write(name, raw_bytes(tensor))


def format_call(function: str, *values: object, **named: object) -> str:
    """Formats a function call as a line of Python. Keyword arguments that are None are left out."""
    arguments = [*map(repr, values), *(f"{name}={value!r}" for name, value in named.items() if value is not None)]
    return f"{function}({', '.join(arguments)})"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
