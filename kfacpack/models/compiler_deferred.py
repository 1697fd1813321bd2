"""Libraries, imported without torch's compiler: two seconds of importing for what nobody may ever call.

While they are imported, torchvision takes a function from torch._dynamo.utils that only `roi_align` calls, and timm has
the compiler keep off some methods. Both are given something that imports the compiler when it is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
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
