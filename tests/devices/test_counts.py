"""Copies and waits of the stand-in: a training step and an estimate do not stop for the device more than they must."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from devices.conftest import model_on
from devices.test_estimate import masked_batches, masked_model
from kit import MATRIX_FORMS, random_tau, small_curvature
from toys import ToyTask

import kfacpack as kp
from kfacpack.training import factor_placement

SHORT, LONG = 4, 9


def per_step(standin, count):
    """Returns the events that each additional step causes, by kind, from a short and a long run with `count(steps)`.

    What a run does once, at its start or its end, does not count.
    """
    count(SHORT)  # caches are filled
    records = []
    for steps in (SHORT, LONG):
        with standin.recorded() as record:
            count(steps)
        records.append(record)
    short, long = records
    return {
        kind: (len(long.of(kind)) - len(short.of(kind))) / (LONG - SHORT) for kind in ("wait", "upload", "download")
    }, long


@pytest.mark.parametrize("micro_batch_size", [None, 4, 2])
@pytest.mark.parametrize("regime", ["linear", "full"])
@pytest.mark.parametrize("penalty", [False, True])
def test_a_training_step_waits_once_and_uploads_its_batch(
    device, standin, curvature_of_other, regime, micro_batch_size, penalty
):
    """At most one wait, and two copies to the device: inputs and labels, whatever is computed at once."""
    model = model_on(device)
    settings = {"reg": curvature_of_other} if penalty else {}

    def run(steps):
        kp.train(
            model,
            ToyTask(),
            steps=steps,
            batch_size=8,
            lr=0.01,
            regime=regime,
            micro_batch_size=micro_batch_size,
            **settings,
        )

    counts, record = per_step(standin, run)
    assert counts["wait"] <= 1, str(record)
    assert counts["upload"] <= 2, str(record)
    assert counts["download"] <= 1, str(record)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("stored_as", MATRIX_FORMS)
def test_offloaded_factors_are_copied_as_they_are_stored(device, standin, monkeypatch, stored_as, stacked):
    """A call of the penalty copies the stored bytes of every matrix once, and does not wait."""
    if not stacked:
        monkeypatch.setattr(factor_placement, "STACK_ELEMENTS", 0)
    curvature = small_curvature(stored_as)
    tau = {name: tensor.to(device) for name, tensor in random_tau(curvature).items()}
    regularizer = kp.Regularizer(curvature, 2.0, offload=True)
    grads = {name: torch.zeros_like(tensor) for name, tensor in tau.items()}
    regularizer.add_grad(tau, grads)
    with standin.recorded() as record:
        regularizer.add_grad(tau, grads)
    blocks = [{id(matrix): matrix for _, matrix in block.structure.matrices()} for block in curvature.blocks]
    assert any(first.keys() & second.keys() for first, second in pairwise(blocks)), "neighbours share matrices"
    copied = [second[key] for first, second in pairwise([{}, *blocks]) for key in second.keys() - first.keys()]
    # A device may not have float64.
    stored = sum(matrix.nbytes // (2 if matrix.dtype is torch.float64 else 1) for matrix in copied)
    assert record.uploaded_bytes <= stored, str(record)
    assert not record.waits, str(record)


@pytest.mark.parametrize("offload", [False, True])
def test_the_penalty_does_not_wait(device, standin, offload):
    curvature = small_curvature("packed")
    tau = {name: tensor.to(device) for name, tensor in random_tau(curvature).items()}
    regularizer = kp.Regularizer(curvature, 2.0, offload=offload)
    regularizer.add_grad(tau, {})
    with standin.recorded() as record:
        regularizer.add_grad(tau, {})
    assert not record.waits, str(record)
    assert offload or not record.uploads, str(record)


@pytest.mark.parametrize("settings", [{}, {"structure": "diagonal"}, {"sharing": "reduce"}], ids=str)
def test_a_masked_estimate_waits_at_most_twice_per_batch(device, standin, settings):
    model, batches = masked_model(device), masked_batches()

    def run(steps):
        kp.estimate(model, [batches[k % 2] for k in range(steps)], samples=1, **settings)

    counts, record = per_step(standin, run)
    assert counts["wait"] <= 2, str(record)


def test_an_estimate_without_a_mask_waits_at_most_twice_per_batch(device, standin):
    model, x = model_on(device), ToyTask().split("train").x.float()

    def run(steps):
        kp.estimate(model, [x[k : k + 4] for k in range(steps)], samples=1)

    counts, record = per_step(standin, run)
    assert counts["wait"] <= 2, str(record)
