"""Models by name: a family is one file and one line here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch

from kfacpack.demo.tiny_model import EMBEDDED_MODELS
from kfacpack.errors import KfacpackError, first_line, printable
from kfacpack.format.reference import expand_user
from kfacpack.models.families.encoder import EncoderFamily
from kfacpack.models.families.open_clip import OpenClipFamily
from kfacpack.models.families.t5 import T5Family
from kfacpack.models.families.timm import TimmFamily
from kfacpack.models.model import (
    Batch,
    Model,
    ModelFamily,
    ModelRequest,
    UnknownModel,
    WeightsSource,
    cached_repositories,
)
from kfacpack.models.prompts import PromptStyle

__all__ = ["EMBEDDED", "FAMILIES", "FORMS", "Batch", "Family", "Model", "downloaded", "load_model", "split_spec"]

FAMILIES: dict[str, ModelFamily] = {
    family.prefix: family for family in (OpenClipFamily(), TimmFamily(), T5Family(), EncoderFamily())
}
"""By what stands before the colon; a name without one is open_clip's."""
FORMS = ", ".join([*EMBEDDED_MODELS, *(family.form for family in FAMILIES.values())])
"""What `--model` may say."""


class Downloaded(NamedTuple):
    """A model whose weights are on this machine."""

    model: str
    """As `--model` names it."""
    family: str
    repository: str
    revision: str
    nbytes: int


def downloaded() -> list[Downloaded]:
    """The models that need no network: what of the Hub's is in its cache. A repository may serve several names."""
    return [
        Downloaded(model, family.name, repository.name, repository.revision, repository.nbytes)
        for repository in cached_repositories()
        for family in FAMILIES.values()
        for model in family.downloaded(repository)
    ]


def split_spec(spec: str) -> tuple[str, str]:
    """The prefix of a family, empty for open_clip's, and the name that the family knows."""
    prefix, colon, name = spec.partition(":")
    if not colon:
        prefix, name = "", spec
    if prefix not in FAMILIES or not name:
        raise KfacpackError(f"{printable(spec)!r} names no model. A model is {FORMS}")
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
) -> Model:
    """The model that `spec` names, with the weights it stands for.

    `weights`: a safetensors file in their place, or the word "random", to initialise from `seed`. A file that is called
    random is ./random. `image_size`: pixels of a side; position embeddings are resampled by the model's own library.
    `prompts`: the prompt style of a text-to-text model, "t5" or "flan"; by default the one it was trained with.
    """
    prefix, name = split_spec(spec)
    if image_size is not None and image_size < 1:
        raise KfacpackError(f"an image size of {image_size} pixels; expected a positive number")
    styles = FAMILIES[prefix].prompt_styles
    if prompts is not None and prompts not in styles:
        expected = f"expected {' or '.join(styles)}" if styles else "only t5: models have prompt styles"
        raise KfacpackError(f"prompt style {printable(prompts)!r} for {printable(spec)}: {expected}")
    try:
        source: WeightsSource = None if weights is None else "random" if weights == "random" else Path(weights)
        return FAMILIES[prefix].load(
            ModelRequest(name, source, image_size, dtype, _check_device(device), seed, prompts)
        )
    except UnknownModel as error:
        raise UnknownModel(f"{error}. A model is {FORMS}") from error
    except ModuleNotFoundError as error:
        raise KfacpackError(f"{spec} needs the package {error.name!r}, which is not installed") from error


def _check_device(device: str | torch.device) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, ValueError) as error:
        raise KfacpackError(f"device {str(device)!r} cannot be used here: {first_line(error)}") from error
