"""Small files that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from kfacpack.errors import KfacpackError


def write_whole(path: Path, data: bytes) -> None:
    """Written beside, synced, renamed: who is killed half-way leaves the old file."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise KfacpackError(f"{path}: could not be written: {error.strerror}. Nothing was changed") from error
    finally:
        beside.unlink(missing_ok=True)
