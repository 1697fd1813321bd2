"""Which examples a step takes: a function of the seed and the step, so that there is no state to keep or to lose.

Epochs follow each other, each in an order of its own; a batch that begins in one may end in the next. So every batch is
full, and every example is taken once an epoch, whatever the batch size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from kfacpack.running import processes
from kfacpack.tasks.sampling import batched


class Order:
    def __init__(self, size: int, batch_size: int, seed: int):
        self._size = size
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = lru_cache(maxsize=2)(self._shuffled)

    def batch(self, step: int) -> list[int]:
        """The examples of step number `step`, from 0, by their place in the split."""
        start = step * self._batch_size
        return [self._epoch(k // self._size)[k % self._size] for k in range(start, start + self._batch_size)]

    def own(self, step: int, at_once: int | None) -> list[Sequence[int]]:
        """Of a step's examples those of this process, as many together as are computed at once; None: all."""
        own = self.batch(step)[processes.rank() :: processes.count()]
        return list(batched(own, at_once or max(1, len(own))))

    def _shuffled(self, epoch: int) -> list[int]:
        # Other numbers than those that examples and probes are drawn by: those begin at other places.
        generator = np.random.Generator(np.random.Philox(key=self._seed, counter=[0, epoch, 2, 0]))
        found: list[int] = generator.permutation(self._size).tolist()
        return found
