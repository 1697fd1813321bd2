"""Collectives of devices without NCCL go through the CPU."""

from __future__ import annotations

import torch

from kfacpack.estimation import distributed


class OnDevice:
    """Emulates a tensor on a device that gloo cannot read."""

    def __init__(self, value):
        self.value = value

    def cpu(self):
        return self.value.clone()

    def copy_(self, other):
        self.value.copy_(other)


def test_gloo_gets_cpu_tensors(monkeypatch):
    reduced = []

    def all_reduce(tensor):
        assert isinstance(tensor, torch.Tensor)
        reduced.append(tensor)
        tensor.mul_(2)

    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed.dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(distributed.dist, "all_reduce", all_reduce)
    plain, device = torch.ones(3), OnDevice(torch.ones(2))
    distributed.all_reduce_sum([plain, device])
    assert plain.tolist() == [2, 2, 2]
    assert device.value.tolist() == [2, 2]
    assert reduced[0] is plain
