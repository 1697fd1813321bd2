"""The pictures of a task, as arrays: what they are, what they hash to, how they are divided."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kfacpack.drawing.dice import Dice

Bytes = NDArray[np.uint8]


class Labelled(NamedTuple):
    images: Bytes
    """Grey (N, height, width) or colour (N, height, width, 3)."""
    labels: NDArray[np.int32]
    """(N,), indices into the task's classes."""


Pictures = Mapping[str, Labelled]
"""Split -> its examples, in order."""


def labelled(images: NDArray[np.integer], labels: NDArray[np.integer]) -> Labelled:
    return Labelled(np.ascontiguousarray(images, dtype=np.uint8), np.ascontiguousarray(labels, dtype=np.int32))


def digest(pictures: Pictures) -> str:
    """SHA-256 over every split's name, shapes, pixels and labels."""
    total = sha256()
    for split in sorted(pictures):
        images, labels = pictures[split]
        total.update(f"{split} {images.shape} {labels.shape}\n".encode())
        total.update(np.ascontiguousarray(images, dtype=np.uint8).tobytes())
        total.update(np.ascontiguousarray(labels, dtype="<i4").tobytes())
    return total.hexdigest()


def divided(everything: Labelled, sizes: Mapping[str, int], name: str) -> Pictures:
    """Shuffled, by the name of the task, and dealt out to the splits."""
    order = Dice(f"tasks/{name}/splits").order(len(everything.labels))
    pictures, start = {}, 0
    for split, size in sizes.items():
        chosen = order[start : start + size]
        pictures[split] = Labelled(everything.images[chosen], everything.labels[chosen])
        start += size
    return pictures
