"""Model families, and functions that load models by name. A new family needs a module and an entry in `FAMILIES`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch

from kfacpack.demo import EMBEDDED_MODELS
from kfacpack.errors import KfacpackError, did_you_mean, first_line, printable
from kfacpack.format.reference import expand_user
from kfacpack.models.families.causal_lm import CausalLMFamily
from kfacpack.models.families.clip import ClipFamily
from kfacpack.models.families.encoder import EncoderFamily
from kfacpack.models.families.open_clip import OpenClipFamily
from kfacpack.models.families.t5 import T5Family
from kfacpack.models.families.timm import TimmFamily
from kfacpack.models.model import (
    Loading,
    Model,
    ModelFamily,
    ModelRequest,
    UnknownModel,
    WeightsSource,
    cached_repositories,
)
from kfacpack.models.prompts import PromptStyle

FAMILIES: dict[str, ModelFamily] = {
    family.prefix: family
    for family in (OpenClipFamily(), TimmFamily(), ClipFamily(), T5Family(), CausalLMFamily(), EncoderFamily())
}
"""Model families by the prefix of their model names. Names without a prefix are open_clip names."""
FORMS = ", ".join([*EMBEDDED_MODELS, *(family.form for family in FAMILIES.values())])
"""Accepted forms of a model's name, for error messages."""
_EXPECTED = f"Expected one of: {FORMS}. Run `kfacpack models` for a list"


class DownloadedModel(NamedTuple):
    """A model whose weights are in the local Hub cache."""

    model: str
    """Name of the model, as expected by `load_model`."""
    family: str
    """Name of the family."""
    repository: str
    """Hub repository of the weights."""
    revision: str
    """Commit of the repository."""
    nbytes: int
    """Total size of the repository's files in bytes."""


def downloaded_models() -> list[DownloadedModel]:
    """Returns the models whose weights are in the local Hub cache. One repository may provide several models."""
    return [
        DownloadedModel(model, family.name, repository.name, repository.revision, repository.nbytes)
        for repository in cached_repositories()
        for family in FAMILIES.values()
        for model in family.downloaded_names(repository)
    ]


def split_spec(spec: str) -> tuple[str, str]:
    """Splits the full name of a model into the family's prefix and the name within the family.

    Args:
        spec: Full name, such as `"ViT-B-32"` or `"timm:vit_tiny_patch16_224"`.

    Returns:
        The prefix, which is empty for open_clip, and the name, in which a leading `~` is expanded.

    Raises:
        KfacpackError: If the prefix is unknown or the name is empty.
    """
    prefix, colon, name = spec.partition(":")
    if not colon:
        prefix, name = "", spec
    if not name:
        raise KfacpackError(f"{printable(spec)!r} does not contain a model name. {_EXPECTED}")
    if prefix not in FAMILIES:
        prefixes = [f"{prefix}:" for prefix in FAMILIES if prefix]
        raise KfacpackError(f"unknown model {printable(spec)!r}{did_you_mean(f'{prefix}:', prefixes)} {_EXPECTED}")
    return prefix, str(expand_user(name)) if name.startswith("~") else name


def load_model(
    spec: str,
    *,
    weights: str | os.PathLike[str] | None = None,
    image_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    prompts: PromptStyle | None = None,
    loading: Loading = "memory",
) -> Model:
    """Loads a pretrained model by name.

    Args:
        spec: `"tiny"`, an open_clip name (`"ViT-B-32"`, `"ViT-B-16/laion2b_s34b_b88k"`), `"timm:NAME"`,
            `"clip:NAME_OR_DIR"`, `"t5:NAME_OR_DIR"`, `"lm:NAME_OR_DIR"` or `"hf:NAME_OR_DIR"`.
        weights: A safetensors file to use instead of the published weights, or `"random"` to initialise the weights
            randomly. Use `"./random"` for a file named random.
        image_size: Side length of the input images in pixels. Position embeddings are resampled to this size.
            Defaults to the image size in the model's config.
        dtype: Dtype of the module.
        device: Device of the module.
        seed: Seed of the random initialisation.
        prompts: Prompt style of a language model: `"t5"` or `"flan"` for `t5:`, `"plain"` or `"chat"` for `lm:`.
            Defaults to the style recorded in the model's config. If none is recorded, the default is `"flan"` if the
            name of a T5 model contains "flan", `"chat"` if the tokenizer of an `lm:` model has a chat template, and
            otherwise `"t5"` or `"plain"`.
        loading: `"memory"` loads all weights into memory. `"layers"` loads the weights of a layer when the layer is
            used; choose it for `kp.estimate_task(..., stream=True)` with `hf:` and `lm:` models that do not fit into
            memory. `"shapes"` loads no weights; the parameters have arbitrary values, which is sufficient to predict
            time and memory.

    Returns:
        The model, in eval mode.

    Raises:
        KfacpackError: If the name, the device or an option is invalid, or the weights cannot be loaded.

    Example:
        >>> model = kp.load_model("tiny")
        >>> model.function.width
        128
    """
    prefix, name = split_spec(spec)
    if image_size is not None and image_size < 1:
        raise KfacpackError(f"invalid image size {image_size}; expected a positive number of pixels")
    styles = FAMILIES[prefix].prompt_styles
    if prompts is not None and prompts not in styles:
        expected = f"expected {' or '.join(styles)}" if styles else "only t5: and lm: models have prompt styles"
        raise KfacpackError(f"prompt style {printable(prompts)!r} is not available for {printable(spec)}; {expected}")
    try:
        source: WeightsSource = None if weights is None else "random" if weights == "random" else Path(weights)
        request = ModelRequest(name, source, image_size, dtype, _check_device(device), seed, prompts, loading)
        return FAMILIES[prefix].load(request)
    except UnknownModel as error:
        raise UnknownModel(f"{error} {_EXPECTED}") from error
    except ModuleNotFoundError as error:
        raise KfacpackError(f"{spec} needs the package {error.name!r}, which is not installed") from error


def resolve_model(model: Model | str) -> Model:
    """Returns `model` itself, or loads the model if `model` is a name.

    Raises:
        KfacpackError: If the argument is neither a `Model` nor a name, or the model cannot be loaded.
    """
    if isinstance(model, str):
        return load_model(model)
    if isinstance(model, Model):
        return model
    problem = f"expected a model from kp.load_model or the name of a model, got {type(model).__name__}"
    raise KfacpackError(f"{problem}. For your own module, use kp.estimate, kp.linearize or kp.Regularizer")


def _check_device(device: str | torch.device) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, ValueError) as error:
        raise KfacpackError(f"device {str(device)!r} is not available: {first_line(error)}") from error
