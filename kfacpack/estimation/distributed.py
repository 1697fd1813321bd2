"""Distributed runs: process groups, ranks, devices, and sums over all processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from kfacpack.errors import KfacpackError


def rank() -> int:
    """Returns the rank of this process; 0 if it runs alone."""
    return dist.get_rank() if _is_distributed() else 0


def world_size() -> int:
    """Returns the number of processes; 1 if this one runs alone."""
    return dist.get_world_size() if _is_distributed() else 1


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Joins the process group of torchrun or accelerate, if this process was started by one of them.

    Args:
        device: Device of this process: NCCL is used on CUDA devices, Gloo on others.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or _is_distributed():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)  # used by .cuda() and NCCL
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def local_device(device: str) -> torch.device:
    """Returns the device of this process.

    Args:
        device: A torch device, or 'auto' for the first GPU if there is one. 'cuda' without an index selects a
            different GPU for each process of a machine.

    Raises:
        KfacpackError: If the device is unknown to torch, or is 'meta'.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise KfacpackError(
            f"unknown device {device!r}; expected cpu, cuda, cuda:1, mps or another torch device"
        ) from error
    if parsed.type == "meta":
        raise KfacpackError("device 'meta' holds no data; choose another device")
    return parsed


def all_reduce_sum(tensors: Iterable[Tensor]) -> None:
    """Replaces each tensor with its sum over all processes, in place."""
    _synchronize(tensors, dist.all_reduce)


def broadcast(tensors: Iterable[Tensor]) -> None:
    """Replaces each tensor with that of the first process, in place."""
    _synchronize(tensors, lambda tensor: dist.broadcast(tensor, src=0))


def _synchronize(tensors: Iterable[Tensor], communicate: Callable[[Tensor], object]) -> None:
    """Calls `communicate` on every tensor, on a device that the backend supports."""
    if world_size() == 1:
        return
    on_device = dist.get_backend() == "nccl"
    for tensor in tensors:
        # Gloo supports CPU tensors only, so tensors on a device without NCCL are copied to the CPU and back.
        buffer = tensor.cuda() if on_device else tensor.cpu()
        communicate(buffer)
        if buffer is not tensor:
            tensor.copy_(buffer)


def barrier() -> None:
    """Waits for all processes."""
    if world_size() > 1:
        dist.barrier()
