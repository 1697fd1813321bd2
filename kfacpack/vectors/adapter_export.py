"""Exports a task vector as a LoRA adapter that PEFT loads onto the base model.

Notation: W (m, n) is the change to a weight, in the orientation of the parameter. The adapter stores an approximation
U V with U (m, r) and V (r, n); see `kfacpack.curvature.truncation`. If the vector stores W as factors of at most the
given rank, these factors are used as U and V. Otherwise, if no bundle is passed, U V is the truncated singular value
decomposition (SVD) of W. With a bundle, errors are measured in the norm that the bundle's curvature G defines,
‖X‖² = <X, G X>, and U V is chosen to make the error in this norm small. The result is not always optimal, so the
truncated SVD is used for every matrix for which its error in this norm is not larger.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from kfacpack.curvature.curvature import Curvature, load
from kfacpack.curvature.truncation import BlockMetric, LowRankPair, balanced, truncate, truncate_in_metric
from kfacpack.errors import KfacpackError, TaskVectorError
from kfacpack.format.identity import function_difference
from kfacpack.format.reference import COMMIT
from kfacpack.models.families import FAMILIES, load_model
from kfacpack.models.model import Model
from kfacpack.models.weights import CheckpointFolder, format_call, write_weights
from kfacpack.vectors.task_vector import TaskVector

if TYPE_CHECKING:
    from kfacpack.curvature.blocks import ParameterShapes
    from kfacpack.format.manifest import Base
    from kfacpack.format.units import OnProgress

ApproximationMethod = Literal["factors", "svd", "metric"]


class LinearVectorWarning(UserWarning):
    """Issued when a vector that was trained in the linearised model is exported.

    PEFT adds the exported change to θ0. The outputs then differ from those of the linearised model.
    """


@dataclass(frozen=True)
class ExportedMatrix:
    """Information on the change to one weight matrix in the adapter, including its approximation error."""

    parameter: str
    """Name of the parameter."""
    shape: tuple[int, ...]
    rank: int
    """Rank of the approximation."""
    method: ApproximationMethod
    """How the change is approximated: "factors" if the vector's own factors are exported without loss, "svd" for the
    truncated singular value decomposition, or "metric" if another approximation has a smaller error in the bundle's
    norm."""
    error: float
    """Relative error ‖W − U V‖ / ‖W‖ of the approximation U V of the change W, in the Frobenius norm."""
    metric_error: float | None
    """Relative error ‖W − U V‖ / ‖W‖ in the bundle's norm; None if there is no bundle or if this norm of W is zero."""
    svd_metric_error: float | None
    """Relative error of the truncated SVD in the bundle's norm; None in the same cases as `metric_error`."""


@dataclass(frozen=True)
class LostParameter:
    """A parameter of the vector that the adapter cannot contain."""

    parameter: str
    reason: str
    share: float
    """Share of ‖τ‖² that is due to this parameter."""
    metric_share: float | None
    """Share of τᵀGτ that is due to this parameter's change alone, where G is the bundle's curvature and τ the whole
    vector; None if there is no bundle or if τᵀGτ is zero."""


@dataclass(frozen=True)
class LoraExport:
    """Result of `kp.export_lora`: the folder and the approximation errors of a LoRA adapter.

    Example:
        >>> result = kp.export_lora(vector, "adapter", rank=16, bundle="others.kfac")
        >>> worst = max(result.matrices, key=lambda matrix: matrix.error)
    """

    path: Path
    rank: int
    """Largest rank in the adapter."""
    nbytes: int
    """Size of `adapter_model.safetensors` in bytes."""
    matrices: tuple[ExportedMatrix, ...]
    lost: tuple[LostParameter, ...]
    """Parameters that the vector changes but the adapter does not."""
    error: float
    """Relative error ‖τ − τ'‖ / ‖τ‖ over all parameters, including those in `lost`; τ' is the adapter's change."""
    metric_error: float | None
    """Relative error ‖τ − τ'‖ / ‖τ‖ in the bundle's norm; None if there is no bundle or if this norm of τ is zero."""


def export_lora(
    vector: TaskVector | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    rank: int,
    bundle: Curvature | str | os.PathLike[str] | None = None,
    model: Model | nn.Module | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> LoraExport:
    """Writes a task vector as a LoRA adapter, a folder that `peft.PeftModel.from_pretrained` loads onto the base model.

    The adapter contains the changes to the weights of linear layers and to the fused input projections of
    `nn.MultiheadAttention`. Changes to all other parameters are left out and listed in the result. These include
    output projections of `nn.MultiheadAttention`, convolutions, weights that several layers share, biases, norms, class
    tokens and embeddings. If the vector stores a change as factors of at most the given rank, the change is exported
    without loss.

    Args:
        vector: A task vector, or the path of its file.
        path: Folder to write. If it exists, it must be empty.
        rank: Maximum rank of each matrix.
        bundle: A curvature, or the path of a bundle. If it is passed, the approximation of each matrix is chosen so
            that its error is small in the norm that the curvature defines. Parameters that the bundle does not cover
            are approximated by the truncated SVD.
        model: The base model. Only its architecture is used. By default, the base model that the vector records is
            built with random weights.
        on_progress: Called with the number of parameters done and the total number.

    Returns:
        The approximation error of each matrix, and the parameters that the adapter does not contain.

    Raises:
        KfacpackError: If the rank is less than 1, if the bundle was estimated for another base model or f, if the
            vector changes no parameter that an adapter can contain, or if the folder is not empty.

    Example:
        >>> kp.export_lora("dtd.safetensors", "dtd-lora", rank=16, bundle="dtd.kfac")  # doctest: +SKIP
        >>> peft.PeftModel.from_pretrained(model.module, "dtd-lora")  # doctest: +SKIP
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise KfacpackError(f"the LoRA rank is {rank}, expected a positive integer")
    expected: tuple[tuple[str, object, tuple[type, ...]], ...] = (
        ("vector", vector, (TaskVector, str, os.PathLike)),
        ("path", path, (str, os.PathLike)),
        ("bundle", bundle, (Curvature, str, os.PathLike, type(None))),
        ("model", model, (Model, nn.Module, type(None))),
    )
    for argument, value, types in expected:
        if not isinstance(value, types):
            names = " or ".join(kind.__name__ for kind in types if kind is not type(None))
            raise KfacpackError(f"export_lora: {argument}: expected {names}, got {type(value).__name__}")
    vector = vector if isinstance(vector, TaskVector) else TaskVector.load(vector)
    curvature = load(bundle) if isinstance(bundle, str | os.PathLike) else bundle
    if curvature is not None:
        _check_bundle(vector, curvature)
    base = vector.about.base
    module = _module(base, model)
    folder = Path(path)
    pairs: dict[str, LowRankPair] = {}
    writer = CheckpointFolder(
        lambda target: _write(target, pairs, targets, module, base),
        lambda target: format_call("peft.PeftModel.from_pretrained", "MODEL", str(target)),
    )
    writer.check(folder)
    shapes = {parameter.name: parameter.shape for parameter in base.parameters}
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    owners = {name: _target(module, name, shape, uses) for name, shape in shapes.items()}
    targets = {name: owner for name, owner in owners.items() if isinstance(owner, Target)}
    if not targets:
        first = next((f"{name!r} is {reason}" for name, reason in owners.items()), "it has no parameters")
        problem = f"the vector has no weight that a LoRA adapter can contain: {first}"
        raise TaskVectorError(f"{problem}. Expected weights of linear layers")
    if vector.is_linear:
        problem = "the vector was trained in the linearised model f + J τ; with the adapter, the model has the weights"
        problem = f"{problem} θ0 + τ, and its outputs differ from those of the linearised model"
        warnings.warn(problem, LinearVectorWarning, stacklevel=2)

    matrices = []
    for number, name in enumerate(targets):
        on_progress(number, len(targets))
        metric = BlockMetric(curvature, name, shapes) if curvature else None
        pair, matrix = _approximate(vector, name, rank, metric)
        if pair is not None:
            pairs[name] = pair
            matrices.append(matrix)
    if not pairs:
        raise TaskVectorError("the vector changes no weight that a LoRA adapter can contain")
    totals = _totals(vector, curvature, pairs, shapes)
    lost = tuple(_lost(vector, curvature, owners, totals, shapes))
    writer.save(folder)
    on_progress(len(targets), len(targets))
    return LoraExport(
        path=folder,
        rank=max(matrix.rank for matrix in matrices),
        nbytes=(folder / "adapter_model.safetensors").stat().st_size,
        matrices=tuple(matrices),
        lost=lost,
        error=_ratio(totals.error, totals.norm) or 0.0,
        metric_error=_ratio(totals.metric_error, totals.metric) if curvature else None,
    )


def _check_bundle(vector: TaskVector, curvature: Curvature) -> None:
    about, name = vector.about, str(curvature.bundle.path) if curvature.bundle else "the bundle"
    own = {parameter.name: parameter for parameter in about.base.parameters}
    common = [parameter for parameter in curvature.about.base.parameters if parameter.name in own]
    if not common:
        raise KfacpackError(f"{name}: covers no parameter of the vector; expected a bundle for {about.base.name}")
    for parameter in common:
        if own[parameter.name] != parameter:
            problem = f"has a different base model than the vector: the parameter {parameter.name!r} differs"
            raise KfacpackError(f"{name}: {problem}. Use a bundle that was estimated for {about.base.name}")
    if change := function_difference(curvature.about.function, about.function):
        raise KfacpackError(f"{name}: is for a different function f than the vector: {change}")


def _module(base: Base, model: Model | nn.Module | None) -> nn.Module:
    """Returns the module of the passed model or, if `model` is None, a new module with the architecture of `base`."""
    if model is None:
        prefix = next((family.prefix for family in FAMILIES.values() if family.name == base.family), None)
        remedy = "Pass the model: --model MODEL (model=…)"
        if prefix is None:
            problem = f"the architecture of {base.name} is unknown: there is no model family {base.family!r}"
            raise KfacpackError(f"{problem}. {remedy}")
        try:
            return load_model(f"{prefix}:{base.name}" if prefix else base.name, weights="random").module
        except KfacpackError as error:
            raise KfacpackError(f"the model {base.name} cannot be built: {str(error).rstrip('.')}. {remedy}") from error
    return model.module if isinstance(model, Model) else model


class Target(NamedTuple):
    """A weight that PEFT can adapt."""

    module: str
    """Name of the module that PEFT replaces."""
    transposed: bool
    """Whether the weight has shape (inputs, outputs), as in transformers' Conv1D."""


def _target(module: nn.Module, name: str, shape: tuple[int, ...], uses: Mapping[int, int]) -> Target | str:
    """Returns the layer that PEFT adapts for a parameter, or the reason why PEFT cannot adapt the parameter."""
    owner_name, _, attribute = name.rpartition(".")
    try:
        owner = module.get_submodule(owner_name)
        parameter = getattr(owner, attribute)
    except AttributeError as error:
        raise TaskVectorError(f"the model has no parameter {name!r}; load the vector's base model") from error
    kind, parent_name = type(owner).__name__, owner_name.rpartition(".")[0]
    fused = isinstance(owner, nn.MultiheadAttention) and attribute == "in_proj_weight"
    conv1d = kind == "Conv1D" and attribute == "weight"
    if not (fused or conv1d or (isinstance(owner, nn.Linear) and attribute == "weight")):
        return f"a bias of {kind}" if attribute.endswith("bias") else f"a parameter of {kind}"
    if tuple(parameter.shape) != shape:
        problem = f"{name!r} has shape {list(parameter.shape)} in the model, but {list(shape)} in the vector"
        raise TaskVectorError(f"{problem}; load the vector's base model")
    if uses[id(parameter)] > 1:
        return "shared with another layer"
    parent = module.get_submodule(parent_name) if owner_name else owner
    if fused:
        return Target(owner_name, False)
    if isinstance(parent, nn.MultiheadAttention):
        # PEFT 0.21 adds these factors twice (huggingface/peft pull request 3774), so no file works with all versions.
        return "the output projection of nn.MultiheadAttention, whose factors PEFT adds twice"
    return Target(owner_name, conv1d)


def _approximate(
    vector: TaskVector, name: str, rank: int, metric: BlockMetric | None
) -> tuple[LowRankPair | None, ExportedMatrix]:
    """Approximates the change to a weight.

    Returns:
        The factors in float32 (None if the change is zero), and a report on the approximation.
    """
    W = vector[name].reshape(vector[name].shape[0], -1).double()
    stored = vector.factors(name)
    size = metric.quadratic(W) if metric else 0.0

    def measured(pair: LowRankPair, method: ApproximationMethod, plain: float | None = None) -> ExportedMatrix:
        rest = W - pair[0].double() @ pair[1].double()
        error = _ratio(float(rest.square().sum()), float(W.square().sum())) or 0.0
        drift = _ratio(metric.quadratic(rest), size) if metric else None
        shape = tuple(vector[name].shape)
        return ExportedMatrix(name, shape, len(pair[1]), method, error, drift, drift if plain is None else plain)

    if stored is not None and len(stored[1]) <= rank:
        return (stored if len(stored[1]) else None), measured(stored, "factors")
    plain = balanced(*truncate(W, rank))
    result = measured(plain, "svd")
    if metric and result.metric_error and (factors := metric.kronecker()):
        pair = balanced(*truncate_in_metric(W, *factors, rank))
        other = measured(pair, "metric", result.metric_error)
        if other.metric_error is not None and other.metric_error < result.metric_error:
            return pair, other
    return (plain if result.rank else None), result


@dataclass
class _Totals:
    """Squares of the Frobenius norm and the bundle's norm, for the vector and for its difference from the adapter."""

    norm: float = 0.0
    error: float = 0.0
    metric: float = 0.0
    metric_error: float = 0.0


def _totals(
    vector: TaskVector, curvature: Curvature | None, pairs: Mapping[str, LowRankPair], shapes: ParameterShapes
) -> _Totals:
    def rest(name: str) -> Tensor:
        change = vector[name].double()
        if name in pairs:
            U, V = pairs[name]
            change = change - (U.double() @ V.double()).reshape(change.shape)
        return change

    totals = _Totals()
    for name in vector:
        totals.norm += float(vector[name].double().square().sum())
        totals.error += float(rest(name).square().sum())
    for block in curvature.blocks if curvature else ():
        if names := [name for name in block.parameters if name in vector]:
            totals.metric += float(block.quadratic({name: vector[name].double() for name in names}, shapes))
            totals.metric_error += float(block.quadratic({name: rest(name) for name in names}, shapes))
    return totals


def _lost(
    vector: TaskVector,
    curvature: Curvature | None,
    owners: Mapping[str, Target | str],
    totals: _Totals,
    shapes: ParameterShapes,
) -> Iterator[LostParameter]:
    for name, reason in owners.items():
        change = vector[name].double()
        if isinstance(reason, Target) or not bool(change.any()):
            continue
        drift = None
        if curvature and totals.metric > 0:
            blocks = [block for block in curvature.blocks if name in block.parameters]
            drift = sum(float(block.quadratic({name: change}, shapes)) for block in blocks) / totals.metric
        yield LostParameter(name, reason, float(change.square().sum()) / totals.norm, drift)


def _ratio(square: float, whole: float) -> float | None:
    """Returns the ratio of two norms, given their squares, or None if the second square is not positive."""
    return sqrt(max(square, 0.0) / whole) if whole > 0 else None


def _write(
    folder: Path, pairs: Mapping[str, LowRankPair], targets: Mapping[str, Target], module: nn.Module, base: Base
) -> None:
    """Writes adapter_config.json and adapter_model.safetensors into an empty folder."""
    factors: dict[str, LowRankPair] = {}
    for name, (U, V) in pairs.items():
        factors[targets[name].module] = (V.T, U.T) if targets[name].transposed else (U, V)
    ranks = {name: len(V) for name, (_, V) in factors.items()}
    for name, rank in ranks.items():
        if isinstance(owner := module.get_submodule(name), nn.MultiheadAttention):
            # PEFT always adapts both weights of this layer, with the same rank.
            width = owner.embed_dim
            factors[f"{name}.base_layer.out_proj"] = torch.zeros(width, rank), torch.zeros(rank, width)
    largest = max(ranks.values(), default=1)
    # PEFT uses the first pattern that matches the end of a name, so longer patterns must come first.
    pattern = {name: ranks[name] for name in sorted(ranks, key=len, reverse=True)}
    pattern = pattern if any(rank != largest for rank in ranks.values()) else {}
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base.name,
        "revision": base.revision if base.revision and COMMIT.fullmatch(base.revision) else None,
        "r": largest,
        "lora_alpha": largest,
        "rank_pattern": pattern,
        "alpha_pattern": pattern,
        "target_modules": _target_modules(list(ranks), (name for name, _ in module.named_modules())),
        "fan_in_fan_out": all(targets[name].transposed for name in pairs),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    state = {}
    for key, (U, V) in factors.items():
        state[f"base_model.model.{key}.lora_A.weight"] = V.contiguous()
        state[f"base_model.model.{key}.lora_B.weight"] = U.contiguous()
    write_weights(folder / "adapter_model.safetensors", state)


def _target_modules(names: list[str], modules: Iterable[str]) -> list[str] | str:
    """Returns the value of the config key `target_modules` that selects exactly the modules with the given names.

    PEFT also adapts modules whose names end with a listed name. If the model has such modules, a regular expression is
    returned instead of a list.
    """
    suffixes = tuple(f".{name}" for name in names)
    if any(module.endswith(suffixes) and module not in names for module in modules):
        return "|".join(map(re.escape, names))
    return names
