"""Data files that an installed package carries, read where they lie: importing it would take seconds."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from kfacpack.errors import KfacpackError

T = TypeVar("T")
UNDECODABLE = (OSError, EOFError, SyntaxError, ValueError, zlib.error)
"""What gzip, numpy and Pillow raise."""


@dataclass(frozen=True)
class Package:
    distribution: str
    """The name that pip knows."""
    module: str
    tested: str
    """A version that is known to carry the data."""

    @property
    def version(self) -> str:
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return "of unknown version"

    @property
    def remedy(self) -> str:
        return f"pip install --force-reinstall --no-deps {self.distribution}=={self.tested}"

    def read(self, path: str, decode: Callable[[bytes], T]) -> T:
        """What `decode` makes of the bytes of a file in the package."""
        file = self.file(path)
        try:
            return decode(file.read_bytes())
        except UNDECODABLE as error:
            problem = f"cannot be read: {getattr(error, 'strerror', None) or error or type(error).__name__}"
            raise KfacpackError(f"{file}: {problem}. It belongs to {self}; restore it: {self.remedy}") from error

    def file(self, path: str) -> Path:
        """Where a file of the package lies."""
        found = find_spec(self.module)
        if found is None or not found.submodule_search_locations:
            raise KfacpackError(
                f"the data comes with {self.distribution}, which is not installed: pip install {self.distribution}"
            )
        return Path(found.submodule_search_locations[0]) / path

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"
