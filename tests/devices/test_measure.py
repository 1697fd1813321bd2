"""Evaluation, measurements and task vectors with a model on a device give the results of the CPU."""

from __future__ import annotations

import pytest
import torch
from devices.conftest import assert_same, model_on
from evaluation.toy import task_vector
from toys import ToyTask

import kfacpack as kp
from kfacpack.vectors.methods import METHODS

TASKS = {name: ToyTask(name, seed=seed, size=12) for seed, name in enumerate(("one", "two"), start=1)}
SETS = [kp.EvaluationSet.of(task, "test") for task in TASKS.values()]


def vectors_of(model, regime="linear"):
    return {name: task_vector(model, task, regime, size=0.1) for name, task in TASKS.items()}


def bundles_of(model):
    return {name: kp.estimate_task(model, task, examples=8, fisher="exact") for name, task in TASKS.items()}


def assert_close(actual, expected):
    """Compares nested results, with a tolerance for numbers."""
    assert type(actual) is type(expected)
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert_close(actual[key], value)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for pair in zip(actual, expected, strict=True):
            assert_close(*pair)
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=1e-2, abs=1e-5)
    else:
        assert actual == expected


@pytest.mark.parametrize("regime", ["linear", "full"])
def test_accuracy_and_sweep(pair, regime):
    results = []
    for model in pair:
        vector = vectors_of(model, regime)["one"]
        plain = kp.evaluate(model, TASKS["one"], batch_size=5)
        edited = kp.evaluate(model, TASKS["one"], vector=vector, alpha=0.5, batch_size=5)
        results.append([plain, edited, *kp.sweep(model, TASKS["one"], vector, [0.0, 0.5, 1.0], batch_size=5)])
    assert results[0] == results[1]


@pytest.mark.parametrize("regime", ["linear", "full"])
@pytest.mark.parametrize("measure", ["drift", "disentanglement", "localisation", "interference"])
def test_measurements(pair, regime, measure):
    results = []
    for model in pair:
        vectors, bundles = vectors_of(model, regime), bundles_of(model)
        if measure == "drift":
            results.append(kp.drift(model, SETS, vectors, bundles, layer_examples=6, batch_size=5))
        elif measure == "disentanglement":
            alphas = [0.0, 1.0]
            results.append(kp.disentanglement(model, tuple(SETS), tuple(vectors.values()), alphas=alphas, batch_size=5))
        elif measure == "localisation":
            results.append(kp.localisation(model, SETS, vectors, batch_size=5))
        else:
            results.append(kp.interference(vectors, bundles, model=model, evaluation_sets=SETS, batch_size=5))
    assert_close(results[1], results[0])


def test_negation_and_spectra(pair):
    results = []
    for model in pair:
        vector = vectors_of(model)["one"]
        results.append([
            kp.spectra(bundles_of(model)["one"]),
            kp.evaluate(model, TASKS["two"], vector=-vector),
        ])  # fmt: skip
    assert_close(results[1], results[0])


@pytest.mark.parametrize("method", [name for name in METHODS if name != "dare"])
def test_merged_vectors(pair, method):
    """Vectors and bundles come from models on the two devices; the random choice of "dare" depends on every bit."""
    results = []
    for model in pair:
        bundles = list(bundles_of(model).values()) if METHODS[method].needs_bundles else None
        results.append(kp.add(vectors_of(model).values(), method=method, bundles=bundles))
    for name in results[0]:
        assert_same(results[1][name], results[0][name], 1e-2)


def test_a_vector_applies_to_the_model_and_is_extracted_from_it(device):
    model = model_on(device)
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    vector = vectors_of(model)["one"]
    with vector.applied(model.module):
        edited = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    for name, tensor in model.module.state_dict().items():
        assert torch.equal(tensor.cpu(), before[name].cpu())
        assert_same(edited[name], before[name].cpu() + vector[name], 1e-6)
    extracted = kp.TaskVector.from_checkpoint(model, edited)
    for name in extracted:
        assert_same(extracted[name], vector[name], 1e-4)
