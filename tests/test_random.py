"""Random numbers are reproducible on every machine and uniformly distributed."""

from __future__ import annotations

import numpy as np
import pytest

from kfacpack._random import CounterRandom, philox_key


def test_a_stream_is_the_recorded_one():
    rng = CounterRandom("a name", 3)
    assert rng.integers(1000, 6).tolist() == [713, 31, 228, 124, 49, 850]
    assert rng.uniform(3).tolist() == [0.20103520154953003, 0.08706438541412354, 0.8230236172676086]


def test_streams_of_different_names_or_numbers_differ():
    first, second, third = (CounterRandom(*which).integers(2**31, 100) for which in (("a",), ("b",), ("a", 1)))
    assert not set(first.tolist()) & (set(second.tolist()) | set(third.tolist()))
    assert len({philox_key("a"), philox_key("b"), philox_key("a", 1)}) == 3


def test_numbers_are_uniform():
    rng = CounterRandom("even")
    assert np.bincount(rng.integers(10, 100_000)) == pytest.approx(np.full(10, 10_000), rel=0.05)
    values = rng.uniform(100_000, -2, 6)
    assert values.min() >= -2
    assert values.max() < 6
    assert values.mean() == pytest.approx(2, abs=0.03)
    assert rng.bernoulli(0.3, 100_000).mean() == pytest.approx(0.3, abs=0.01)


def test_grain_has_mean_zero_and_variance_one():
    grain = CounterRandom("grain").normal((100, 50, 50))
    assert grain.shape == (100, 50, 50)
    assert grain.mean() == pytest.approx(0, abs=0.01)
    assert grain.std() == pytest.approx(1, abs=0.01)
    assert np.abs(grain).max() < 2 * 3**0.5


def test_an_order_is_a_permutation():
    assert sorted(CounterRandom("order").permutation(1000).tolist()) == list(range(1000))
