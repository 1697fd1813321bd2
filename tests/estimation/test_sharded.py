"""Sharded parameters are refused; data parallelism over whole models gives the result of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from processes import python_twice
from torch import nn

import kfacpack as kp

PROGRAM = Path(__file__).with_name("sharded.py")


@pytest.fixture(scope="module")
def outputs():
    results = python_twice(PROGRAM)
    assert [result.returncode for result in results] == [0, 0], [result.stderr for result in results]
    return [json.loads(result.stdout) for result in results]


@pytest.mark.parametrize(
    ("use", "facts"),
    [
        ("estimate", ("'0.weight'", "[6, 4]", "DTensor", "processes: 2")),
        ("linearize", ("'0.weight'", "[6, 4]", "DTensor", "processes: 2")),
        ("train", ("'attn.in_proj_weight'", "[12, 4]", "DTensor")),
        ("estimate_task", ("'attn.in_proj_weight'", "[12, 4]", "DTensor")),
        ("wrapped", ("FullyShardedDataParallel",)),
    ],
)
def test_sharded_parameters_are_refused_in_every_process(outputs, use, facts):
    for output in outputs:
        for fact in (*facts, "--offload", "several-gpus.md"):
            assert fact in output[use]


def test_processes_with_the_whole_model_share_the_work(outputs):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    alone = kp.estimate(net, torch.arange(32.0).view(8, 4).split(2), fisher="exact")
    tau = {parameter.name: torch.ones(parameter.shape) for parameter in alone.about.base.parameters}
    for output in outputs:
        assert output["quadratic"] == pytest.approx(float(alone.quadratic(tau)), rel=1e-4)
