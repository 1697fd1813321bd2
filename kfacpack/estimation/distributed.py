"""Helpers for runs with several processes: process groups, devices, sums over processes, and numbers of threads."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from kfacpack._torch import copy_each
from kfacpack.errors import KfacpackError, ProcessLostError, first_line

THREADS = ((50_000_000, 1), (500_000_000, 4), (math.inf, 16))
"""Pairs (limit, threads). The number of threads on a CPU is given by the first pair whose limit exceeds the number of
parameters."""
BUCKET_BYTES = 2**25
"""Maximum total size in bytes of tensors that are copied into one buffer and communicated together. A larger tensor is
communicated alone and is not copied into a buffer."""
_LIBRARY_BYTES = 1_000_000_000
_MODEL_COPIES = 8
_CGROUP = ("max", "current")


def rank() -> int:
    """Returns the rank of this process; 0 if it runs alone."""
    return dist.get_rank() if _is_distributed() else 0


def world_size() -> int:
    """Returns the number of processes; 1 if this process runs alone."""
    return dist.get_world_size() if _is_distributed() else 1


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Context manager that joins the process group of torchrun or accelerate.

    It does nothing if this process was started alone, or if a process group already exists.

    Args:
        device: Device of this process. NCCL is used for CUDA devices, and Gloo for all other devices.

    Raises:
        KfacpackError: If the other processes cannot be reached, or an environment variable of the launcher is missing.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or _is_distributed():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)  # used by .cuda() and NCCL
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    except (RuntimeError, ValueError) as error:  # ValueError: a variable of the launcher is missing
        problem = f"rank {os.environ.get('RANK', 'unknown')}: cannot reach the other processes: {first_line(error)}"
        remedy = "Start all processes with torchrun, with the same address and port (--rdzv-endpoint) on every machine"
        raise KfacpackError(f"{problem}. {remedy}") from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def local_device(device: str) -> torch.device:
    """Returns the device of this process.

    Args:
        device: A torch device, or 'auto' for a GPU if there is one and the CPU otherwise. 'cuda' without an index
            selects a different GPU for each process on a machine.

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
        raise KfacpackError("device 'meta' stores no data; choose another device")
    return parsed


def all_reduce_sum(tensors: Iterable[Tensor]) -> None:
    """Replaces each tensor with its sum over all processes, in place."""
    _synchronize(tensors, dist.all_reduce)


def broadcast(tensors: Iterable[Tensor]) -> None:
    """Overwrites each tensor in place with the values that it has in the first process."""
    _synchronize(tensors, lambda tensor: dist.broadcast(tensor, src=0))


def _synchronize(tensors: Iterable[Tensor], communicate: Callable[[Tensor], object]) -> None:
    """Copies tensors to a device that the backend supports, calls `communicate` on them, and copies them back."""
    if world_size() == 1:
        return
    on_device = dist.get_backend() == "nccl"
    for bucket in _buckets(tensors):
        flat = bucket[0] if len(bucket) == 1 else torch.cat([tensor.reshape(-1) for tensor in bucket])
        # NCCL needs tensors on a GPU. Gloo does not support all devices, so its tensors are copied to the CPU and back.
        buffer = flat.cuda() if on_device else flat.cpu()
        with _report_lost_process():
            communicate(buffer)
        if len(bucket) > 1:
            parts = buffer.to(flat.device).split([tensor.numel() for tensor in bucket])
            copy_each(bucket, [part.view(tensor.shape) for part, tensor in zip(parts, bucket, strict=True)])
        elif buffer is not flat:
            flat.copy_(buffer)


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Groups tensors by dtype and device into buckets of limited size. All processes form the same buckets."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        bucket = open_buckets.setdefault((tensor.dtype, tensor.device), [])
        if bucket and sum(other.nbytes for other in bucket) + tensor.nbytes > BUCKET_BYTES:
            yield list(bucket)
            bucket.clear()
        bucket.append(tensor)
    yield from open_buckets.values()


def barrier() -> None:
    """Waits until all processes have called this function."""
    if world_size() > 1:
        with _report_lost_process():
            dist.barrier()


@contextmanager
def _report_lost_process() -> Iterator[None]:
    """Converts RuntimeErrors from Gloo and NCCL to `ProcessLostError`."""
    try:
        yield
    except RuntimeError as error:
        problem = f"rank {rank()} of {world_size()}: another process was lost: {first_line(error)}"
        remedy = "See the output of that process for the cause. Restart all processes with --resume"
        raise ProcessLostError(f"{problem}. {remedy}") from error


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _requested_threads() -> int | None:
    """Returns the number in the environment variable OMP_NUM_THREADS, or None if it is not a positive number."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def stage_threads(device: torch.device, parameters: int, requested: int | None = None) -> int:
    """Returns the number of threads to use for a stage of a plan.

    The number of threads affects rounding. It therefore does not depend on the number of processes, so that a plan has
    the same results with one process and with several processes.

    Args:
        device: Device of the model.
        parameters: Number of parameters of the model.
        requested: The requested number. Defaults to the environment variable OMP_NUM_THREADS. If this is not set, the
            default is the number of cores per GPU on a CUDA device. On all other devices, the default depends on the
            number of parameters (see `THREADS`), and is at most the number of cores.
    """
    if chosen := requested or _requested_threads():
        return chosen
    if device.type == "cuda":
        return max(1, usable_cores() // max(1, torch.cuda.device_count()))
    return min(usable_cores(), next(threads for size, threads in THREADS if parameters < size))


def devices_of(device: torch.device) -> list[torch.device]:
    """Returns the devices of the workers: all GPUs for `cuda` without an index, otherwise the device itself."""
    if device.type == "cuda" and device.index is None:
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [device]


def default_jobs(device: torch.device, threads: int) -> int:
    """Returns the default number of processes for a plan.

    For `cuda`, this is the number of GPUs, or 1 if the device has an index. For a CPU, it is the number of cores
    divided by `threads`. For all other devices, it is 1.

    Args:
        device: Device of the model.
        threads: Number of threads of each stage.
    """
    if device.type == "cuda":
        return len(devices_of(device))
    return max(1, usable_cores() // threads) if device.type == "cpu" else 1


def worker_bytes(model_bytes: int) -> int:
    """Returns the expected memory use of a worker process in bytes.

    This includes the libraries, the weights, task vectors, gradients and the optimizer state.

    Args:
        model_bytes: Size of the model in bytes.
    """
    return _LIBRARY_BYTES + _MODEL_COPIES * model_bytes


def workers_on_gpus(device: torch.device, model_bytes: int) -> int:
    """Returns how many worker processes fit into the free memory of the GPUs, counting at least one per GPU.

    Args:
        device: Device of the model; `cuda` without an index means all GPUs.
        model_bytes: Size of the model in bytes.
    """
    free = [torch.cuda.mem_get_info(gpu)[0] for gpu in devices_of(device)]
    return sum(max(1, available // (_MODEL_COPIES * model_bytes)) for available in free)


def available_bytes() -> int | None:
    """Returns how many bytes of memory are available to new processes, or None if this is unknown."""
    limits = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        limits.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")))
    with suppress(OSError, ValueError):  # in a container; int("max") fails if its memory is not limited
        maximum, current = (Path(f"/sys/fs/cgroup/memory.{name}").read_text(encoding="ascii") for name in _CGROUP)
        limits.append(max(0, int(maximum) - int(current)))
    return min(limits, default=None)
