"""Cases for tests of merge methods: settings of each method, and vectors with parameters of all shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vectors.small_vectors import FUNCTION, head

import kfacpack as kp
from kfacpack.format.vector_manifest import AboutVector, TaskEntry

SHAPES = {"tall": (13, 9), "bias": (13,), "wide": (7, 12), "scale": (), "token": (1, 1, 5), "kernel": (4, 2, 3, 3)}
SETTINGS = {
    "sum": [{}],
    "ties": [{}, {"keep": 0.5}, {"keep": 1.0, "mean": True}],
    "dare": [{}, {"drop": 0.4, "seed": 3}],
    "tsv": [{}, {"mean": True}],
    "iso": [{}, {"mean": True}],
    "iso-cts": [{}, {"common": 0.5}, {"common": 0.0, "mean": True}],
    "actmat": [{}, {"prior": "mean"}, {"prior": "zero", "damping": 0.1}],
}
CASES = [(name, settings) for name, variants in SETTINGS.items() for settings in variants]
every_method = pytest.mark.parametrize(("method", "settings"), CASES, ids=str)


def vector_of(task: str, tensors: dict[str, torch.Tensor]) -> kp.TaskVector:
    state = {name: torch.zeros_like(value) for name, value in tensors.items()}
    base = kp.identify(state, list(state), family="test", name="shapes")
    tasks = (TaskEntry(source=kp.Source(task=task)),)
    about = AboutVector(base=base, function=FUNCTION, regime="full", tasks=tasks)
    return kp.TaskVector(tensors, about, {task: head(len(task))})


def drawn(count: int, seed: int = 0) -> list[kp.TaskVector]:
    generator = torch.Generator().manual_seed(seed)
    return [
        vector_of(f"task {k}", {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()})
        for k in range(count)
    ]


def arrays(tau, alpha: float = 1.0) -> dict[str, np.ndarray]:
    return {name: alpha * tau[name].numpy().astype(np.float64) for name in tau}


def assert_same(result, expected, tolerance: float = 1e-5):
    for name in result:
        np.testing.assert_allclose(result[name].numpy(), expected[name], atol=tolerance, rtol=tolerance, err_msg=name)
