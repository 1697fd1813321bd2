"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path

from kfacpack.errors import KfacpackError, printable


def expanded(path: str | os.PathLike[str]) -> Path:
    """With the folder that ~ or ~user stands for."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        problem = "no such directory: nobody here is called that"
        raise KfacpackError(f"{printable(os.fspath(path))}: {problem}. Write the path in full") from error
