"""Libraries, imported without torch's compiler: two seconds of importing for what nobody may ever call.

While they are imported, torchvision takes a function from torch._dynamo.utils that only `roi_align` calls, and timm has
the compiler keep off some methods. Both are given something that imports the compiler when it is called.

A torchvision that was built for CUDA, made importable next to a torch that was not.

Libraries that announce what they do on stderr. Here the library prints nothing, and the commands draw.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

_COMPILER, _UTILS = "torch._dynamo", "torch._dynamo.utils"


class _Utils(ModuleType):
    """In the place of torch._dynamo.utils. Asked for anything else, it leaves, and the real one answers."""

    @staticmethod
    def is_compile_supported(device_type: Any) -> Any:
        return import_module(_UTILS).is_compile_supported(device_type)

    def __getattr__(self, name: str) -> Any:
        # inspect asks every module for its file, and `from … import …` whether it is a package.
        if name in ("__file__", "__path__"):
            raise AttributeError(name)
        _withdraw()
        return getattr(import_module(_UTILS), name)


class _Watch:
    """On sys.meta_path. Who imports the compiler after all finds no stand-in beside it."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name == _COMPILER:
            _withdraw()


@contextmanager
def compiler_deferred() -> Iterator[None]:
    """For imports, and nothing else. Afterwards there is no trace of it but what the libraries were given."""
    lazily = getattr(torch, "_disable_dynamo", None)  # which torch itself uses, to the same end
    if _COMPILER in sys.modules or lazily is None:
        yield
        return

    def disable(fn: Callable[..., Any] | None = None, recursive: bool = True, **why: Any) -> Any:
        return lazily(fn, recursive)

    at_once = torch.compiler.disable
    sys.modules[_UTILS] = _Utils(_UTILS)
    sys.meta_path.insert(0, _Watch)
    torch.compiler.disable = disable
    try:
        yield
    finally:
        torch.compiler.disable = at_once
        sys.meta_path.remove(_Watch)
        _withdraw()


def _withdraw() -> None:
    if isinstance(sys.modules.get(_UTILS), _Utils):
        del sys.modules[_UTILS]


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


@contextmanager
def silence_logging() -> Iterator[None]:
    """No log records up to errors. What matters in them (keys left random, say) the caller has to check and raise."""
    root, before = logging.getLogger(), logging.root.manager.disable
    # logging.warning() gives a root logger without handlers one that prints, for good, even while it is disabled.
    silence = logging.NullHandler()
    root.addHandler(silence)
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
        root.removeHandler(silence)
