"""Which examples are taken: as many as asked for, drawn by the seed, none twice."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from kfacpack.errors import KfacpackError


def how_many(asked: str, size: int) -> int:
    """'256', '30%' or 'all' of `size` examples; more than there are is all of them."""
    if size < 1:
        raise KfacpackError("the data has no examples")
    if asked == "all":
        return size
    share = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)%", asked)
    if share and 0 < float(share[1]) <= 100:
        return max(1, round(size * float(share[1]) / 100))
    if re.fullmatch(r"[1-9][0-9]{0,12}", asked):
        return min(int(asked), size)
    raise KfacpackError(f"examples {asked!r}: expected a number such as 256, a share such as 30%, or 'all'")


def drawn(size: int, count: int, seed: int) -> list[int]:
    """`count` different numbers below `size`, in rising order."""
    # Not the numbers that the probes of an example are made of: those begin at another place.
    generator = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 1, 0]))
    return sorted(generator.choice(size, count, replace=False, shuffle=False).tolist())


def batched(numbers: Sequence[int], batch_size: int) -> Iterator[Sequence[int]]:
    if batch_size < 1:
        raise KfacpackError(f"batch size {batch_size}: expected at least one example")
    for start in range(0, len(numbers), batch_size):
        yield numbers[start : start + batch_size]
