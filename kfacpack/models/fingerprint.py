"""Whether data is still what it was: a digest that costs as little as one batch."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

from kfacpack.curvature.matrices.components import raw_bytes
from kfacpack.function.batch import tensors_of

if TYPE_CHECKING:
    from kfacpack.models.base import Model
    from kfacpack.tasks.base import Split

_LOOKED_AT = 32
"""How many examples are prepared for it. A change in none of them, nor in a label, is not seen."""


def fingerprint(
    model: Model, split: Split, task: str, numbers: Sequence[int] | None = None, *, labels: bool = False
) -> str:
    """Of examples, by default all of a split: some of them, spread evenly, as the model sees them, first and last too.

    With `labels`, also of the class of every one.
    """
    chosen = range(len(split)) if numbers is None else numbers
    digest = sha256(f"{len(chosen)} of {len(split)}".encode())
    if labels:
        digest.update(repr([split.label(number) for number in chosen]).encode())
    batch = model.prepare([split[chosen[place]] for place in _spread(len(chosen))], task)
    for tensor in tensors_of(batch):
        digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def _spread(size: int) -> list[int]:
    count = min(size, _LOOKED_AT)
    return [place * (size - 1) // max(1, count - 1) for place in range(count)]
