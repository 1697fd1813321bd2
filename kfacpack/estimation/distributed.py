"""Several processes that share one piece of work: which of them this one is, and how their sums become one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from kfacpack.errors import KfacpackError


def rank() -> int:
    return dist.get_rank() if _is_distributed() else 0


def world_size() -> int:
    return dist.get_world_size() if _is_distributed() else 1


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Join the processes that torchrun or accelerate started, if one of them started this one."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or _is_distributed():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)  # where .cuda() puts things, and what NCCL takes for this process's own
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def local_device(device: str) -> torch.device:
    """'auto' is the first GPU there is; a GPU without a number is another one for each process of a machine."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise KfacpackError(
            f"device {device!r}: expected cpu, cuda, cuda:1, mps or another that torch knows"
        ) from error
    if found.type == "meta":
        raise KfacpackError("device 'meta' computes nothing; choose one that does")
    return found


def all_reduce_sum(tensors: Iterable[Tensor]) -> None:
    """Every process gets the sum over all of them, in place."""
    _synchronize(tensors, dist.all_reduce)


def broadcast(tensors: Iterable[Tensor]) -> None:
    """Every process gets what the first one has, in place."""
    _synchronize(tensors, lambda tensor: dist.broadcast(tensor, src=0))


def _synchronize(tensors: Iterable[Tensor], together: Callable[[Tensor], object]) -> None:
    if world_size() == 1:
        return
    on_device = dist.get_backend() == "nccl"
    for tensor in tensors:
        moved = tensor.cuda() if on_device else tensor
        together(moved)
        if moved is not tensor:
            tensor.copy_(moved)


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()
