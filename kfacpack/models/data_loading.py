"""Examples become batches here: decoded and transformed in this process, or ahead of it in others.

How many others there are never changes what comes, nor its order; it is no part of any result. torch's DataLoader does
the work; a process of its computes with one thread.

Pictures become a batch through a model's own transform.

What a model makes of a split's examples, batch by batch.

Whether data is still what it was: a digest that costs as little as one batch.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kfacpack.curvature.matrices.components import raw_bytes
from kfacpack.errors import KfacpackError, NotFiniteError, first_line, printable
from kfacpack.models.functional import at_least_float32, call_model, tensors_of
from kfacpack.models.model import Batch, Model
from kfacpack.tasks.task import Example, Split, batched

if TYPE_CHECKING:
    from kfacpack.models.model import Model
    from kfacpack.tasks.task import Example, Split

    SplitSource = tuple[Split, str]

    """A split, and its task's name."""

    BatchIndices = tuple[int, Sequence[int]]

    """Which source, and the numbers of its examples that are to be one batch."""


MAX_WORKERS = 4
"""Processes, where nobody said how many."""
_requested_workers: int | None = 0


def use_workers(count: int | None) -> None:
    """From now on, so many processes prepare batches beside this one. None: some where pictures have to be decoded."""
    global _asked
    if count is not None and count < 0:
        raise KfacpackError(f"workers {count}: expected a number that is not negative")
    _requested_workers = count


def batches(
    model: Model, sources: Sequence[SplitSource], wanted: Iterable[BatchIndices]
) -> Generator[Batch, None, None]:
    """One batch for each that is wanted, in that order. `wanted` is looked at a little ahead, and may be endless.

    Who leaves before the end closes it, so that its processes end.
    """
    workers = _num_workers(sources)
    loader = DataLoader(
        _Examples(model.prepare, sources),
        batch_size=None,
        sampler=wanted,
        num_workers=workers,
        collate_fn=_identity,
        worker_init_fn=_begin_worker,
        # What prepares is made of closures, which cannot be sent to a process, but can be there when it forks.
        multiprocessing_context="fork" if workers else None,
        pin_memory=next(model.module.parameters()).device.type == "cuda",
        generator=torch.Generator(),  # it draws a seed for its processes: not from the one that users have seeded
    )
    try:
        for batch in loader:
            if isinstance(batch, KfacpackError):
                raise batch
            yield batch
    except RuntimeError as error:
        if "DataLoader worker" not in str(error) or isinstance(error, KfacpackError):
            raise
        problem = f"a process that prepared examples ended: {first_line(error)}"
        raise KfacpackError(f"{problem}. With --workers 0 there are none, and less memory is needed") from error


class _Examples(Dataset[Any]):
    def __init__(self, prepare: Callable[[Sequence[Example], str], Batch], sources: Sequence[SplitSource]):
        self._prepare, self._sources = prepare, sources

    def __getitem__(self, index: BatchIndices) -> Batch | KfacpackError:
        source, numbers = index
        split, task = self._sources[source]
        try:
            return self._prepare([split[number] for number in numbers], task)
        except KfacpackError as error:
            # Raised here, a process's traceback would become part of what the user is told.
            return error


def _identity(batch: Any) -> Any:
    return batch


def _begin_worker(number: int) -> None:
    """Ctrl-C reaches every process of a terminal: what it means, the one that asked for the batches decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _num_workers(sources: Sequence[SplitSource]) -> int:
    if _requested_workers is not None:
        return _requested_workers
    if not sys.platform.startswith("linux"):
        return 0  # elsewhere, processes that fork may not go on to use the system's libraries
    ours = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(MAX_WORKERS, max(0, ours - 1)) if any(_needs_decoding(split) for split, _ in sources) else 0


def _needs_decoding(split: Split) -> bool:
    """Whether a split's pictures come from files. Those of embedded tasks are pixels already, and texts are short."""
    if not len(split):
        return False
    try:
        return getattr(split[0].get("image"), "format", None) is not None
    except KfacpackError:
        return False  # what is wrong with it is told when it is asked for


def image_batches(transform: Callable[[Any], Tensor], model: str) -> Callable[[Sequence[Example], str], Tensor]:
    """`prepare` of an image model: N examples -> (N, 3, height, width). `transform`: PIL.Image -> one of them."""

    def prepare(examples: Sequence[Example], task: str) -> Tensor:
        for example in examples:
            if "image" not in example:
                found = ", ".join(map(repr, example))
                raise KfacpackError(f"{model} takes pictures, an example of {task!r} has {found}: choose a text model")
        # RGB before any resizing, as both libraries read their own training data: resizing a palette would garble it.
        return torch.stack([transform(example["image"].convert("RGB")) for example in examples])

    return prepare


def outputs(
    model: Model,
    split: Split,
    task: str,
    numbers: Sequence[int],
    batch_size: int,
    forward: Callable[[Batch], Tensor] | None = None,
) -> Iterator[tuple[Sequence[int], Tensor]]:
    """For each batch, the numbers of its examples and their f: (N, C), in float32 at least, without gradient.

    `forward` takes the place of the model's own, for a model that is edited.
    """
    for chosen, batch in prepare_batch(model, split, task, numbers, batch_size):
        with torch.no_grad(), name_task_in_errors(split, task, chosen):
            f = forward(batch) if forward else call_model(model.forward, batch)
        yield chosen, at_least_float32(f)


def prepare_batch(
    model: Model, split: Split, task: str, numbers: Sequence[int], batch_size: int
) -> Iterator[tuple[Sequence[int], Batch]]:
    """The numbers of each batch's examples, and what the model takes them as."""
    every = list(batched(numbers, batch_size))
    yield from zip(every, batches(model, [(split, task)], [(0, chosen) for chosen in every]), strict=True)


@contextmanager
def name_task_in_errors(split: Split, task: str, chosen: Sequence[int]) -> Iterator[None]:
    """An f that is not finite is told with the examples it is of."""
    try:
        yield
    except NotFiniteError as error:
        place = f"{printable(task)}, split {split.source.split!r}, examples {chosen[0]} to {chosen[-1]}"
        problem = "f is not finite; check the weights, or use another dtype for the model"
        raise KfacpackError(f"{place}: {problem}") from error


_LOOKED_AT = 32
"""How many examples are prepared for it. A change in none of them, nor in a label, is not seen."""


def fingerprint(
    model: Model, split: Split, task: str, numbers: Sequence[int] | None = None, *, labels: bool = False
) -> str:
    """Of examples, by default all of a split: some of them, spread evenly, as the model sees them, first and last too.

    With `labels`, also of the class of every one.
    """
    chosen = range(len(split)) if numbers is None else numbers
    digest = sha256(f"{len(chosen)} of {len(split)}".encode())
    if labels:
        digest.update(repr([split.label(number) for number in chosen]).encode())
    batch = model.prepare([split[chosen[place]] for place in _spread(len(chosen))], task)
    for tensor in tensors_of(batch):
        digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def _spread(size: int) -> list[int]:
    count = min(size, _LOOKED_AT)
    return [place * (size - 1) // max(1, count - 1) for place in range(count)]
