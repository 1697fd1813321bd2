"""A torchvision that was built for CUDA, made importable next to a torch that was not."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import torch

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
OPERATORS = ("nms", "qnms")


def make_torchvision_importable() -> None:
    """Import torchvision, if it is installed; what it misses on a CPU-only torch is declared first. Safe to repeat.

    PyPI's torchvision is a CUDA build. Its C extension does not load into a CPU-only torch, which torchvision forgives,
    but then it describes two operators that the extension should have brought, and dies of their absence. open_clip,
    timm and transformers all import it, for image transforms that need neither operator.

    So the import is tried as it is, and the operators are declared only after it failed for want of them. Declaring
    them beforehand would break a torchvision that fits: its extension registers the same names, and torch allows each
    name once. A declared operator has no kernel; calling it still fails, and says so.
    """
    if find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
        for name in OPERATORS:
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(f"torchvision::{name}", SCHEMA)
        importlib.import_module("torchvision")
