"""The device of these tests, and the same models on it and on the CPU.

KFACPACK_TEST_DEVICE chooses it: `standin` (the default), `cuda`, `mps` or `cpu`. The stand-in has no float64, as MPS,
except in tests with the fixture `float64`.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest
import torch
from devices import accelerator
from models.conftest import _no_network, bert_folder, lm_folders, t5_folder  # noqa: F401
from toys import ToyTask, toy_model

import kfacpack as kp

DEVICE = os.environ.get("KFACPACK_TEST_DEVICE", "standin")


def pytest_collection_modifyitems():
    """Loads the stand-in before the first test, because the first backward pass allocates autograd's queues."""
    if DEVICE == "standin":
        with suppress(accelerator.UnavailableError):
            accelerator.load()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device to test; skips if it is not there."""
    if DEVICE == "standin":
        try:
            accelerator.load()
        except accelerator.UnavailableError as problem:
            pytest.skip(str(problem))
    try:
        return torch.empty(0, device=DEVICE).device
    except (RuntimeError, AssertionError) as error:
        pytest.skip(f"KFACPACK_TEST_DEVICE={DEVICE}: {str(error).splitlines()[0]}")


@pytest.fixture(autouse=True)
def _strict(request, device):
    """The stand-in without float64, and with what torch offers on CUDA only."""
    with ExitStack() as stack:
        if device.type == "standin":
            stack.enter_context(accelerator.as_on_cuda())
            if "float64" not in request.fixturenames:
                stack.enter_context(accelerator.without_float64())
        yield


@pytest.fixture
def float64(device):
    """Skips on devices without float64."""
    if device.type == "mps":
        pytest.skip("MPS has no float64")


@pytest.fixture
def standin(device):
    """Skips on other devices, which do not count copies and waits."""
    if device.type != "standin":
        pytest.skip("only the stand-in counts copies and waits")
    return accelerator


def model_on(device, dtype=torch.float32, module=None):
    """Returns the toy model on a device; its batches are float32."""
    model = toy_model(dtype=dtype)
    module = (model.module if module is None else module).to(device)

    def forward(x):
        return module(x.to(next(module.parameters())))

    def prepare(examples, task):
        return torch.stack([example["x"].float() for example in examples])

    return replace(model, module=module, forward=forward, prepare=prepare)


@pytest.fixture
def pair(device):
    """The toy model on the CPU and on the device."""
    return model_on("cpu"), model_on(device)


@pytest.fixture(scope="session")
def curvature_of_other():
    """The exact curvature of the toy model on another task, computed on the CPU."""
    return estimate_other(model_on("cpu"))


def estimate_other(model):
    return kp.estimate_task(model, ToyTask("other", seed=5), examples=16, fisher="exact")


def assert_same(actual, expected, rtol=1e-4):
    """Compares tensors on any device in the norm."""
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    assert actual.shape == expected.shape
    assert (actual - expected).norm() <= rtol * expected.norm() + 1e-7, (actual - expected).norm() / expected.norm()


def assert_same_curvature(actual, expected, rtol=1e-4):
    """Compares every block by its action on the same random vector."""
    assert actual.parameters == expected.parameters
    generator = torch.Generator().manual_seed(1)
    shapes = {parameter.name: parameter.shape for parameter in expected.about.base.parameters}
    tau = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    first, second = actual.apply(tau), expected.apply(tau)
    for name in second:
        assert_same(first[name], second[name], rtol)
