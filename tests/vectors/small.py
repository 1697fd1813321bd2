"""A small network, and vectors of it."""

from __future__ import annotations

import torch
from torch import nn

import kfacpack as kp
from kfacpack.format.vector_manifest import AboutVector, TaskEntry, Training

FUNCTION = kp.Function(output="embedding", normalized=True, width=3)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3))


def head(seed: int, classes: int = 2) -> kp.Head:
    generator = torch.Generator().manual_seed(seed)
    names = tuple(f"class {number}" for number in range(classes))
    return kp.Head(torch.randn(classes, 3, generator=generator), torch.zeros(classes), names, "prototypes")


def vector(task: str = "toy", seed: int = 1, *, base: int = 0, width: int = 3, **about) -> kp.TaskVector:
    model = network(base)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
    training = Training(seed=seed, settings={"lr": 3e-4, "steps": 10, "regime": "linear"}, bundles=("a" * 64,))
    said = {
        "base": kp.identify(model, list(tensors), family="test", name=f"network {base}"),
        "function": FUNCTION.model_copy(update={"width": width}),
        "regime": "linear",
        "tasks": (TaskEntry(source=kp.Source(task=task, dataset_size=50), training=training),),
    }
    return kp.TaskVector(tensors, AboutVector(**{**said, **about}), {task: head(len(task))} if width == 3 else {})
