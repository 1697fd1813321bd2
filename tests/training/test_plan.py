"""The order of examples, the length of training and the learning rate."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kfacpack as kp
from kfacpack.training.optimizer import BatchOrder, TrainingSettings


@given(size=st.integers(1, 40), batch_size=st.integers(1, 50), seed=st.integers(0, 2**32))
def test_every_example_occurs_once_per_epoch(size, batch_size, seed):
    order = BatchOrder(size, batch_size, seed)
    steps = 3 * size  # batch_size epochs' worth for three epochs of steps
    taken = [number for step in range(steps) for number in order.batch(step)]
    for epoch in range(len(taken) // size):
        assert sorted(taken[epoch * size : (epoch + 1) * size]) == list(range(size))
    assert Counter(taken).most_common()[0][1] - Counter(taken).most_common()[-1][1] <= 1


def test_a_batch_depends_on_seed_and_step_only():
    order, other = BatchOrder(100, 32, 7), BatchOrder(100, 32, 7)
    ahead = other.batch(9)
    assert [order.batch(step) for step in range(10)][9] == ahead
    assert BatchOrder(100, 32, 8).batch(0) != order.batch(0)
    assert order.batch(0) != order.batch(1)


@pytest.mark.parametrize(
    ("given_", "steps"), [({}, 500), ({"steps": 7}, 7), ({"epochs": 2}, 7), ({"epochs": 0.1}, 1), ({"epochs": 3}, 10)]
)
def test_the_number_of_steps(given_, steps):
    assert TrainingSettings(**given_).step_count(100) == steps


def test_the_learning_rate_rises_and_falls():
    settings = TrainingSettings(warmup=0.2)
    rates = [settings.lr_factor(step, 100) for step in range(100)]
    assert rates[:20] == pytest.approx([(k + 1) / 20 for k in range(20)])
    assert rates[20] == 1.0
    assert rates[60] == pytest.approx(0.5)
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert 0 < rates[-1] < 0.005
    assert TrainingSettings(warmup=0).lr_factor(0, 1) == 1.0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"steps": 3, "epochs": 1}, "steps or epochs, got both"),
        ({"steps": 0}, "steps 0: expected a number of at least 1"),
        ({"lr": float("nan")}, "learning rate nan"),
        ({"lr": -1.0}, "learning rate -1"),
        ({"lr": 1e39}, "learning rate 1e\\+39: expected a number of at most"),
        ({"weight_decay": 1e39}, "weight decay 1e\\+39: expected a number of at most"),
        ({"batch_size": 0}, "batch size 0"),
        ({"seed": -1}, "seed -1: expected an integer"),
        ({"seed": 2**64}, "expected an integer from 0 to"),
        ({"micro_batch_size": 0}, "micro_batch_size 0"),
        ({"warmup": 2.0}, "warmup 2.0: expected a fraction"),
    ],
)
def test_invalid_settings_are_refused(wrong, words):
    with pytest.raises(kp.KfacpackError, match=words):
        TrainingSettings(**wrong)
