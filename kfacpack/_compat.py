"""Checks for required packages, and workarounds for importing torchvision, timm, open_clip and transformers.

If a package is missing or too old, `require` raises an error that contains the command to install it.
`compiler_deferred` prevents model libraries from importing torch's compiler. The import takes two seconds and is
usually unnecessary. `make_torchvision_importable` makes a CUDA build of torchvision importable with a CPU-only torch.
`silence_logging` suppresses the log messages that model libraries print to stderr.
"""

from __future__ import annotations

import importlib
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal

from kfacpack.errors import KfacpackError

Extra = Literal["demo", "ray", "report", "timm"]
"""Name of an extra of kfacpack (a group of optional packages), such as `report` in `pip install 'kfacpack[report]'`."""

MINIMUM = {
    "datasets": "3.0.0",
    "huggingface_hub": "0.34.0",
    "lazy_loader": "0.4",
    "numpy": "1.26.0",
    "open_clip_torch": "3.0.0",
    "pillow": "10.1.0",
    "pydantic": "2.12.0",
    "pyyaml": "6.0",
    "rich": "13.7.0",
    "safetensors": "0.4.3",
    "torch": "2.6.0",
    "transformers": "4.56.0",
    "typer": "0.20.0",
    "timm": "1.0.17",
    "ray": "2.60.0",
    "jinja2": "3.1.0",
    "matplotlib": "3.8.0",
    "fonttools": "4.43.0",
    "mlxtend": "0.22.0",
    "scikit-image": "0.22.0",
    "scikit-learn": "1.3.0",
}
"""Oldest supported version of each package, as in pyproject.toml. `make compat` runs tests with these versions."""

EXTRAS: dict[Extra, tuple[str, ...]] = {
    "demo": ("scikit-learn", "scikit-image", "mlxtend", "fonttools", "matplotlib", "jinja2"),
    "ray": ("ray",),
    "report": ("matplotlib", "jinja2"),
    "timm": ("timm",),
}
"""Packages that each extra installs, as in pyproject.toml."""

_MODULES = {
    "fonttools": "fontTools",
    "open_clip_torch": "open_clip",
    "pillow": "PIL",
    "pyyaml": "yaml",
    "scikit-image": "skimage",
    "scikit-learn": "sklearn",
}
"""Import names of the packages that have a different name on PyPI."""


def require(*packages: str, extra: Extra | None = None, feature: str = "kfacpack") -> None:
    """Checks that packages are installed in supported versions, without importing them.

    Args:
        *packages: Names of the packages on PyPI. Defaults to all packages in the extra.
        extra: Extra of kfacpack that installs the packages; None for packages that kfacpack always needs.
        feature: Name of the feature that needs the packages, used in the error message.

    Raises:
        KfacpackError: If a package is missing, or older than the version in `MINIMUM`. The message contains the command
            that installs it.
    """
    packages = packages or (EXTRAS[extra] if extra else ())
    if missing := [package for package in packages if find_spec(_MODULES.get(package, package)) is None]:
        raise missing_packages(missing, extra=extra, feature=feature)
    for package in packages:
        try:
            installed = version(package)
        except PackageNotFoundError:
            continue  # importable without metadata, for example from a source tree
        if package in MINIMUM and _release(installed) < _release(MINIMUM[package]):
            bound = f"{package}>={MINIMUM[package]}"
            problem = f"{feature} needs {package} >= {MINIMUM[package]}, found {installed}"
            raise KfacpackError(f"{problem}; run: pip install '{bound}'")


def missing_packages(packages: Sequence[str], *, extra: Extra | None, feature: str) -> KfacpackError:
    """Returns the error for packages that are not installed; see `require` for the arguments."""
    verb = "is" if len(packages) == 1 else "are"
    command = f"pip install 'kfacpack[{extra}]'" if extra else f"pip install {' '.join(packages)}"
    return KfacpackError(f"{feature} needs {', '.join(packages)}, which {verb} not installed; run: {command}")


def _release(text: str) -> tuple[int, ...]:
    """Returns the numeric components of a version without trailing zeros, for example (2, 6) for 2.6.0a0+git123.

    Pre-release and local version suffixes are ignored.
    """
    match = re.match(r"\d+(\.\d+)*", text)
    numbers = [int(number) for number in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


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
    """Finder on sys.meta_path that removes the stand-in `_Utils` as soon as torch's compiler itself is imported."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name == _COMPILER:
            _remove_stand_in()


@contextmanager
def compiler_deferred() -> Iterator[None]:
    """Defers the import of torch's compiler while other libraries are imported.

    Two libraries would otherwise load the compiler: torchvision imports `is_compile_supported` from
    torch._dynamo.utils, although only `roi_align` calls this function, and timm decorates methods with
    `torch.compiler.disable`. Inside this context, both functions are replaced by versions that import the compiler only
    when it is needed. The originals are restored on exit. Does nothing if the compiler is already loaded.

    Yields:
        None.
    """
    import torch

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
    """Imports torchvision if it is installed, even if it is a CUDA build and torch is CPU-only.

    PyPI's torchvision is a CUDA build, whose C extension cannot be loaded with a CPU-only torch. torchvision ignores
    the loading error, but then fails to register fake implementations for two operators of the extension. This function
    declares the two operators. open_clip, timm and transformers import torchvision for its image transforms, which do
    not use these operators.

    The operators are declared only if the import fails because they are missing: a matching torchvision declares them
    itself, and torch allows each operator to be declared only once. An operator declared here has no kernel, so calling
    it still raises an error. This function may be called repeatedly.

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
        import torch

        for name in OPERATORS:
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(f"torchvision::{name}", SCHEMA)
        importlib.import_module("torchvision")


@contextmanager
def silence_logging() -> Iterator[None]:
    """Suppresses log records up to and including level ERROR inside this context.

    The caller must check for the problems that these records would report, for example uninitialised weights.

    Yields:
        None.
    """
    root, level = logging.getLogger(), logging.root.manager.disable
    # logging.warning() permanently adds a printing handler to a root logger without handlers, even while
    # logging is disabled.
    handler = logging.NullHandler()
    root.addHandler(handler)
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(level)
        root.removeHandler(handler)
