"""Collectives are called on buckets of tensors, and go through the CPU on devices without NCCL."""

from __future__ import annotations

import pytest
import torch
from processes import python_twice

from kfacpack.estimation import distributed


@pytest.fixture
def reduced(monkeypatch):
    """The buffers that are reduced; each is doubled, as by a second process with the same values."""
    buffers = []

    def all_reduce(tensor):
        buffers.append(tensor)
        tensor.mul_(2)

    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed.dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(distributed.dist, "all_reduce", all_reduce)
    return buffers


def test_tensors_are_reduced_in_buckets(reduced, monkeypatch):
    monkeypatch.setattr(distributed, "BUCKET_BYTES", 40)
    shapes = [(3,), (2, 2), (), (5, 4), (1,), (2,)]
    tensors = [torch.randn(shape) for shape in shapes] + [torch.arange(3), torch.ones(2, dtype=torch.float64)]
    expected = [2 * tensor for tensor in tensors]
    distributed.all_reduce_sum(iter(tensors))
    for tensor, value in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, value)
    assert [buffer.numel() for buffer in reduced] == [8, 20, 3, 3, 2]
    assert reduced[1] is tensors[3], "a tensor that is larger than a bucket is not copied"


def test_gloo_gets_cpu_tensors(reduced):
    class OnDevice:
        """Emulates a tensor on a device that gloo cannot read."""

        dtype, device, nbytes, value = torch.float32, torch.device("meta"), 8, torch.ones(2)

        def cpu(self):
            return self.value.clone()

        def copy_(self, other):
            self.value.copy_(other)

    plain, device = torch.ones(3), OnDevice()
    distributed.all_reduce_sum([plain, device])
    assert plain.tolist() == [2, 2, 2]
    assert device.value.tolist() == [2, 2]
    assert reduced[0] is plain


PROGRAM = """
import torch
from kfacpack.estimation import distributed
with distributed.process_group(torch.device("cpu")):
    generator = torch.Generator().manual_seed(distributed.rank())
    tensors = [torch.randn(size, generator=generator) for size in (3, 1, 7)]
    plain = [tensor.clone() for tensor in tensors]
    distributed.all_reduce_sum(tensors)
    for tensor in plain:
        torch.distributed.all_reduce(tensor)
    assert all(map(torch.equal, tensors, plain))
"""


def test_buckets_give_the_sums_of_single_tensors():
    results = python_twice("-c", PROGRAM)
    assert [result.returncode for result in results] == [0, 0], results
