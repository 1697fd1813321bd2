"""Workarounds for importing torchvision, timm, open_clip and transformers.

`compiler_deferred` imports them without loading torch's compiler, which takes two seconds and is usually not needed;
`make_torchvision_importable` makes a CUDA build of torchvision importable next to a CPU-only torch;
`silence_logging` suppresses the log messages that these libraries print to stderr.
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
    """Stand-in for torch._dynamo.utils.

    It provides the one function that torchvision imports. Access to any other attribute removes the stand-in and is
    forwarded to the real module.
    """

    @staticmethod
    def is_compile_supported(device_type: Any) -> Any:
        return import_module(_UTILS).is_compile_supported(device_type)

    def __getattr__(self, name: str) -> Any:
        # inspect looks up __file__ on every module; `from … import …` looks up __path__ to recognise packages.
        if name in ("__file__", "__path__"):
            raise AttributeError(name)
        _remove_stand_in()
        return getattr(import_module(_UTILS), name)


class _CompilerImportHook:
    """Finder on sys.meta_path that removes the stand-in as soon as torch's compiler itself is imported."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name == _COMPILER:
            _remove_stand_in()


@contextmanager
def compiler_deferred() -> Iterator[None]:
    """Defers the import of torch's compiler while other libraries are imported.

    torchvision imports a function of torch._dynamo.utils that only `roi_align` calls, and timm decorates methods with
    `torch.compiler.disable`. Inside this context, both are replaced by functions that import the compiler when called.
    Both are restored on exit. Does nothing if the compiler is already loaded.

    Yields:
        None.
    """
    lazy_disable = getattr(torch, "_disable_dynamo", None)  # torch's own decorator for the same purpose
    if _COMPILER in sys.modules or lazy_disable is None:
        yield
        return

    def disable(fn: Callable[..., Any] | None = None, recursive: bool = True, **_options: Any) -> Any:
        return lazy_disable(fn, recursive)

    original_disable = torch.compiler.disable
    sys.modules[_UTILS] = _Utils(_UTILS)
    sys.meta_path.insert(0, _CompilerImportHook)
    torch.compiler.disable = disable
    try:
        yield
    finally:
        torch.compiler.disable = original_disable
        sys.meta_path.remove(_CompilerImportHook)
        _remove_stand_in()


def _remove_stand_in() -> None:
    if isinstance(sys.modules.get(_UTILS), _Utils):
        del sys.modules[_UTILS]


SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
OPERATORS = ("nms", "qnms")


def make_torchvision_importable() -> None:
    """Imports torchvision if it is installed, and declares operators that it lacks with a CPU-only torch.

    PyPI's torchvision is a CUDA build. Its C extension does not load into a CPU-only torch; torchvision tolerates that,
    but then fails when it registers fake implementations for two operators of the extension. open_clip, timm and
    transformers import torchvision for image transforms, which need neither operator.

    The operators are declared only after the plain import failed because of them: a matching torchvision registers the
    same names itself, and torch allows each name once. A declared operator has no kernel, so calling it still raises an
    error. The function may be called repeatedly.

    Raises:
        RuntimeError: If torchvision cannot be imported for another reason.
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
    """Suppresses log records up to level ERROR.

    The caller has to check for the problems that such records would report, for example uninitialised weights.

    Yields:
        None.
    """
    root, level = logging.getLogger(), logging.root.manager.disable
    # logging.warning() permanently adds a printing handler to a root logger without handlers, even while disabled.
    handler = logging.NullHandler()
    root.addHandler(handler)
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(level)
        root.removeHandler(handler)
