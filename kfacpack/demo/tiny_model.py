"""The models that come with the package: for open_clip they are like its own, with files in a folder of ours.

NAME/NAME.json is open_clip's model config, NAME/merges.txt.gz the pairs its tokenizer merges, NAME/NAME.safetensors the
weights.
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
    name: str
    trained: Mapping[str, Any]
    """What a model config cannot say, in the words of open_clip's registry of weights: how pictures are normalised."""
    within: Path = DATA_FOLDER

    @property
    def config(self) -> Path:
        return self.within / self.name / f"{self.name}.json"

    @property
    def merges(self) -> Path:
        return self.within / self.name / "merges.txt.gz"

    @property
    def weights(self) -> Path:
        return self.within / self.name / f"{self.name}.safetensors"

    @property
    def revision(self) -> str:
        """Changes with the weights, whoever forgets to say so."""
        return sha256(self.weights.read_bytes()).hexdigest()[:12]

    @property
    def parameters(self) -> int:
        return sum(prod(tensor.shape) for tensor in Container(self.weights).tensors.values())

    @property
    def architecture(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(self.config.read_text(encoding="utf-8"))
        return config


_EMBEDDED_MODELS = [EmbeddedModel("tiny", trained={"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)})]
EMBEDDED_MODELS = {each.name: each for each in _EMBEDDED_MODELS}


@cache
def register() -> None:
    """From now on `open_clip.create_model` knows them, too."""
    import open_clip

    for each in EMBEDDED_MODELS.values():
        open_clip.add_model_config(each.config)
