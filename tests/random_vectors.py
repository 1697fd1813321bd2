"""Random task vectors for tests."""

from __future__ import annotations

import torch

import kfacpack as kp
from kfacpack.format.vector_manifest import AboutVector, TaskEntry


def random_vector(model, task="toy", regime="linear", size=0.3, seed=1, params=None, **about) -> kp.TaskVector:
    """Returns a vector of Gaussian noise for a model's parameters; `about` overrides fields of its manifest."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: size * torch.randn(zero.shape, generator=generator)
        for name, zero in kp.linearize(model, params).zeros().items()
    }
    defaults = {
        "base": kp.identify(model.module, list(tensors), family=model.family, name=model.name),
        "function": model.function,
        "regime": regime,
        "tasks": (TaskEntry(source=kp.Source(task=task)),),
    }
    return kp.TaskVector(tensors, AboutVector(**{**defaults, **about}))
