"""Reads the LoRA adapters of PEFT and returns their weight changes as factors. PEFT itself is not needed.

An adapter is a folder with `adapter_config.json` and `adapter_model.safetensors`. With A (r, in) and B (out, r), the
change to a layer's weight is s B A, where s = α / r, or α / √r with rsLoRA. For embeddings, and for layers that store
their weight as (in, out), such as transformers' Conv1D, the change is the transpose of s B A. For convolutions,
A (r, …) and B (out, r, …) have more than two dimensions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from kfacpack.errors import BundleError, printable
from kfacpack.vectors.checkpoints import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONVERT,
    CheckpointTensors,
    FileTensors,
    WeightsFolder,
)
from kfacpack.vectors.parameter_change import Factors

_MERGE_FIRST = "Merge the adapter into its model with PEFT's merge_and_unload, and then extract the merged checkpoint"
ONLY_LORA = f"Only plain LoRA adapters are supported. {_MERGE_FIRST}"
"""Remedy for adapters that are not plain LoRA adapters."""
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "layer_replication": "layer replication",
    "megatron_config": "Megatron layers",
    "trainable_token_indices": "trainable tokens",
    "target_parameters": "LoRA on parameters (target_parameters)",
    "alora_invocation_tokens": "activated LoRA",
    "lora_bias": "LoRA with a bias (lora_bias)",
}
"""Unsupported variants of LoRA, by the config key that enables them."""
_INITIALISATIONS = ("gaussian", "eva", "orthogonal")
"""Initialisations of A and B that do not change the weights of the base model, unlike others such as PiSSA."""
_PREFIX = "base_model.model."
_LORA = re.compile(r"(?P<module>.+)\.lora_(?P<kind>embedding_)?(?P<factor>[AB])(?:\.default)?(?:\.weight)?")
_REPEATED_GROUP = re.compile(r"\)[*+?{]")
_MAX_PATTERN = 256
_WRAPPERS = re.compile(r"\.(?:base_layer|modules_to_save(?:\.default)?|original_module)(?=\.|$)")


@dataclass
class AdapterLayer:
    """The matrices A and B of one layer, and the factor s that multiplies their product."""

    module: str
    """Name of the layer in the model that was adapted."""
    scale: float
    is_embedding: bool
    tensors: dict[str, str] = field(default_factory=dict)
    """Names of the tensors A and B in the file."""


@dataclass(frozen=True)
class Adapter:
    """The content of a LoRA adapter. Layers and parameters have the same names as in the model that was adapted."""

    tensors: CheckpointTensors
    base: str | None
    """Name of the base model according to the config; None if the config does not contain it."""
    layers: Mapping[str, AdapterLayer]
    """Layers with LoRA factors, by layer name."""
    replaced: Mapping[str, str]
    """Names of the tensors in the file that replace whole parameters, by the name of the replaced parameter."""
    config_sha256: str
    """SHA-256 of the config file."""

    def factors(self, layer: AdapterLayer, module: nn.Module, shape: tuple[int, ...]) -> Factors:
        """Returns the factors of the change to a layer's weight.

        Args:
            layer: The layer.
            module: The corresponding layer of the base model.
            shape: Shape of this layer's weight.

        Returns:
            U (m, r) and V (r, n) in float32, whose product is the change, reshaped to (shape[0], -1).

        Raises:
            BundleError: If a tensor contains NaN or Inf, or if its shape or dtype does not match the layer.
        """
        tensors = {factor: self.tensors.read(name) for factor, name in layer.tensors.items()}
        for factor, name in layer.tensors.items():
            if not tensors[factor].is_floating_point() or not bool(tensors[factor].isfinite().all()):
                problem = "contains NaN or Inf, or does not have a floating-point dtype"
                raise BundleError(self.tensors.name, problem, f"tensor {name!r}")
        right, left = tensors["A"].double().flatten(1), tensors["B"].double().flatten(1)
        if layer.is_embedding or stores_transposed(module):
            left, right = right.T, left.T
        if getattr(module, "groups", 1) != 1:
            problem = "is a grouped convolution, which is not supported"
            raise BundleError(self.tensors.name, problem, f"layer {layer.module!r}", _MERGE_FIRST)
        rows, columns = shape[0], 1
        for side in shape[1:]:
            columns *= side
        if left.shape[0] != rows or right.shape[1] != columns or left.shape[1] != right.shape[0]:
            actual = " and ".join(str(list(tensors[factor].shape)) for factor in ("A", "B"))
            problem = f"A and B have shapes {actual}, which do not match the base model's weight of shape {list(shape)}"
            remedy = "The adapter may have been trained for another base model"
            raise BundleError(self.tensors.name, problem, f"layer {layer.module!r}", remedy)
        return (layer.scale * left).float().contiguous(), right.float().contiguous()


def stores_transposed(module: nn.Module) -> bool:
    """Returns whether a layer stores its weight as (in, out), like transformers' Conv1D (PEFT's `fan_in_fan_out`).

    Args:
        module: The layer.
    """
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def open_adapter(folder: WeightsFolder) -> Adapter | None:
    """Opens a LoRA adapter and reads its config.

    Args:
        folder: The folder with the adapter's files.

    Returns:
        The adapter, or None if the folder has no `adapter_config.json`.

    Raises:
        BundleError: If the adapter is not a LoRA adapter, uses an unsupported variant, or is incomplete.
    """
    content = folder.json_with_digest(ADAPTER_CONFIG)
    if content is None:
        return None
    config, digest = content
    _check_config(folder.name, config)
    location = folder.find(ADAPTER_WEIGHTS)
    if location is None:
        is_pickle = folder.find("adapter_model.bin") is not None
        problem = f"has {ADAPTER_CONFIG}, but no {ADAPTER_WEIGHTS}" + (", only adapter_model.bin" if is_pickle else "")
        raise BundleError(folder.name, problem, None, CONVERT if is_pickle else "Download the adapter again")
    tensors = FileTensors(folder.name, [location])
    layers: dict[str, AdapterLayer] = {}
    replaced: dict[str, str] = {}
    for name in tensors.specs:
        path = name.removeprefix(_PREFIX)
        if match := _LORA.fullmatch(path):
            if match["module"].endswith(".base_layer.out_proj"):
                # PEFT 0.21 adds the change to out_proj twice, so the effect depends on the version of PEFT.
                layer_name = match["module"].removesuffix(".base_layer.out_proj")
                problem = "has LoRA factors for torch.nn.MultiheadAttention, which are not supported"
                raise BundleError(folder.name, problem, f"layer {layer_name!r}", _MERGE_FIRST)
            module = _WRAPPERS.sub("", match["module"])
            layer = layers.get(module)
            if layer is None:
                layer = layers[module] = AdapterLayer(module, 0.0, bool(match["kind"]))
            if match["factor"] in layer.tensors:
                raise BundleError(folder.name, f"the matrix {match['factor']} occurs twice", f"layer {module!r}")
            layer.tensors[match["factor"]] = name
        elif "lora_" in path:
            raise BundleError(folder.name, "belongs to an unsupported variant of LoRA", f"tensor {name!r}", ONLY_LORA)
        else:
            replaced[_WRAPPERS.sub("", path)] = name
    for module, layer in layers.items():
        layer.scale = _scale(folder.name, config, module, layer, tensors)
    if not layers and not replaced:
        raise BundleError(folder.name, "contains no tensors")
    base = config.get("base_model_name_or_path")
    return Adapter(tensors, base if isinstance(base, str) and base else None, layers, replaced, digest)


def _check_config(name: str, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise BundleError(name, f"is {printable(str(kind))}, expected LORA", f"{ADAPTER_CONFIG}: peft_type", ONLY_LORA)
    for key, variant in _UNSUPPORTED.items():
        if config.get(key):
            raise BundleError(name, f"enables {variant}", f"{ADAPTER_CONFIG}: {key}", ONLY_LORA)
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower() not in _INITIALISATIONS:
        problem = f"is {printable(start)!r}, an initialisation that also changes the weights of the base model"
        remedy = "Convert the adapter to a plain LoRA adapter with PEFT's path_initial_model_for_weight_conversion"
        raise BundleError(name, problem, f"{ADAPTER_CONFIG}: init_lora_weights", remedy)
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        numbers = isinstance(patterns, dict) and all(_is_positive(value) for value in patterns.values())
        if not numbers:
            problem = f"is {printable(str(patterns))}, expected a positive number for each pattern"
            raise BundleError(name, problem, f"{ADAPTER_CONFIG}: {key}")
    for key in ("r", "lora_alpha"):
        if not _is_positive(config.get(key)):
            problem = f"is {printable(str(config.get(key)))}, expected a positive number"
            raise BundleError(name, problem, f"{ADAPTER_CONFIG}: {key}")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2**31


def _scale(name: str, config: Mapping[str, Any], module: str, layer: AdapterLayer, tensors: CheckpointTensors) -> float:
    """Checks that A and B exist and have the rank r given in the config, and returns s = α / r or α / √r."""
    where = f"layer {module!r}"
    if missing := [factor for factor in ("A", "B") if factor not in layer.tensors]:
        raise BundleError(name, f"the matrix {missing[0]} is missing", where, "Download the adapter again")
    shapes = {factor: tensors.specs[tensor][1] for factor, tensor in layer.tensors.items()}
    rank = _by_pattern(name, config, "rank_pattern", "r", module)
    if len(shapes["A"]) < 2 or len(shapes["B"]) < 2 or not shapes["A"][0] == shapes["B"][1] == rank:
        actual = f"A and B have the shapes {list(shapes['A'])} and {list(shapes['B'])}"
        raise BundleError(name, f"{actual}, but the config specifies rank {rank:g}", where)
    alpha = _by_pattern(name, config, "alpha_pattern", "lora_alpha", module)
    return float(alpha / rank**0.5 if config.get("use_rslora") else alpha / rank)


def _by_pattern(name: str, config: Mapping[str, Any], patterns: str, default: str, module: str) -> float:
    """Returns the value of a config key for a layer. As in PEFT, name patterns can override the key's value.

    Args:
        name: Location of the adapter, for error messages.
        config: The adapter's config.
        patterns: Key of the patterns. The first pattern that matches the end of the layer's name determines the value.
        default: Key of the value for layers that no pattern matches.
        module: Name of the layer.
    """
    for pattern, value in (config.get(patterns) or {}).items():
        try:
            # The pattern is untrusted: matching repeated groups could take exponential time.
            if len(pattern) > _MAX_PATTERN or _REPEATED_GROUP.search(pattern):
                raise ValueError(f"expected at most {_MAX_PATTERN} characters and no repeated group")
            matches = re.match(rf"(.*\.)?({pattern})$", module)
        except (re.error, ValueError) as error:
            problem = f"{printable(pattern)!r} is not a valid pattern: {error}"
            raise BundleError(name, problem, f"{ADAPTER_CONFIG}: {patterns}") from error
        if matches:
            return float(value)
    return float(config[default])
