"""Prepares batches of examples, moves batches to a device, and runs models on batches.

Batches are prepared with torch's `DataLoader`, in this process or in worker processes. The number of worker processes
changes neither the batches nor their order, so it does not affect any result.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from hashlib import sha256
from itertools import chain, tee
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kfacpack.curvature.matrices.components import raw_bytes
from kfacpack.errors import KfacpackError, NotFiniteError, first_line, printable
from kfacpack.models.functional import (
    MirroredTensor,
    ModelInput,
    TensorPack,
    at_least_float32,
    call_model,
    device_tensor,
    map_tensors,
    tensors_of,
)
from kfacpack.models.model import Batch, Model
from kfacpack.tasks.task import Example, Split, batched

SplitSource: TypeAlias = tuple[Split, str]
"""A split and the name of its task."""
BatchIndices: TypeAlias = tuple[int, Sequence[int]]
"""Index of a `SplitSource` in a sequence, and the indices of the examples in this split that form a batch."""

MAX_WORKERS = 4
"""Maximum number of worker processes when the number is chosen automatically."""
WORKERS_LIMIT = 256
"""Maximum number of worker processes that can be requested. All of these processes are started at once."""
_requested_workers: int | None = 0


def use_workers(count: int | None) -> None:
    """Sets the number of worker processes that prepare batches.

    Args:
        count: Number of processes, at most `WORKERS_LIMIT`. If 0, batches are prepared in this process. If None, the
            number is chosen automatically: at most `MAX_WORKERS` if images have to be decoded, otherwise 0.

    Raises:
        KfacpackError: If `count` is negative or larger than `WORKERS_LIMIT`.
    """
    global _requested_workers
    if count is not None and not 0 <= count <= WORKERS_LIMIT:
        raise KfacpackError(f"invalid number of workers {count}; expected a number from 0 to {WORKERS_LIMIT}")
    _requested_workers = count


def requested_workers() -> int | None:
    """Returns the number of worker processes set by `use_workers`, or None if it is chosen automatically."""
    return _requested_workers


def batches(
    model: Model, sources: Sequence[SplitSource], indices: Iterable[BatchIndices], *, pin_memory: bool = True
) -> Generator[Batch, None, None]:
    """Yields one prepared batch for each entry of `indices`, in order.

    If you do not exhaust the generator, close it, so that its worker processes exit.

    Args:
        model: Model that prepares the examples.
        sources: Splits to read from, each with the name of its task.
        indices: For each batch, the index of its source and the indices of its examples. The iterable is read a few
            batches ahead and may be infinite.
        pin_memory: Whether to return tensors in pinned memory if the model is on a CUDA device.

    Raises:
        KfacpackError: If an example cannot be read, or a worker process exits unexpectedly.
    """
    workers = _num_workers(sources)
    loader = DataLoader(
        _BatchDataset(model.prepare, sources),
        batch_size=None,
        sampler=indices,
        num_workers=workers,
        collate_fn=_identity,
        worker_init_fn=_init_worker,
        # `prepare` is a closure, which cannot be pickled but is inherited by a forked process.
        multiprocessing_context="fork" if workers else None,
        pin_memory=pin_memory and next(model.module.parameters()).device.type == "cuda",
        generator=torch.Generator(),  # the loader draws a base seed; do not advance the user's global generator
    )
    try:
        for batch in loader:
            if isinstance(batch, KfacpackError):
                raise batch
            yield batch
    except RuntimeError as error:
        if "DataLoader worker" not in str(error) or isinstance(error, KfacpackError):
            raise
        problem = f"a worker process exited unexpectedly: {first_line(error)}"
        remedy = "Use --workers 0 (use_workers(0)), which needs less memory"
        raise KfacpackError(f"{problem}. {remedy}") from error


def step_batches(
    model: Model,
    sources: Sequence[SplitSource],
    steps: Iterable[Sequence[BatchIndices]],
    labels: Callable[[Sequence[int]], Tensor] | None = None,
) -> Generator[list[Any], None, None]:
    """Yields the batches of each step as a list. One copy moves all batches of a step to the model's device.

    If you do not exhaust the generator, close it, so that its worker processes exit.

    Args:
        model: Model that prepares the examples.
        sources: Splits to read from, each with the name of its task.
        steps: For each batch of each step, the index of its source and the indices of its examples. The iterable is
            read a few batches ahead and may be infinite.
        labels: Function that maps the indices of N examples to their labels, (N,), on the CPU. If this function is
            given, the lists contain (batch, labels) pairs instead of batches.

    Raises:
        KfacpackError: If an example cannot be read, or a worker process exits unexpectedly.
    """
    move = BatchMover(next(model.module.parameters()).device)
    ahead, steps = tee(steps)
    with closing(batches(model, sources, chain.from_iterable(ahead), pin_memory=False)) as loader:
        for parts in steps:
            prepared: list[Any] = [next(loader) for _ in parts]
            if labels is not None:
                prepared = [(batch, labels(numbers)) for batch, (_, numbers) in zip(prepared, parts, strict=True)]
            moved = list(move(prepared))
            yield moved if labels is None else [(batch, device_tensor(own)) for batch, own in moved]


class BatchMover:
    """A callable that moves batches to a device, with one copy for all tensors of a batch.

    On CUDA devices, the copy runs on a separate stream, from pinned memory, in parallel with earlier work. The values
    of integer and Boolean tensors also stay on the CPU (see `MirroredTensor`), so that models can read them without
    waiting for the device.

    Args:
        device: The device to which batches are moved.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: ModelInput) -> Any:
        """Returns the batch with its tensors on the device. The tensors may be views of a shared buffer."""
        tensors = tensors_of(batch)
        if not tensors or all(tensor.device == self._device for tensor in tensors):
            return batch
        pack = TensorPack(tensors, pin=self._stream is not None)
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            buffer = pack.buffer.to(self._device, non_blocking=True)
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            buffer.record_stream(current)
        moved = map(MirroredTensor.of, pack.views(buffer), pack.views(pack.buffer))
        return map_tensors(batch, lambda tensor: next(moved))


class DeferredValues:
    """The values of a tensor, to be read later, so that more work can be queued on the device in the meantime.

    Args:
        tensor: The tensor. It must not be modified before the values are read. If the tensor is on a CUDA device, it
            is copied to the CPU in the background.
    """

    def __init__(self, tensor: Tensor):
        self._values, self._copied = tensor, None
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.current_stream(tensor.device).record_event()

    def read(self) -> list[float]:
        """Waits until the values have been computed, and returns them."""
        if self._copied is not None:
            self._copied.synchronize()
        values: list[float] = self._values.tolist()
        return values


class _BatchDataset(Dataset[Any]):
    """Dataset that maps `BatchIndices` to prepared batches."""

    def __init__(self, prepare: Callable[[Sequence[Example], str], Batch], sources: Sequence[SplitSource]):
        self._prepare, self._sources = prepare, sources

    def __getitem__(self, index: BatchIndices) -> Batch | KfacpackError:
        source, indices = index
        split, task = self._sources[source]
        try:
            return self._prepare([split[number] for number in indices], task)
        except KfacpackError as error:
            # If the error were raised here, DataLoader would add the worker's traceback to the message.
            return error


def _identity(batch: Any) -> Any:
    return batch


def _init_worker(number: int) -> None:
    """Makes a worker process exit on SIGTERM, and ignore Ctrl-C, which the terminal sends to all processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _num_workers(sources: Sequence[SplitSource]) -> int:
    if _requested_workers is not None:
        return _requested_workers
    if not sys.platform.startswith("linux"):
        return 0  # Windows cannot fork, and on macOS forking is not safe once system libraries have been used
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(MAX_WORKERS, max(0, cores - 1)) if any(_needs_decoding(split) for split, _ in sources) else 0


def _needs_decoding(split: Split) -> bool:
    """Returns whether a split contains encoded images. Images of embedded tasks are already decoded."""
    if not len(split):
        return False
    try:
        return getattr(split[0].get("image"), "format", None) is not None
    except KfacpackError:
        return False  # the error is raised again when the example is read


def image_batches(transform: Callable[[Any], Tensor], model: str) -> Callable[[Sequence[Example], str], Tensor]:
    """Returns the `prepare` function of an image model, which maps N examples to a tensor (N, 3, height, width).

    Args:
        transform: Function that converts a `PIL.Image` to a tensor of shape (3, height, width).
        model: Name of the model, for error messages.
    """

    def prepare(examples: Sequence[Example], task: str) -> Tensor:
        for example in examples:
            if "image" not in example:
                columns = ", ".join(map(repr, example))
                problem = f"the task {task!r} has no column 'image' (columns: {columns})"
                raise KfacpackError(f"{model} expects images, but {problem}; use a text model")
        # Convert before resizing, as open_clip and timm do in training: palette indices cannot be interpolated.
        return torch.stack([transform(example["image"].convert("RGB")) for example in examples])

    return prepare


def outputs(
    model: Model,
    split: Split,
    task: str,
    indices: Sequence[int],
    batch_size: int,
    forward: Callable[[Batch], Tensor] | None = None,
) -> Iterator[tuple[Sequence[int], Tensor]]:
    """Runs a model on the examples of a split, without gradients.

    Args:
        model: Model to run.
        split: Split to read.
        task: Name of the task.
        indices: Indices of the examples.
        batch_size: Examples per batch.
        forward: Function that computes f from a batch, for example with edited weights. Defaults to `model.forward`.

    Yields:
        For each batch, the indices of its examples, and f for these examples, (N, C), in at least float32.

    Raises:
        KfacpackError: If f contains NaN or Inf, or an example cannot be read.
    """
    for chosen, batch in prepared_batches(model, split, task, indices, batch_size):
        with torch.no_grad(), name_task_in_errors(split, task, chosen):
            f = forward(batch) if forward else call_model(model.forward, batch)
        yield chosen, at_least_float32(f)


def prepared_batches(
    model: Model, split: Split, task: str, indices: Sequence[int], batch_size: int
) -> Iterator[tuple[Sequence[int], Batch]]:
    """Yields, for each batch, the indices of its examples and the prepared batch. See `outputs` for the arguments."""
    groups = list(batched(indices, batch_size))
    yield from zip(groups, batches(model, [(split, task)], [(0, group) for group in groups]), strict=True)


@contextmanager
def name_task_in_errors(split: Split, task: str, chosen: Sequence[int]) -> Iterator[None]:
    """Context manager that converts a `NotFiniteError` to an error that names the task, the split and the examples."""
    try:
        yield
    except NotFiniteError as error:
        location = f"{printable(task)}, split {split.source.split!r}, examples {chosen[0]} to {chosen[-1]}"
        problem = str(error).partition(";")[0]  # without the remedy of `require_finite`, which mentions the inputs
        remedy = "check the weights of the model and of any task vector, or use another dtype for the model"
        raise KfacpackError(f"{location}: {problem}; {remedy}") from error


_FINGERPRINT_EXAMPLES = 32
"""Maximum number of examples that are prepared for a fingerprint. Changes in other examples are not detected."""


def fingerprint(
    model: Model, split: Split, task: str, indices: Sequence[int] | None = None, *, labels: bool = False
) -> str:
    """Returns a digest of the data, for detecting changes.

    The digest covers the number of examples and up to 32 prepared examples, which are evenly spaced and include the
    first and the last example. Changes in other examples are not detected. Computing the digest takes about as long as
    preparing one batch.

    Args:
        model: Model that prepares the examples.
        split: Split to read.
        task: Name of the task.
        indices: Indices of the examples. Defaults to the whole split.
        labels: Whether the digest also covers the labels of all examples.

    Returns:
        A SHA-256 hex digest.
    """
    chosen = range(len(split)) if indices is None else indices
    digest = sha256(f"{len(chosen)} of {len(split)}".encode())
    if labels:
        digest.update(repr([split.label(number) for number in chosen]).encode())
    batch = model.prepare([split[chosen[position]] for position in _evenly_spaced(len(chosen))], task)
    for tensor in tensors_of(batch):
        digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def _evenly_spaced(size: int) -> list[int]:
    count = min(size, _FINGERPRINT_EXAMPLES)
    return [position * (size - 1) // max(1, count - 1) for position in range(count)]
