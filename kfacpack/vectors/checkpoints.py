"""Checkpoints of fine-tuned models: their files, and how their tensor names match those of a base model.

Checkpoints are safetensors files, shards with an index, folders and Hub repositories. Only safetensors files are read,
tensor by tensor; pickles are refused.

Fine-tuning code often wraps a model, so that all names in a checkpoint have an additional prefix (`bert.encoder…` for
`encoder…`, or `module.…` after distributed training). If a checkpoint contains only a vision tower, all names may lack
a prefix. Therefore, a prefix is removed from all names or added to them so that as many names as possible match the
base model. If two prefixes are equally good, the names are ambiguous and an error is raised. However, if the names
match equally well unchanged and after removing a prefix, they are left unchanged.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from kfacpack.curvature.matrices.components import FILE_TYPES, TORCH_TYPES, map_tensor
from kfacpack.errors import BundleError, HubError, KfacpackError, TaskVectorError, abbreviate, printable
from kfacpack.format.container import BUNDLE, VECTOR, Container, Spec, parse_json
from kfacpack.format.hub_client import digest_of_file, local_copy, snapshot
from kfacpack.format.reference import FileLocation, Reference, expand_user, is_reference, parse_address

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
WEIGHTS = ("model.safetensors", "open_clip_model.safetensors", "diffusion_pytorch_model.safetensors")
"""Names of weights files in Hub repositories and folders, in order of preference."""
INDEXES = tuple(f"{name}.index.json" for name in WEIGHTS)
"""Names of the index files of sharded weights."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack", ".npz")
"""Suffixes of weights files in formats other than safetensors, most of which are pickles. They are never read."""
CONVERT = "Load the file with the library that wrote it, and save the state dict with safetensors.torch.save_file"
_MAX_JSON_BYTES = 64 * 2**20


class CheckpointTensors(ABC):
    """The tensors of a checkpoint, read one at a time."""

    name: str
    """Location of the checkpoint, for error messages."""
    specs: Mapping[str, Spec]
    """Dtype (as in safetensors files) and shape of each tensor, by name."""
    containers: tuple[Container, ...] = ()
    """The open files; empty for a state dict in memory."""

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Returns a tensor on the CPU. The tensor must not be modified.

        Args:
            name: Name of the tensor.

        Raises:
            BundleError: If the tensor cannot be read.
        """


class StateDictTensors(CheckpointTensors):
    """A state dict in memory.

    Args:
        state: Tensors by name.
    """

    def __init__(self, state: Mapping[str, Any]):
        for key, value in state.items():
            if not isinstance(key, str) or not isinstance(value, Tensor):
                types = f"{type(key).__name__} and {type(value).__name__}"
                problem = f"the entry {printable(str(key))!r} has a key and a value of the types {types}"
                problem = f"{problem}, expected str and Tensor"
                raise BundleError("state dict", problem, None, "Pass the state dict of a module")
        self.name = "the state dict"
        self.specs = {
            key: (FILE_TYPES.get(value.dtype, str(value.dtype)), tuple(value.shape)) for key, value in state.items()
        }
        self._state = state

    def read(self, name: str) -> Tensor:
        """Returns a tensor on the CPU."""
        tensor: Tensor = self._state[name].detach().cpu()
        return tensor


class FileTensors(CheckpointTensors):
    """The tensors of one or more safetensors files.

    Args:
        name: Location of the checkpoint, for error messages.
        files: The files. Each tensor may occur in only one of them.
    """

    def __init__(self, name: str, files: list[FileLocation]):
        self.name = name
        self._containers: dict[str, Container] = {}
        self.specs = {}
        self.containers = tuple(map(Container, files))
        for file, container in zip(files, self.containers, strict=True):
            for kind in (VECTOR, BUNDLE):
                if kind.manifest in container.metadata:
                    raise BundleError(file, f"is a {kind.kind}, expected the weights of a model", None, kind.usage)
            for tensor, spec in container.tensors.items():
                if tensor in self._containers:
                    raise BundleError(file, "also occurs in another file of the checkpoint", f"tensor {tensor!r}")
                self._containers[tensor] = container
                self.specs[tensor] = spec.dtype, spec.shape

    def read(self, name: str) -> Tensor:
        """Maps a tensor into memory."""
        container = self._containers[name]
        spec = container.tensors[name]
        if spec.dtype not in TORCH_TYPES:
            raise BundleError(container.path, f"has the unsupported dtype {spec.dtype}", f"tensor {name!r}")
        return map_tensor(container, name)


class WeightsFolder(ABC):
    """A local folder or a folder of a Hub repository with the files of a checkpoint."""

    name: str
    """Location of the folder, for error messages."""

    @abstractmethod
    def find(self, file: str) -> FileLocation | None:
        """Returns the location of a file, or None if it does not exist.

        Args:
            file: Name of the file.
        """

    @abstractmethod
    def other_weights(self) -> list[str]:
        """Returns the names of weights files in the folder, including pickles.

        For a Hub folder, the list may be incomplete.
        """

    def json(self, file: str) -> dict[str, Any] | None:
        """Reads a file that contains a JSON object.

        Args:
            file: Name of the file.

        Returns:
            The object, or None if the file does not exist.

        Raises:
            BundleError: If the file cannot be read.
        """
        return content[0] if (content := self.json_with_digest(file)) else None

    def json_with_digest(self, file: str) -> tuple[dict[str, Any], str] | None:
        """Reads a file that contains a JSON object, and computes the SHA-256 of the file.

        Args:
            file: Name of the file.

        Returns:
            The object and the SHA-256, or None if the file does not exist.
        """
        location = self.find(file)
        if location is None:
            return None
        path = local_copy(location) if isinstance(location, Reference) else location
        try:
            if (size := path.stat().st_size) > _MAX_JSON_BYTES:
                raise BundleError(location, f"has {size} bytes, expected at most {_MAX_JSON_BYTES}")
            text = path.read_bytes()
        except OSError as error:
            raise BundleError(location, error.strerror or str(error)) from error
        # Configs from other libraries contain nulls, which the parser refuses by default.
        return parse_json(location, text, file, nulls=True), sha256(text).hexdigest()

    def weights(self) -> FileTensors:
        """Opens the weights: all shards that an index file lists or, if there is no index file, a single file.

        Raises:
            BundleError: If there are no safetensors weights, if there are several candidates, or if a shard is missing.
        """
        for index in INDEXES:
            if (content := self.json(index)) is not None:
                return self._shards(index, content)
        for name in WEIGHTS:
            if (location := self.find(name)) is not None:
                return FileTensors(self.name, [location])
        return FileTensors(self.name, [self._only_file()])

    def _only_file(self) -> FileLocation:
        others = self.other_weights()
        files = [name for name in others if name.endswith(".safetensors")]
        if len(files) == 1 and (location := self.find(files[0])) is not None:
            return location
        if len(files) > 1:
            problem = f"has {len(files)} safetensors files and no index: {abbreviate(files, limit=5)}"
            raise BundleError(self.name, problem, None, "Pass the path of one of these files")
        if pickles := [name for name in others if name.endswith(PICKLES)]:
            problem = f"has no safetensors weights, only {pickles[0]}; other formats are not read"
            raise BundleError(self.name, problem, None, CONVERT)
        expected = f"Expected {ADAPTER_CONFIG}, {INDEXES[0]} or {WEIGHTS[0]}"
        raise BundleError(self.name, "has no weights in safetensors files", None, expected)

    def _shards(self, index: str, content: Mapping[str, Any]) -> FileTensors:
        shards = content.get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(isinstance(file, str) for file in shards.values()):
            raise BundleError(self.name, "does not map each tensor to a file name", f"{index}: weight_map")
        locations = []
        for file in dict.fromkeys(shards.values()):
            where = f"{index}: weight_map"
            if not file.endswith(".safetensors"):
                problem = f"{printable(file)!r} is not the name of a safetensors file"
                raise BundleError(self.name, problem, where, CONVERT)
            if Path(file).name != file:
                problem = f"{printable(file)!r} is a path, expected the name of a file in the same folder as the index"
                raise BundleError(self.name, problem, where)
            location = self.find(file)
            if location is None:
                problem = f"the shard {file}, listed in {index}, is missing"
                raise BundleError(self.name, problem, None, "Download the checkpoint again")
            locations.append(location)
        tensors = FileTensors(self.name, locations)
        if missing := [name for name in shards if name not in tensors.specs]:
            problem = f"is listed in {index}, but {shards[missing[0]]} does not contain it"
            raise BundleError(self.name, problem, f"tensor {missing[0]!r}", "Download the checkpoint again")
        return tensors


class LocalWeightsFolder(WeightsFolder):
    """A folder in the local file system.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path):
        self.name, self._path = str(path), path

    def find(self, file: str) -> FileLocation | None:
        """Returns the path of a file, or None if it does not exist."""
        return path if (path := self._path / file).exists() else None

    def other_weights(self) -> list[str]:
        """Returns the names of all weights files in the folder, including pickles."""
        return sorted(file.name for file in self._path.iterdir() if file.suffix in (".safetensors", *PICKLES))


class HubWeightsFolder(WeightsFolder):
    """A Hub repository or a folder in it.

    Args:
        name: The `hf://` address.
        repository: Name of the repository, as OWNER/NAME.
        revision: A branch, a tag or a commit; None for the main branch.
        folder: Folder in the repository; empty for its root.
    """

    def __init__(self, name: str, repository: str, revision: str | None, folder: str = ""):
        self.name = name
        self._repository, self._revision = repository, revision
        self._folder = f"{folder.strip('/')}/" if folder.strip("/") else ""

    def find(self, file: str) -> FileLocation | None:
        """Downloads a file and returns its reference, or None if the file does not exist."""
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        reference = Reference(self._repository, f"{self._folder}{file}", self._revision)
        try:
            local_copy(reference)
        except HubError as error:
            cause = error.__cause__
            if isinstance(cause, EntryNotFoundError) and not isinstance(cause, LocalEntryNotFoundError):
                return None
            if error.unreachable and snapshot(self._repository, self._revision) is not None:
                return None  # without a network connection, only downloaded files can be used
            raise
        return reference

    def other_weights(self) -> list[str]:
        """Returns the names of pickle files in the folder. Only the two most common names are checked."""
        return [file for file in ("pytorch_model.bin", "adapter_model.bin") if self.find(file)]


def open_folder(source: str | os.PathLike[str]) -> WeightsFolder | None:
    """Opens the folder to which a source refers, or returns None if the source is a single weights file.

    Args:
        source: A path or an `hf://` address. The weights file of an adapter stands for the folder that contains it.
    """
    if is_reference(source):
        text = os.fspath(source)
        address = parse_address(text)
        if address is None:
            return None
        folder, _, file = (address.path or "").rpartition("/")
        if file == ADAPTER_WEIGHTS:
            return HubWeightsFolder(text, address.repository, address.revision, folder)
        if file.endswith((".safetensors", *PICKLES)):
            return None
        return HubWeightsFolder(text, address.repository, address.revision, address.path or "")
    path = expand_user(source)
    if path.is_dir():
        return LocalWeightsFolder(path)
    is_adapter = path.name == ADAPTER_WEIGHTS and (path.parent / ADAPTER_CONFIG).exists()
    return LocalWeightsFolder(path.parent) if is_adapter else None


def open_file(source: str | os.PathLike[str]) -> FileTensors:
    """Opens a single safetensors file.

    Args:
        source: A path or an `hf://` reference.

    Raises:
        BundleError: If the source is not a safetensors file with the weights of a model.
    """
    if os.fspath(source).endswith(PICKLES):
        raise BundleError(source, "is not a safetensors file; other formats are not read", None, CONVERT)
    location = Reference.parse(os.fspath(source)) if is_reference(source) else expand_user(source)
    return FileTensors(os.fspath(source), [location])


TOWERS = ("visual.", "vision_model.")
"""Prefixes of the names in vision towers. Some checkpoints contain only a vision tower."""
_HEAD = re.compile(
    r"(?:.*\.)?(?:classifier|classification_head|pre_classifier|heads?|head_dist|fc|score|cls|qa_outputs|lm_head|"
    r"vocab_\w+|pooler)(?:\.\w+)*\.(?:weight|bias)"
)
_CONSTANT = re.compile(
    r"(?:.*\.)?(?:position_ids|token_type_ids|attn_mask|relative_position_index|inv_freq|masked_bias)"
)
_OLD_NORMS = ((".gamma", ".weight"), (".beta", ".bias"))


class Prefix(NamedTuple):
    """A prefix that is removed from the names of the tensors in a checkpoint, or added to them."""

    text: str
    is_added: bool

    def apply(self, name: str) -> str | None:
        """Converts a name in the checkpoint to a name in the base model.

        Returns None if the prefix is to be removed, but the name does not start with it.
        """
        if self.is_added:
            return self.text + name
        return name.removeprefix(self.text) if name.startswith(self.text) else None

    def __str__(self) -> str:
        change = "adding" if self.is_added else "removing"
        return f"after {change} the prefix {self.text!r}" if self.text else "unchanged"


@dataclass(frozen=True)
class NameMatch:
    """The tensors of a checkpoint, matched to the names of the base model."""

    prefix: Prefix
    tensors: Mapping[str, str]
    """Names in the checkpoint, by the matching state-dict name in the base model."""
    unexpected: tuple[str, ...]
    """Names in the checkpoint that do not exist in the base model, other than heads and constants."""
    heads: tuple[str, ...]
    """Names of classification heads in the checkpoint that do not exist in the base model."""


def is_head(name: str) -> bool:
    """Returns whether a tensor name is typical of a classification head.

    Args:
        name: Name of a tensor.
    """
    return _HEAD.fullmatch(name) is not None


def is_constant(name: str) -> bool:
    """Returns whether a name belongs to a buffer whose values the architecture determines, such as position_ids.

    Args:
        name: Name of a tensor.
    """
    return _CONSTANT.fullmatch(name) is not None


def match_names(
    source: str, names: Iterable[str], base: Collection[str], fits: Callable[[str, str], bool]
) -> NameMatch:
    """Finds the base model's name for every tensor in a checkpoint.

    Args:
        source: Location of the checkpoint, for error messages.
        names: Names in the checkpoint.
        base: State-dict names of the base model.
        fits: Function that returns whether a tensor in the checkpoint has the shape of a tensor in the base model.

    Returns:
        The matching names, and the names without a match.

    Raises:
        TaskVectorError: If no name matches, if the prefix is ambiguous, or if two names match the same parameter.
    """
    renamed = {name: _current_name(name, base) for name in names}
    prefix = _best_prefix(source, renamed, base, fits)
    tensors: dict[str, str] = {}
    unexpected, heads = [], []
    for name, current in renamed.items():
        target = prefix.apply(current)
        if target in base:
            assert target is not None
            if target in tensors:
                problem = f"both {printable(tensors[target])} and {printable(name)} map to the parameter {target!r}"
                raise TaskVectorError(f"{source}: {problem}; expected one tensor per parameter")
            tensors[target] = name
        elif is_head(name):
            heads.append(name)
        elif not is_constant(name):
            unexpected.append(name)
    return NameMatch(prefix, tensors, tuple(unexpected), tuple(heads))


def _current_name(name: str, base: Collection[str]) -> str:
    """Converts the names gamma and beta, which early versions of BERT use in norms, to weight and bias."""
    for old, new in _OLD_NORMS:
        if name.endswith(old) and not any(other.endswith(old) for other in base):
            return name.removesuffix(old) + new
    return name


def _best_prefix(
    source: str, names: Mapping[str, str], base: Collection[str], fits: Callable[[str, str], bool]
) -> Prefix:
    counts: Counter[Prefix] = Counter()
    by_current = {current: name for name, current in names.items()}
    for name, current in names.items():
        for prefix, rest in _splits(current):
            if rest in base and fits(name, rest):
                counts[Prefix(prefix, False)] += 1
    for target in base:
        for prefix, rest in _splits(target):
            if prefix and rest in by_current and fits(by_current[rest], target):
                counts[Prefix(prefix, True)] += 1
    if not counts:
        first = abbreviate((repr(printable(name)) for name in names), limit=3) or "none"
        problem = f"has no tensor with the name and shape of a parameter of the base model. Its tensors: {first}"
        raise TaskVectorError(f"{source}: {problem}. The checkpoint may have another architecture")
    count = max(counts.values())
    best, *others = [prefix for prefix, matches in counts.items() if matches == count]
    unchanged = Prefix("", False)
    if others and unchanged in (best, *others) and not any(prefix.is_added for prefix in (best, *others)):
        # The base model itself may have both names, such as visual.transformer… and transformer….
        return unchanged
    if others:
        problem = f"the names match the base model equally well {best} and {others[0]} (number of matches: {count})"
        raise TaskVectorError(f"{source}: {problem}. Pass a state dict with the names of the base model")
    return best


def _splits(name: str) -> Iterable[tuple[str, str]]:
    """Yields each way to divide a name after a dot into a prefix and the rest, beginning with an empty prefix."""
    yield "", name
    for dot in re.finditer(r"\.", name):
        yield name[: dot.end()], name[dot.end() :]


def checkpoint_digest(path: Path, written: str) -> str:
    """Returns a hash of a checkpoint, which is a single file or the safetensors and JSON files of a folder.

    Args:
        path: The file or folder.
        written: The path as the user wrote it, for error messages.

    Raises:
        KfacpackError: If the path is not a safetensors file or a folder that contains one.
    """
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in (".safetensors", ".json"))
    else:
        # The weights of an adapter are read together with the configuration in the same folder.
        files = [file for file in (path, path.parent / "adapter_config.json") if file.is_file()]
    if not any(file.suffix == ".safetensors" for file in files):
        raise KfacpackError(f"{written}: expected a safetensors file or a folder that contains one, found neither")
    return sha256(repr([(file.name, digest_of_file(file)) for file in files]).encode()).hexdigest()
