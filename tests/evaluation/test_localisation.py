"""Localisation against the full Jacobian, and AUROC against counting pairs."""

from __future__ import annotations

import pytest
import torch
from evaluation.toy import EVALUATION_SETS, TASKS, change, emulate_device, inputs, task_vector
from hypothesis import given
from hypothesis import strategies as st
from kit import refused
from toys import toy_model

import kfacpack as kp
from kfacpack.evaluation.disentanglement import auroc, localisation

NAMES = ("one", "two", "three")


@pytest.fixture(scope="module")
def model():
    return toy_model()


def sizes(model, vector, evaluation_set):
    x = inputs(model, evaluation_set)
    if vector.regime == "linear":
        return change(model, x, vector).square().sum(1)
    with torch.no_grad():
        return (vector.apply(model.module)(x) - model.module(x)).square().sum(1)


@pytest.mark.parametrize("regime", ["linear", "full"])
def test_changes_equal_those_of_the_full_jacobian(model, regime):
    # "three" has examples, but no vector.
    vectors = {name: task_vector(model, TASKS[name], regime, size=0.1 * k) for k, name in enumerate(NAMES[:2], 1)}
    progress = []
    measured = localisation(
        model,
        list(EVALUATION_SETS.values()),
        vectors,
        batch_size=8,
        on_progress=lambda done, total: progress.append((done, total)),
    )
    looks = 60 if regime == "linear" else 180
    assert (progress[0], progress[-1]) == ((0, looks), (looks, looks))
    assert list(measured["vectors"]) == list(NAMES[:2])
    for name, vector in vectors.items():
        expected = {task: sizes(model, vector, evaluation_set) for task, evaluation_set in EVALUATION_SETS.items()}
        off = torch.cat([values for task, values in expected.items() if task != name])
        result = measured["vectors"][name]
        assert list(result["by_task"]) == list(NAMES)
        for summary, numbers in [(result["on"], expected[name]), (result["off"], off), *zip_by_task(result, expected)]:
            assert summary["examples"] == len(numbers)
            assert summary["mean"] == pytest.approx(float(numbers.mean()), rel=1e-5)
            ordered = numbers.sort().values
            assert summary["quantiles"][2] == pytest.approx(
                float(ordered[len(ordered) // 2 - 1 :][:2].mean()), rel=1e-5
            )
            assert summary["quantiles"] == sorted(summary["quantiles"])
        assert result["auroc"] == pytest.approx(counted(expected[name].tolist(), off.tolist()), abs=1e-3)
    assert measured["auroc"] == pytest.approx(sum(entry["auroc"] for entry in measured["vectors"].values()) / 2)


@pytest.mark.parametrize("regime", ["linear", "full"])
def test_a_device_without_float64_gives_the_same_result(regime, monkeypatch):
    model = toy_model(dtype=torch.float32)
    vectors = {name: task_vector(model, TASKS[name], regime) for name in NAMES[:2]}
    expected = localisation(model, list(EVALUATION_SETS.values()), vectors)
    emulate_device(monkeypatch)
    assert localisation(model, list(EVALUATION_SETS.values()), vectors) == expected


def zip_by_task(result, expected):
    return [(result["by_task"][task], numbers) for task, numbers in expected.items()]


def counted(on, off):
    return sum((a > b) + (a == b) / 2 for a in on for b in off) / (len(on) * len(off))


few = st.lists(st.integers(0, 6).map(float), min_size=1, max_size=12)


@given(on=few, off=few)
def test_auroc_counts_pairs_and_halves_ties(on, off):
    assert auroc(torch.tensor(on), torch.tensor(off)) == pytest.approx(counted(on, off), abs=1e-12)


def test_missing_examples_or_vectors_are_refused(model):
    vector = task_vector(model, TASKS["one"])
    with refused(kp.KfacpackError, "only examples of one", "one other task"):
        localisation(model, [EVALUATION_SETS["one"]], {"one": vector})
    with refused(kp.KfacpackError, "no examples of one"):
        localisation(model, [EVALUATION_SETS["two"], EVALUATION_SETS["three"]], {"one": vector})
    with refused(kp.KfacpackError, "at least one task vector"):
        localisation(model, list(EVALUATION_SETS.values()), {})
