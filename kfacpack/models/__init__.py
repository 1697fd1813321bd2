"""Models by name: a family is one file and one line here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch

from kfacpack.errors import KfacpackError, first_line, printable
from kfacpack.models.base import Batch, Family, Model, Request, Weights
from kfacpack.models.clip import OpenClip
from kfacpack.models.downloaded import repositories
from kfacpack.models.embedded import EMBEDDED
from kfacpack.models.encoder import Encoder
from kfacpack.models.names import UnknownModel
from kfacpack.models.t5 import T5
from kfacpack.models.timm_family import Timm
from kfacpack.paths import expanded
from kfacpack.prompts import PromptStyle

__all__ = ["EMBEDDED", "FAMILIES", "FORMS", "Batch", "Family", "Model", "downloaded", "load_model", "split_spec"]

FAMILIES: dict[str, Family] = {family.prefix: family for family in (OpenClip(), Timm(), T5(), Encoder())}
"""By what stands before the colon; a name without one is open_clip's."""
FORMS = ", ".join([*EMBEDDED, *(family.form for family in FAMILIES.values())])
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
        for repository in repositories()
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
    return prefix, str(expanded(name)) if name.startswith("~") else name


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
        source: Weights = None if weights is None else "random" if weights == "random" else Path(weights)
        return FAMILIES[prefix].load(Request(name, source, image_size, dtype, _usable(device), seed, prompts))
    except UnknownModel as error:
        raise UnknownModel(f"{error}. A model is {FORMS}") from error
    except ModuleNotFoundError as error:
        raise KfacpackError(f"{spec} needs the package {error.name!r}, which is not installed") from error


def _usable(device: str | torch.device) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, ValueError) as error:
        raise KfacpackError(f"device {str(device)!r} cannot be used here: {first_line(error)}") from error
