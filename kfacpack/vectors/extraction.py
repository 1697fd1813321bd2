"""Extracts task vectors from models that were fine-tuned elsewhere: checkpoints of the same architecture and adapters.

A vector extracted from a checkpoint is its exact difference from the base model: applying the vector reproduces the
checkpoint's weights, in the dtype of the base model, bit for bit. A vector extracted from a PEFT LoRA adapter consists
of the adapter's factors. Both cover all parameters that are trained by default, and all other parameters that differ
from the base model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from kfacpack.errors import KfacpackError, TaskVectorError, abbreviate, printable
from kfacpack.format.manifest import Name, Source, first_problem
from kfacpack.format.reference import SCHEME, expand_user, is_reference, parse_address
from kfacpack.format.vector_manifest import AboutVector, CheckpointEntry, CheckpointKind, FileEntry, TaskEntry
from kfacpack.models.families import load_model
from kfacpack.models.functional import select_parameters
from kfacpack.models.model import Model
from kfacpack.vectors.adapters import Adapter, AdapterLayer, open_adapter
from kfacpack.vectors.checkpoints import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    TOWERS,
    CheckpointTensors,
    NameMatch,
    StateDictTensors,
    is_constant,
    is_head,
    match_names,
    open_file,
    open_folder,
)
from kfacpack.vectors.parameter_change import (
    Factors,
    Remainder,
    dense_change,
    exact_difference,
    factors_are_smaller,
    no_change,
    same_bits,
)
from kfacpack.vectors.storage import InMemoryVector

if TYPE_CHECKING:
    from kfacpack.format.units import OnProgress

FineTuned = str | os.PathLike[str] | Mapping[str, Tensor] | nn.Module
"""A fine-tuned model: a safetensors file, a folder, an `hf://` address, a state dict or a module."""
OnNote = Callable[[str], None]
"""Function that is called with each note for the user."""
_FAR = 0.5


@dataclass
class _Changes:
    """The changes found so far, by the names of the parameters in the base model."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    factors: dict[str, Factors] = field(default_factory=dict)
    remainders: dict[str, Remainder] = field(default_factory=dict)
    rounded: list[str] = field(default_factory=list)
    """Parameters for which the checkpoint has values that the dtype of the base model cannot represent."""
    square: float = 0.0
    """Squared norm of the differences from the base model, without the changes from LoRA factors."""
    base_square: float = 0.0
    """Squared norm of the compared parameters in the base model."""


class BaseWeights:
    """The parameters and buffers of a base model by state-dict name, and the names of tied parameters.

    Args:
        model: The base model.
    """

    def __init__(self, model: Model):
        self.model = model
        self.state: dict[str, Tensor] = {
            name: value for name, value in model.module.state_dict().items() if isinstance(value, Tensor)
        }
        first: dict[int, str] = {}
        self.aliases: dict[str, str] = {}
        """Maps each name of a parameter to the first name of the parameter. Tied parameters have several names."""
        for name, parameter in model.module.named_parameters(remove_duplicate=False):
            self.aliases[name] = first.setdefault(id(parameter), name)
        self.default = tuple(select_parameters(model.module, None, model.frozen))

    @property
    def name(self) -> str:
        """Family and name of the model, for messages."""
        return f"{self.model.family} {self.model.name}"

    def read(self, name: str) -> Tensor:
        """Returns a tensor on the CPU."""
        return self.state[name].detach().cpu()

    def fits(self, spec: tuple[str, tuple[int, ...]], name: str) -> bool:
        """Returns whether a tensor in the checkpoint has the same shape as a tensor in the model."""
        return spec[1] == tuple(self.state[name].shape)


def extract_storage(
    base: Model | str, finetuned: FineTuned, task: str | None, on_note: OnNote, on_progress: OnProgress
) -> InMemoryVector:
    """Computes the task vector of a fine-tuned model; see `TaskVector.from_checkpoint`."""
    tasks = _tasks(task)
    source = _open(finetuned)
    weights = BaseWeights(load_model(base) if isinstance(base, str) else _require_model(base))
    if isinstance(source, Adapter):
        changes = _adapter_changes(source, weights, on_note, on_progress)
    else:
        changes = _checkpoint_changes(source, weights, on_note, on_progress)
    changed = [*changes.tensors, *changes.factors]
    location = source.tensors.name if isinstance(source, Adapter) else source.name
    if not changed:
        problem = f"all weights equal those of the base model {weights.name}"
        raise TaskVectorError(f"{location}: {problem}; expected a fine-tuned model")
    _note_changes(weights, changes, changed, on_note)
    covered = {*weights.default, *changed}
    unchanged = {
        name: no_change(tuple(weights.state[name].shape)) for name in weights.default if name not in set(changed)
    }
    about = AboutVector(
        base=weights.model.base(covered),
        function=weights.model.function,
        regime="full",
        tasks=tasks,
        checkpoints=_checkpoints(finetuned, source),
    )
    return InMemoryVector(changes.tensors, about, {}, {**changes.factors, **unchanged}, changes.remainders)


def _tasks(task: str | None) -> tuple[TaskEntry, ...]:
    if task is None:
        return ()
    try:
        return (TaskEntry(source=Source(task=task)),)
    except ValidationError as error:
        raise KfacpackError(f"task {printable(str(task))!r}: {first_problem(error)[1]}") from error


def _checkpoints(finetuned: FineTuned, source: CheckpointTensors | Adapter) -> tuple[CheckpointEntry, ...]:
    """Returns a tuple with the manifest entry of the checkpoint, or an empty tuple for weights in memory."""
    tensors = source.tensors if isinstance(source, Adapter) else source
    if not isinstance(finetuned, str | os.PathLike) or not tensors.containers:
        return ()
    files = [
        FileEntry(name=_recorded_name(container.path.name), sha256=container.file_digest())
        for container in tensors.containers
    ]
    if isinstance(source, Adapter):
        files.append(FileEntry(name=ADAPTER_CONFIG, sha256=source.config_sha256))
    kind: CheckpointKind = "adapter" if isinstance(source, Adapter) else "weights"
    commit = tensors.containers[0].commit
    name = _checkpoint_name(finetuned, is_folder=isinstance(source, Adapter))
    return (CheckpointEntry(name=name, kind=kind, revision=commit, files=tuple(files)),)


def _checkpoint_name(finetuned: str | os.PathLike[str], *, is_folder: bool) -> str:
    """Returns the name of a file or folder without its location, or an address on the Hub without its revision.

    Args:
        finetuned: The path or address that the user passed.
        is_folder: Whether the checkpoint is a folder. If the path is that of a weights file in this folder, the name of
            the folder is returned.
    """
    if is_reference(finetuned) and (address := parse_address(os.fspath(finetuned))):
        kind, path = "datasets/" if address.kind == "dataset" else "", (address.path or "").strip("/")
        path = path.removesuffix(ADAPTER_WEIGHTS).rstrip("/") if is_folder else path
        return _recorded_name(f"{SCHEME}{kind}{address.repository}" + (f"/{path}" if path else ""))
    local = expand_user(finetuned).resolve()
    return _recorded_name(local.parent.name if is_folder and not local.is_dir() else local.name)


def _recorded_name(name: str) -> str:
    """Returns the name if a manifest may contain it, and "unnamed" otherwise, so that extraction does not fail."""
    try:
        return TypeAdapter[str](Name).validate_python(name)
    except ValidationError:
        return "unnamed"


def _require_model(base: Any) -> Model:
    if not isinstance(base, Model):
        raise KfacpackError(f"expected a model from kp.load_model or the name of a model, got {type(base).__name__}")
    return base


def _open(finetuned: FineTuned) -> CheckpointTensors | Adapter:
    if isinstance(finetuned, nn.Module):
        return StateDictTensors(finetuned.state_dict())
    if isinstance(finetuned, Mapping):
        return StateDictTensors(finetuned)
    if not isinstance(finetuned, str | os.PathLike):
        expected = "expected a path, an hf:// address, a state dict or a module"
        raise KfacpackError(f"{expected} as the fine-tuned model, got {type(finetuned).__name__}")
    folder = open_folder(finetuned)
    if folder is None:
        return open_file(finetuned)
    return open_adapter(folder) or folder.weights()


def _checkpoint_changes(
    source: CheckpointTensors, weights: BaseWeights, on_note: OnNote, on_progress: OnProgress
) -> _Changes:
    """Compares all tensors of a checkpoint with the base model, after checking that names and shapes agree."""
    state = weights.state
    match = match_names(source.name, source.specs, state, lambda name, target: weights.fits(source.specs[name], target))
    match = _within_trained_tower(match, weights, on_note)
    left_out = _check_names(source, match, weights, on_note)
    changes = _Changes()
    seen: dict[str, str] = {}
    names = [name for name in state if name in match.tensors and name not in left_out]
    for number, name in enumerate(names):
        on_progress(number, len(names))
        tuned = source.read(match.tensors[name])
        parameter = weights.aliases.get(name)
        if parameter is None:
            _check_buffer(source.name, name, weights.read(name), tuned)
        elif parameter in seen:
            if not torch.equal(tuned, source.read(seen[parameter])):
                problem = f"the tensors {name!r} and {parameter!r} differ, but are tied in the base model"
                raise TaskVectorError(f"{source.name}: {problem}, so a vector cannot contain both changes")
        else:
            seen[parameter] = match.tensors[name]
            _add_difference(changes, source.name, parameter, weights.read(parameter), tuned)
    on_progress(len(names), len(names))
    return changes


def _within_trained_tower(match: NameMatch, weights: BaseWeights, on_note: OnNote) -> NameMatch:
    """Leaves out the checkpoint's text tower if only the base model's vision tower was loaded with trained weights."""
    model = weights.model
    if model.family != "open_clip" or model.encode_text is not None:
        return match
    outside = [name for name in match.tensors if not name.startswith("visual.")]
    if outside:
        problem = "the base model has no trained text tower, so only the checkpoint's vision tower is used"
        on_note(f"{problem} (tensors left out: {len(outside)})")
    inside = {name: tensor for name, tensor in match.tensors.items() if name.startswith("visual.")}
    return NameMatch(match.prefix, inside, match.unexpected, match.heads)


def _check_names(source: CheckpointTensors, match: NameMatch, weights: BaseWeights, on_note: OnNote) -> frozenset[str]:
    """Checks names, shapes and dtypes, issues notes on allowed differences, and returns the heads to leave out."""
    state, where = weights.state, source.name
    if match.prefix.text:
        change = "added to" if match.prefix.is_added else "removed from"
        on_note(f"the prefix {match.prefix.text!r} was {change} the names in the checkpoint")
    present = {weights.aliases.get(name, name) for name in match.tensors}
    missing = [name for name in state if weights.aliases.get(name, name) not in present and not is_constant(name)]
    problems = []
    if refused := [name for name in missing if not _may_be_missing(name, match, weights)]:
        problems.append(f"parameters missing from the checkpoint: {len(refused)} ({_first(refused)})")
    if match.unexpected:
        problems.append(f"tensors not in the base model: {len(match.unexpected)} ({_first(match.unexpected)})")
    shapes = [name for name, tensor in match.tensors.items() if not weights.fits(source.specs[tensor], name)]
    heads = frozenset(name for name in shapes if is_head(name) and name not in weights.default)
    if wrong := [name for name in shapes if name not in heads]:
        actual, expected = list(source.specs[match.tensors[wrong[0]]][1]), list(state[wrong[0]].shape)
        problems.append(
            f"tensors with a different shape: {len(wrong)} ({wrong[0]!r} has shape {actual}, expected {expected})"
        )
    floats = {"F64", "F32", "F16", "BF16"}
    parameters = [name for name in match.tensors if name in weights.aliases]
    if wrong := [name for name in parameters if source.specs[match.tensors[name]][0] not in floats]:
        dtype = source.specs[match.tensors[wrong[0]]][0]
        problems.append(
            f"parameters that are not floating-point: {len(wrong)} ({wrong[0]!r} is {dtype}, possibly quantised)"
        )
    if problems:
        problem = "; ".join(problems)
        raise TaskVectorError(f"{where}: is not a checkpoint of {weights.name}: {printable(problem, 1000)}")
    if left_out := [*match.heads, *sorted(heads)]:
        on_note(f"the classification head is left out, because the base model has no matching head: {_first(left_out)}")
    if missing:
        on_note(f"parameters missing from the checkpoint, which count as unchanged: {len(missing)} ({_first(missing)})")
    dtypes = {source.specs[match.tensors[name]][0] for name in parameters if name not in heads}
    base = {str(state[name].dtype).removeprefix("torch.") for name in parameters}
    if len(dtypes) > 1 or dtypes - {_DTYPES[dtype] for dtype in base if dtype in _DTYPES}:
        stored = f"the checkpoint is stored in {', '.join(sorted(dtypes))}"
        on_note(f"{stored}, and the base model is loaded in {', '.join(base)}")
    return heads


_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def _may_be_missing(name: str, match: NameMatch, weights: BaseWeights) -> bool:
    """Returns whether a checkpoint may lack a parameter of the base model.

    If all tensors of the checkpoint belong to a vision tower, parameters outside of this tower may be missing.
    Otherwise, a parameter may be missing only if it is frozen in training and the checkpoint has no tensor of the
    top-level submodule to which it belongs.
    """
    for tower in TOWERS:
        if all(present.startswith(tower) for present in match.tensors):
            return not name.startswith(tower)
    part = name.partition(".")[0]
    is_whole = all(present.partition(".")[0] != part for present in match.tensors)
    return is_whole and weights.aliases.get(name, name) not in weights.default


def _first(names: tuple[str, ...] | list[str]) -> str:
    return abbreviate((repr(printable(name, 100)) for name in names), limit=3)


def _check_buffer(source: str, name: str, base: Tensor, tuned: Tensor) -> None:
    if base.shape == tuned.shape and torch.equal(base, tuned.to(base.dtype)):
        return
    if is_constant(name):
        return
    problem = f"the buffer {name!r} differs from that of the base model"
    reason = "A task vector contains only parameters, not buffers such as batch-norm statistics"
    raise TaskVectorError(f"{source}: {problem}. {reason}; fine-tune with the base model's statistics (module.eval())")


def _add_difference(changes: _Changes, source: str, name: str, base: Tensor, tuned: Tensor) -> None:
    """Records the exact change to a parameter if the parameter differs from the base model."""
    changes.base_square += float(base.float().norm()) ** 2
    if same_bits(base, tuned):
        return
    if not bool(tuned.isfinite().all()):
        raise TaskVectorError(f"{source}: tensor {name!r} contains NaN or Inf")
    if tuned.dtype != base.dtype:
        rounded = tuned.to(base.dtype)
        if not torch.equal(rounded.to(tuned.dtype), tuned):
            changes.rounded.append(name)
        if same_bits(base, rounded):
            return
    try:
        change, remainder = exact_difference(base, tuned)
    except TaskVectorError as error:
        raise TaskVectorError(f"{source}: tensor {name!r}: {error}") from error
    changes.square += float(change.norm()) ** 2
    changes.tensors[name] = change
    if remainder is not None:
        changes.remainders[name] = remainder


def _adapter_changes(adapter: Adapter, weights: BaseWeights, on_note: OnNote, on_progress: OnProgress) -> _Changes:
    """Computes the changes from an adapter's LoRA factors, and from the parameters that the adapter replaces."""
    source = adapter.tensors.name
    layers, replaced = _match_adapter(adapter, weights, on_note)
    changes = _Changes()
    total = len(layers) + len(replaced)
    for number, (name, (layer, module)) in enumerate(layers.items()):
        on_progress(number, total)
        shape = tuple(weights.state[name].shape)
        factors = adapter.factors(layer, module, shape)
        if factors_are_smaller(factors[1].shape[0], shape):
            changes.factors[name] = factors
        else:
            changes.tensors[name] = dense_change(factors, shape)
    for number, (name, tensor) in enumerate(replaced.items(), start=len(layers)):
        on_progress(number, total)
        base, tuned = weights.read(name), adapter.tensors.read(tensor)
        if tuned.shape != base.shape or not tuned.is_floating_point():
            problem = f"tensor {tensor!r} is {tuned.dtype} of shape {list(tuned.shape)}"
            raise TaskVectorError(f"{source}: {problem}, expected a floating-point tensor of shape {list(base.shape)}")
        if name not in layers:
            _add_difference(changes, source, name, base, tuned)
        elif not torch.equal(tuned.to(base.dtype), base):
            problem = f"the adapter replaces {name!r} and also has LoRA factors for it"
            raise TaskVectorError(f"{source}: {problem}; expected only one of these")
    on_progress(total, total)
    return changes


def _match_adapter(
    adapter: Adapter, weights: BaseWeights, on_note: OnNote
) -> tuple[dict[str, tuple[AdapterLayer, nn.Module]], dict[str, str]]:
    """Matches the layers and the replaced parameters in an adapter to parameters of the base model."""
    source, model = adapter.tensors.name, weights.model
    modules = dict(model.module.named_modules())
    by_weight = {f"{name}.weight": layer for name, layer in adapter.layers.items()}
    match = match_names(source, by_weight or adapter.replaced, weights.aliases, lambda name, target: True)
    layers: dict[str, tuple[AdapterLayer, nn.Module]] = {}
    for target, name in match.tensors.items() if by_weight else ():
        parameter = weights.aliases[target]
        if parameter in layers:
            problem = f"the adapter contains two changes to {parameter!r}, which has several names in the base model"
            raise TaskVectorError(f"{source}: {problem}")
        layers[parameter] = by_weight[name], modules[target.removesuffix(".weight")]
    replaced, unexpected, heads = (
        {},
        list(match.unexpected) if by_weight else [],
        list(match.heads) if by_weight else [],
    )
    for name, tensor in adapter.replaced.items():
        target_name = match.prefix.apply(name)
        if target_name in weights.aliases:
            replaced[weights.aliases[target_name]] = tensor
        else:
            (heads if is_head(name) else unexpected).append(name)
    if unexpected:
        problem = f"changes parameters that the base model does not have: {len(unexpected)} ({_first(unexpected)})"
        raise TaskVectorError(f"{source}: is not an adapter for {weights.name}, because it {problem}")
    if match.prefix.text:
        change = "added to" if match.prefix.is_added else "removed from"
        on_note(f"the prefix {match.prefix.text!r} was {change} the names in the adapter")
    if heads:
        on_note(f"the classification head is left out, because the base model has no matching head: {_first(heads)}")
    if adapter.base and adapter.base.rstrip("/").rpartition("/")[2] != model.name.rpartition("/")[2]:
        named = printable(adapter.base, 100)
        problem = f"the adapter names the base model {named!r}, but the model is {model.name!r}"
        on_note(f"{problem}; check that they have the same weights")
    return layers, replaced


def _note_changes(weights: BaseWeights, changes: _Changes, changed: list[str], on_note: OnNote) -> None:
    """Issues notes on changes to frozen parameters, on rounded parameters, and on an unusually large change."""
    if frozen := [name for name in changed if name not in weights.default]:
        problem = "parameters that are frozen in training differ from the base model and are included in the vector"
        on_note(f"{problem}: {len(frozen)} ({_first(frozen)})")
    if changes.rounded:
        dtype = str(weights.state[changes.rounded[0]].dtype).removeprefix("torch.")
        problem = f"parameters of the checkpoint are rounded to the base model's dtype {dtype}: {len(changes.rounded)}"
        on_note(f"{problem} ({_first(changes.rounded)}). Load the base model in a wider dtype to avoid this")
    if changes.base_square and changes.square > _FAR**2 * changes.base_square:
        ratio = (changes.square / changes.base_square) ** 0.5
        problem = f"the norm of the difference is {ratio:.0%} of the norm of the base model's weights"
        on_note(f"{problem}; check that the checkpoint was fine-tuned from {weights.name}")
