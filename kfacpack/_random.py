"""Random numbers that are identical on every platform and with every version of numpy.

The numbers are derived from the raw stream of the counter-based generator Philox, keyed by a name and a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from math import prod
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


def philox_key(name: str, number: int = 0) -> tuple[int, int]:
    """Returns the 128-bit Philox key of a random stream, as two 64-bit integers.

    Args:
        name: Name of the stream.
        number: Index of the stream among those with the same name.

    Returns:
        A key derived from the name and the number by SHA-256, so that different streams are independent.
    """
    digest = sha256(f"{name}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")


class CounterRandom:
    """A reproducible random number generator, keyed by a name and a number.

    numpy guarantees that the raw stream of Philox is the same in all versions. It does not guarantee this for the
    distributions of `numpy.random.Generator`, so the distributions are implemented here.
    """

    def __init__(self, name: str, number: int = 0):
        self._source = np.random.Philox(key=np.array(philox_key(name, number), dtype=np.uint64))

    def uniform(self, shape: int | tuple[int, ...], low: float = 0.0, high: float = 1.0) -> NDArray[np.float32]:
        """Returns float32 numbers drawn uniformly from [low, high), each with 24 random bits."""
        raw = self._source.random_raw(_count(shape)).reshape(shape)
        unit = (raw >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        return np.asarray(np.float32(low) + unit * np.float32(high - low), dtype=np.float32)

    def integers(self, bound: int, shape: int | tuple[int, ...]) -> NDArray[np.int64]:
        """Returns integers drawn uniformly from 0 to `bound - 1`."""
        raw = self._source.random_raw(_count(shape)).reshape(shape)
        return np.asarray((raw >> np.uint64(32)) * np.uint64(bound) >> np.uint64(32), dtype=np.int64)

    def bernoulli(self, probability: float, shape: int | tuple[int, ...]) -> NDArray[np.bool_]:
        """Returns booleans, each True with the given probability."""
        return np.asarray(self.uniform(shape) < np.float32(probability))

    def choice(self, items: Sequence[T]) -> T:
        """Returns one item of a sequence, chosen uniformly at random."""
        return items[int(self.integers(len(items), 1)[0])]

    def permutation(self, count: int) -> NDArray[np.int64]:
        """Returns a random permutation of the integers from 0 to `count - 1`."""
        return np.argsort(self._source.random_raw(count), kind="stable")

    def normal(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Returns approximately Gaussian noise with mean 0 and variance 1.

        Each value is the sum of four uniform 16-bit integers (the quarters of one raw 64-bit integer), shifted and
        scaled.
        """
        quarters = self._source.random_raw(_count(shape)).view(np.uint16).reshape(*shape, 4)
        total = quarters[..., 0].astype(np.float32) + quarters[..., 1] + quarters[..., 2] + quarters[..., 3]
        return np.asarray((total * np.float32(2.0**-16) - np.float32(2)) * np.float32(1.7320508), dtype=np.float32)


def _count(shape: int | tuple[int, ...]) -> int:
    return shape if isinstance(shape, int) else prod(shape)
