"""Which examples of `train` are held out for `validation`, where there is none: as in the task arithmetic papers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

SHARE, MOST = 10, 5000
"""A tenth, and at most so many."""


def held_out(size: int) -> list[int]:
    """A tenth of `size` numbers below it, rising: one drawn from each of as many equal stretches.

    So every class of examples that lie in order of their classes has its share, and those that come in turns have, too.
    """
    count = min(size // SHARE, MOST)
    edges = [k * size // count for k in range(count + 1)] if count else []
    generator = np.random.Generator(np.random.Philox(key=0, counter=[0, 0, 2, 0]))
    return [int(generator.integers(start, stop)) for start, stop in pairwise(edges)]
