"""Forecasts of an estimate: its size equals that of the file, its memory consists of the parts that it names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kit import refused
from processes import python
from torch import nn
from toys import WIDTH, ToyTask, toy_model

import kfacpack as kp
from kfacpack.compression.codecs import CodecChain
from kfacpack.estimation.forecast import activation_bytes, find_gpu
from kfacpack.estimation.options import EstimateOptions
from kfacpack.estimation.task_estimate import TaskEstimate


class Wide(nn.Module):
    """Two layers with matrices of side 6 to 60, a scale with a dense block and a shift with a diagonal one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(20, 60), nn.Linear(60, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(60))
        self.shift = nn.Parameter(torch.zeros(2100))

    def forward(self, x):
        hidden = torch.tanh(self.first(x.flatten(1))) * self.scale
        return self.second(hidden) + (self.shift.view(-1, WIDTH).sin() * hidden[:, :1, None]).mean(1)


def wide_run(**options):
    torch.manual_seed(0)
    module = Wide()
    model = replace(toy_model(), module=module, forward=lambda x: module(x.float()))
    return TaskEstimate(model, ToyTask(), EstimateOptions(**options), "12", 4)


@pytest.mark.parametrize(
    "spec",
    [None, "block:2", "block:4+int8", "block:2+fp16", "svd:3", "svd:20%+int8", "prune:10%", "prune:5%+bf16", "int8",
     "fp16", "bf16"],
)  # fmt: skip
@pytest.mark.parametrize("structure", ["kronecker", "diagonal"])
def test_the_forecast_size_is_that_of_the_file(spec, structure, tmp_path):
    if structure == "diagonal" and spec not in (None, "fp16", "bf16"):
        with refused(kp.KfacpackError, "diagonal"):
            wide_run(compress=spec, structure=structure)
        return
    forecast = wide_run(compress=spec, structure=structure).forecast()
    run = wide_run(compress=spec, structure=structure)
    curvature = run.run(tmp_path / "t.kfac")
    stored = {block.name: block.structure for block in curvature.blocks}
    assert forecast.bytes == sum(tensor.nbytes for tensor in kp.Bundle(tmp_path / "t.kfac").tensors.values())
    assert {block.name for block in forecast.blocks} == stored.keys()
    if run.report:
        assert [block.bytes for block in forecast.blocks] == [block.bytes for block in run.report.blocks]


def packed(*sides):
    return sum(4 * n * (n + 1) // 2 for n in sides)


def test_the_memory_is_that_of_weights_sums_and_activations_or_results():
    run = wide_run()
    with run._accumulator() as accumulator:
        chain, sums = CodecChain(), accumulator.nbytes
        assert sums >= packed(21, 60, 60, WIDTH, 60) + 4 * 2100
        # A finished matrix is in memory before its sum is freed; the largest is the diagonal.
        results = accumulator.peak_bytes(0, chain) - sums
        assert results == 4 * 2100 > packed(60)
        assert accumulator.peak_bytes(10**7, chain) == sums + 10**7
        compressed = accumulator.peak_bytes(0, CodecChain.parse("int8")) - sums
        assert compressed > results + 4 * 4 * 60**2
    module = run.model.module
    weights = sum(4 * parameter.numel() for parameter in module.parameters())
    small, large = (replace(run, batch_size=size).forecast().peak_memory for size in (1, 12))
    saved = activation_bytes(module, run.model.forward, run._batch(range(12)))
    assert large == weights + sums + saved
    assert weights + sums + results <= small < large


def test_activations_grow_with_examples_and_not_with_rows_of_f():
    layer = nn.Linear(20, 8)
    batch = torch.randn(4, 5, 20)
    rows = activation_bytes(layer, lambda x: layer(x).flatten(0, 1), batch)
    assert rows == activation_bytes(layer, lambda x: layer(x)[:, 0], batch)
    assert activation_bytes(layer, lambda x: layer(x)[:, 0], batch[:2]) == rows // 2
    inputs = 4 * batch.numel()
    assert inputs <= rows <= 4 * inputs


PEAK = """
import sys
from dataclasses import replace
from pathlib import Path
from torch import nn
from kfacpack.estimation.task_estimate import TaskEstimate
from toys import ToyTask, toy_model

def estimate(width):
    module = nn.Sequential(
        nn.Flatten(), nn.Linear(20, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 6)
    )
    model = replace(toy_model(), module=module, forward=lambda x: module(x.float()))
    return TaskEstimate(model, ToyTask(), examples="4", batch_size=4)

def memory(name):
    return 1024 * int(Path("/proc/self/status").read_text().split(name)[1].split()[0])

estimate(10).run(Path(sys.argv[1]))
libraries, large = memory("VmRSS:"), estimate(4000)
Path("/proc/self/clear_refs").write_text("5")  # resets the peak
large.run(Path(sys.argv[1] + "-large"))
print(memory("VmHWM:") - libraries, large.forecast().peak_memory)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_the_forecast_memory_is_measured_within_a_sixth(tmp_path):
    """Sums and packed matrices are not in memory at the same time, which would take almost twice as much."""
    result = python("-c", PEAK, tmp_path / "t.kfac")
    assert result.returncode == 0, result.stderr
    measured, predicted = map(int, result.stdout.split())
    assert 5 / 6 < predicted / measured < 7 / 6, (measured, predicted)


def test_gpus_are_found_by_their_name():
    assert find_gpu("h100").memory == 80e9
    assert find_gpu("A100").memory == 40e9
    with refused(kp.KfacpackError, "'A10'", "A100-80GB"):
        find_gpu("A10")
