"""Pictures become a batch through a model's own transform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kfacpack.errors import KfacpackError
from kfacpack.tasks.base import Example


def image_batches(transform: Callable[[Any], Tensor], model: str) -> Callable[[Sequence[Example], str], Tensor]:
    """`prepare` of an image model: N examples -> (N, 3, height, width). `transform`: PIL.Image -> one of them."""

    def prepare(examples: Sequence[Example], task: str) -> Tensor:
        for example in examples:
            if "image" not in example:
                found = ", ".join(map(repr, example))
                raise KfacpackError(f"{model} takes pictures, an example of {task!r} has {found}: choose a text model")
        # RGB before any resizing, as both libraries read their own training data: resizing a palette would garble it.
        return torch.stack([transform(example["image"].convert("RGB")) for example in examples])

    return prepare
