"""Several processes: process groups, ranks, devices, sums over all processes, and the number of jobs and threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from kfacpack._torch import copy_each
from kfacpack.errors import KfacpackError

SMALL_MODEL = 50_000_000
"""Models with fewer parameters run with one thread per process on a CPU: more threads hardly make them faster."""
BUCKET_BYTES = 2**25
"""Maximum size of the tensors that are communicated together; a larger tensor is communicated alone, without a copy."""
_LIBRARY_BYTES = 1_000_000_000
_MODEL_COPIES = 8
"""The memory forecast of a worker: its libraries, and the model with vectors, gradients and optimizer state."""


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
    """Calls `communicate` on buckets of tensors, on a device that the backend supports."""
    if world_size() == 1:
        return
    on_device = dist.get_backend() == "nccl"
    for bucket in _buckets(tensors):
        flat = bucket[0] if len(bucket) == 1 else torch.cat([tensor.reshape(-1) for tensor in bucket])
        # Gloo supports CPU tensors only, so tensors on a device without NCCL are copied to the CPU and back.
        buffer = flat.cuda() if on_device else flat.cpu()
        communicate(buffer)
        if len(bucket) > 1:
            parts = buffer.to(flat.device).split([tensor.numel() for tensor in bucket])
            copy_each(bucket, [part.view(tensor.shape) for part, tensor in zip(parts, bucket, strict=True)])
        elif buffer is not flat:
            flat.copy_(buffer)


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Groups tensors of one dtype and device into buckets of limited size, in an order that only shapes determine."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        bucket = open_buckets.setdefault((tensor.dtype, tensor.device), [])
        if bucket and sum(other.nbytes for other in bucket) + tensor.nbytes > BUCKET_BYTES:
            yield list(bucket)
            bucket.clear()
        bucket.append(tensor)
    yield from open_buckets.values()


def barrier() -> None:
    """Waits for all processes."""
    if world_size() > 1:
        dist.barrier()


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _requested_threads() -> int | None:
    """Returns the value of OMP_NUM_THREADS, if it is a positive number."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def threads_per_job(device: torch.device, parameters: int, jobs: int) -> int:
    """Returns the number of threads of a process that computes stages.

    Rounding depends on the number of threads. For small models on a CPU it is therefore independent of `jobs`.
    """
    if requested := _requested_threads():
        return requested
    if device.type == "cpu" and parameters < SMALL_MODEL:
        return 1
    return max(1, usable_cores() // jobs)


def devices_of(device: torch.device) -> list[torch.device]:
    """Returns the devices of the workers: all GPUs for `cuda` without an index, otherwise the device itself."""
    if device.type == "cuda" and device.index is None:
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [device]


def choose_jobs(requested: int | None, device: torch.device, parameters: int, model_bytes: int) -> int:
    """Returns the number of processes: the requested or the default number, but no more than fit into memory.

    Args:
        requested: The requested number; None for one per GPU, for one per core with a small model on a CPU (fewer if
            OMP_NUM_THREADS is larger than 1), and otherwise for one.
        device: Device of the plan's model.
        parameters: Number of parameters of the model.
        model_bytes: Size of the model in memory.
    """
    jobs = requested or 1
    if requested is None and device.type == "cuda":
        jobs = len(devices_of(device))
    elif requested is None and device.type == "cpu" and parameters < SMALL_MODEL:
        jobs = usable_cores() // (_requested_threads() or 1)
    available = _available_bytes()
    fitting = jobs if available is None else available // (_LIBRARY_BYTES + _MODEL_COPIES * model_bytes)
    return max(1, min(jobs, fitting))


def _available_bytes() -> int | None:
    """Returns the memory that new processes can use, or None if the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None
