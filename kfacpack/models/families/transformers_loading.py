"""Functions that load configs, tokenizers and weights with transformers, for `t5:`, `lm:`, `hf:` and `clip:` models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kfacpack._compat import make_torchvision_importable, require, silence_logging
from kfacpack.errors import KfacpackError, first_line, printable
from kfacpack.format.container import parse_json
from kfacpack.format.hub_client import hub_errors
from kfacpack.models.functional import at_least_float32
from kfacpack.models.layer_list import parameters_on_meta
from kfacpack.models.model import ModelRequest, seeded_rng
from kfacpack.models.weights import (
    LOCAL_WEIGHTS,
    CheckpointFolder,
    PlaceholderWeights,
    SafetensorsWeights,
    UnloadedWeights,
    check_safetensors,
    format_call,
    weights_error,
)
from kfacpack.tasks.task import Example

MAX_TOKENS = 512
"""Maximum length of a text in tokens, even if the tokenizer allows more."""
# Never load pickles or run code that comes with a model.
_SAFE = {"use_safetensors": True, "trust_remote_code": False}


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Temporarily disables transformers' progress bars and logging."""
    make_torchvision_importable()
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with silence_logging():
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


def public_name(name: str) -> str:
    """Returns the model name to record in manifests: `name`, or only its last component if `name` is a folder."""
    return Path(name).resolve().name if Path(name).is_dir() else name


def config_and_tokenizer(request: ModelRequest, prefix: str) -> tuple[Any, Any]:
    """Loads the config and the tokenizer of a text model.

    Args:
        request: Request for the model. Its name is a folder, or a Hub repository if there is no such folder.
        prefix: The family's prefix, for error messages.

    Returns:
        The config and the tokenizer.

    Raises:
        KfacpackError: If the config or the tokenizer cannot be loaded, or an image size is requested.
    """
    name = request.name
    if request.image_size is not None:
        raise KfacpackError(f"{prefix}:{name} is a text model and has no image size; omit --image-size (image_size)")
    parts = "config.json, a tokenizer and model.safetensors"
    config, tokenizer = load_components(name, prefix, ("AutoConfig", "AutoTokenizer"), parts)
    return config, tokenizer


def load_components(name: str, prefix: str, classes: tuple[str, ...], parts: str) -> list[Any]:
    """Loads components of a model, other than its weights, with transformers.

    Args:
        name: A folder, or a Hub repository if there is no such folder.
        prefix: The family's prefix, for error messages.
        classes: Names of the transformers classes that load the components.
        parts: Description of the expected content of the folder, for error messages.

    Returns:
        The components in the order of `classes`.

    Raises:
        KfacpackError: If a component cannot be loaded.
    """
    require("transformers", feature=f"{prefix}:{name}")
    looks_local = name.startswith((".", "/", "~"))
    if looks_local and not Path(name).is_dir():
        raise KfacpackError(f"{prefix}:{name}: no such folder; expected a folder with {parts}")
    with quiet_transformers():
        import transformers

        try:
            return [getattr(transformers, loader).from_pretrained(name, trust_remote_code=False) for loader in classes]
        except Exception as error:  # loading a damaged folder can raise any error of these libraries
            expected = f"Expected a folder with {parts}, or a Hub repository"
            components = " and ".join(loader.removeprefix("Auto").lower() for loader in classes)
            problem = f"{prefix}:{name}: the {components} cannot be loaded: {first_line(error)}"
            raise KfacpackError(f"{problem}. {expected}") from error


def load_pretrained(
    model_class: Any, config: Any, request: ModelRequest, unused: tuple[str, ...] = ()
) -> tuple[Any, frozenset[str]]:
    """Loads a model and checks that no weights are missing. transformers would initialise missing weights randomly.

    Args:
        model_class: Model class from transformers.
        config: The model's config.
        request: Name, weights, dtype, device and seed of the model.
        unused: Name prefixes of parameters that f does not use and that may be missing.

    Returns:
        The module, in eval mode and on the requested device, and the names of the missing parameters.

    Raises:
        KfacpackError: If the weights cannot be loaded, or weights that f uses are missing.
    """
    from safetensors.torch import load_file

    name, weights, dtype = request.name, request.weights, request.dtype
    with quiet_transformers(), seeded_rng(request.seed):
        if weights == "random":
            return model_class(config).to(request.device, dtype).eval(), frozenset()
        for file in [weights] if weights else _files_in(Path(name)):
            check_safetensors(file)
        state = load_file(weights) if weights else {}
        try:
            if weights:
                model, info = model_class.from_pretrained(
                    None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
                )
            else:
                model, info = model_class.from_pretrained(
                    name, config=config, dtype=dtype, output_loading_info=True, **_SAFE
                )
        except Exception as error:  # errors of the Hub, transformers and safetensors have no common base class
            if weights:
                # A file may omit tied weights, so only the tensors that it contains can be compared.
                expected = {key: tensor for key, tensor in model_class(config).state_dict().items() if key in state}
                raise weights_error(weights, name, error, lambda: expected) from error
            problem = f"{name}: the weights cannot be loaded as safetensors: {first_line(error)}"
            raise KfacpackError(f"{problem}. {LOCAL_WEIGHTS}") from error
    if missing := sorted(key for key in info["missing_keys"] if not key.startswith(unused)):
        raise KfacpackError(f"{weights or name}: does not contain the weights of this model: {missing[0]!r} is missing")
    return model.to(request.device).eval(), frozenset(info["missing_keys"])


def load_layerwise(
    model_class: Any, config: Any, request: ModelRequest, unused: tuple[str, ...] = ()
) -> tuple[Any, frozenset[str], UnloadedWeights | None]:
    """Loads a whole model, or a model without the weights of its layers, as `request.loading` specifies.

    If random weights are requested with `"layers"`, the whole model is initialised in memory.

    Args:
        model_class: Model class from transformers.
        config: The model's config.
        request: Name, weights, dtype, device and seed of the model.
        unused: Name prefixes of parameters that f does not use and that may be missing.

    Returns:
        The module in eval mode, the names of the missing parameters, and the object that loads the weights of layers
        when they are used. The last value is None if all weights are in memory.

    Raises:
        KfacpackError: If the weights cannot be loaded, or weights that f uses are missing.
    """
    if request.loading == "memory" or (request.loading == "layers" and request.weights == "random"):
        return *load_pretrained(model_class, config, request, unused), None
    name, weights = request.name, request.weights
    with quiet_transformers(), parameters_on_meta():
        module = model_class(config).eval()
        module.tie_weights()
    if request.loading == "shapes":
        return module, frozenset(), PlaceholderWeights(module, request.dtype, request.device)
    files = [check_safetensors(file) for file in ([Path(weights)] if weights else _weight_files(name))]
    read = SafetensorsWeights(module, request.dtype, request.device, files, module.base_model_prefix, unused)
    return module, frozenset(read.missing), read


def _weight_files(name: str) -> list[Path]:
    """Returns the safetensors files in a folder or a Hub repository. Files on the Hub are downloaded if necessary."""
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        offline_remedy = LOCAL_WEIGHTS[0].lower() + LOCAL_WEIGHTS[1:]
        with hub_errors(f"the weights of {name}", name, None, offline_remedy=offline_remedy):
            folder = Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.safetensors.index.json"]))
    files = _files_in(folder)
    if not files:
        raise KfacpackError(f"{name}: no safetensors files found. {LOCAL_WEIGHTS}")
    return files


def _files_in(folder: Path) -> list[Path]:
    """Returns the safetensors files in a folder.

    If the folder contains an index, only the files that the index lists are returned. If the folder also contains
    `model.safetensors`, only this file is returned.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    if single.is_file():
        return [single]  # in this case, transformers ignores the index
    parts = parse_json(index, index.read_bytes(), "index").get("weight_map")
    if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
        raise KfacpackError(f"{index}: expected the key 'weight_map' with a file name for every tensor")
    return [folder / part for part in sorted(set(parts.values()))]


def identity_fields(
    request: ModelRequest, family: str, config: Any, module: Any, tokenizer: Any, missing: frozenset[str]
) -> dict[str, Any]:
    """Returns the fields of a `Model` that do not depend on f, such as the name, the module and the checkpoint.

    Args:
        request: The request with which the model was loaded.
        family: Name of the family.
        config: The model's config.
        module: Module of the loaded model.
        tokenizer: Tokenizer of the model.
        missing: Names of the parameters that were missing when the module was loaded.
    """
    return {
        "family": family,
        "name": public_name(request.name),
        "revision": request.revision(getattr(config, "_commit_hash", None)),
        "module": module,
        "checkpoint": transformers_checkpoint(module, tokenizer, missing),
    }


def transformers_checkpoint(module: Any, tokenizer: Any, missing: frozenset[str]) -> CheckpointFolder:
    """Returns a checkpoint with the config, weights and tokenizer of a model, in transformers' layout.

    Args:
        module: Module to save.
        tokenizer: Tokenizer to save.
        missing: Names of the parameters to leave out, because they were missing when the model was loaded.
    """

    def fill(folder: Path) -> None:
        with quiet_transformers():
            state = {name: value for name, value in module.state_dict().items() if name not in missing}
            module.save_pretrained(folder, state_dict=state if missing else None)
            tokenizer.save_pretrained(folder)

    return CheckpointFolder(
        fill, lambda path: format_call(f"transformers.{type(module).__name__}.from_pretrained", str(path))
    )


def text_columns(examples: Sequence[Example], model: str, task: str) -> dict[str, list[str]]:
    """Returns the texts of N examples by column.

    Args:
        examples: Examples with the same columns.
        model: Name of the model, for error messages.
        task: Name of the task, for error messages.

    Returns:
        For each column name, N strings.

    Raises:
        KfacpackError: If a column contains values that are not strings.
    """
    columns = list(examples[0]) if examples else []
    for example in examples:
        for column, value in example.items():
            if not isinstance(value, str):
                where = f"column {printable(column)!r} of the task {task!r}"
                problem = f"{where} contains a value of type {type(value).__name__}"
                raise KfacpackError(f"{model} expects texts, but {problem}; correct the data, or use an image model")
    return {column: [example[column] for example in examples] for column in columns}


def word_rows(output_layer: Tensor, tokenizer: Any, words: Sequence[str], model: str) -> Tensor:
    """Returns the rows of an output layer that predict the first token of each word, (K, C), in at least float32.

    Args:
        output_layer: Weights of the output layer, (vocabulary, C).
        tokenizer: Tokenizer of the model.
        words: The K words.
        model: Name of the model, for error messages.

    Raises:
        KfacpackError: If the tokenizer returns no token for a word.
    """
    ids = [tokenizer(word, add_special_tokens=False).input_ids[:1] for word in words]
    if without_token := [word for word, tokens in zip(words, ids, strict=True) if not tokens]:
        problem = f"the tokenizer of {model} returns no token for the word {without_token[0]!r}"
        raise KfacpackError(f"{problem}; use --head prototypes (head='prototypes' or kind='prototypes')")
    return at_least_float32(output_layer[torch.tensor(ids, device=output_layer.device).squeeze(1)])


def embedding_names(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of the word, position and token type embeddings. The norm after them is not included."""
    return tuple(f"{name}.weight" for name, child in module.named_modules() if isinstance(child, nn.Embedding))


def max_length(tokenizer: Any, config: Any) -> int:
    """Returns the maximum number of tokens in a text.

    This is the smallest of the model's limit, the tokenizer's limit and `MAX_TOKENS`.
    """
    positions = getattr(config, "max_position_embeddings", None) or MAX_TOKENS
    return int(min(MAX_TOKENS, tokenizer.model_max_length, positions))
