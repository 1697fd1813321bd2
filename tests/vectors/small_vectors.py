"""A small network and task vectors of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import kfacpack as kp
from kfacpack.format.container import UNSEALED, VECTOR, seal
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
    fields = {
        "base": kp.identify(model, list(tensors), family="test", name=f"network {base}"),
        "function": FUNCTION.model_copy(update={"width": width}),
        "regime": "linear",
        "tasks": (TaskEntry(source=kp.Source(task=task, dataset_size=50), training=training),),
    }
    return kp.TaskVector(tensors, AboutVector(**{**fields, **about}), {task: head(len(task))} if width == 3 else {})


def forge(path: Path, edit: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Applies `edit(header, manifest)` to a file and seals it again."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    manifest = json.loads(header["__metadata__"][VECTOR.manifest])
    edit(header, manifest)
    header["__metadata__"] = {VECTOR.seal: UNSEALED, VECTOR.manifest: json.dumps(manifest)}
    text = json.dumps(header).encode()
    blank = len(text).to_bytes(8, "little") + text
    path.write_bytes(blank.replace(UNSEALED.encode(), seal(blank).encode(), 1) + raw[8 + length :])
