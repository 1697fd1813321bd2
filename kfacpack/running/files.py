"""Small files that appear whole or not at all."""

from __future__ import annotations

import os

from kfacpack.bundle.writer import replacing


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Who is killed half-way leaves the old file."""
    with replacing(path) as descriptor, os.fdopen(descriptor, "wb", closefd=False) as stream:
        stream.write(data)
