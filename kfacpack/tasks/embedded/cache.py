"""Pictures that were made once, kept in one safetensors file for each task. What a file holds, its reader checks.

A file has the hash of its content in its name, so a task that changes never meets what it was before. A folder that
cannot be used is no error: the pictures are made again.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from kfacpack.errors import BundleError
from kfacpack.running.files import write_whole
from kfacpack.tasks.embedded.pictures import Pictures, labelled


def place(task: str, digest: str) -> Path | None:
    """Where a task's pictures are kept; None if this user has no home."""
    name = f"{task}-{digest[:16]}.safetensors"
    if chosen := os.environ.get("KFACPACK_CACHE"):
        return Path(chosen) / name
    shared = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # The XDG specification says to ignore a path that is not absolute.
        return (Path(shared) if Path(shared).is_absolute() else Path.home() / ".cache") / "kfacpack" / name
    except RuntimeError:
        return None


def read(file: Path | None) -> Pictures | None:
    """What the file holds; None if there is none, or none that can be read."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(file.read_bytes()) if file else {}
        splits = {name.split(".")[0] for name in arrays}
        found = {split: labelled(arrays[f"{split}.images"], arrays[f"{split}.labels"]) for split in splits}
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    return found or None


def write(file: Path | None, pictures: Pictures) -> None:
    """Whole or not at all, so that several processes may make the same file at once."""
    from safetensors.numpy import save

    if file is None:
        return
    arrays = {f"{split}.{kind}": array for split, each in pictures.items() for kind, array in each._asdict().items()}
    with suppress(OSError, BundleError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, save(arrays))
