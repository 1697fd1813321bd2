"""Models that are included in the package and can be registered with open_clip.

Each model has three files: NAME/NAME.json, its open_clip model config; NAME/merges.txt.gz, the merges of its
tokenizer; and NAME/NAME.safetensors, its weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

from kfacpack.format.container import Container

DATA_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class EmbeddedModel:
    """A model whose config, tokenizer and weights are included in this package."""

    name: str
    """Name of the model and of its folder."""
    pretrained: Mapping[str, Any]
    """Mean and standard deviation for normalising images, under the keys of open_clip's registry of pretrained weights.

    The model config does not contain these values.
    """
    parent: Path = DATA_FOLDER
    """Folder that contains the model's folder."""

    @property
    def config(self) -> Path:
        """Path of the model config."""
        return self.parent / self.name / f"{self.name}.json"

    @property
    def merges(self) -> Path:
        """Path of the tokenizer merges."""
        return self.parent / self.name / "merges.txt.gz"

    @property
    def weights(self) -> Path:
        """Path of the weights file."""
        return self.parent / self.name / f"{self.name}.safetensors"

    @property
    def revision(self) -> str:
        """First 12 hexadecimal digits of the SHA-256 digest of the weights file."""
        return sha256(self.weights.read_bytes()).hexdigest()[:12]

    @property
    def parameters(self) -> int:
        """Number of parameters in the weights file."""
        return sum(prod(tensor.shape) for tensor in Container(self.weights).tensors.values())

    @property
    def architecture(self) -> dict[str, Any]:
        """Contents of the model config."""
        config: dict[str, Any] = json.loads(self.config.read_text(encoding="utf-8"))
        return config


_EMBEDDED_MODELS = [EmbeddedModel("tiny", pretrained={"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)})]
EMBEDDED_MODELS = {model.name: model for model in _EMBEDDED_MODELS}
"""Embedded models by name."""


@cache
def register() -> None:
    """Registers the configs of the embedded models, so that `open_clip.create_model` can build them."""
    import open_clip

    for model in EMBEDDED_MODELS.values():
        open_clip.add_model_config(model.config)
