"""Examples become batches here: decoded and transformed in this process, or ahead of it in others.

How many others there are never changes what comes, nor its order; it is no part of any result. torch's DataLoader does
the work; a process of its computes with one thread.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset

from kfacpack.errors import KfacpackError, first_line

if TYPE_CHECKING:
    from kfacpack.models.base import Batch, Model
    from kfacpack.tasks.base import Example, Split

    Source = tuple[Split, str]
    """A split, and its task's name."""
    Wanted = tuple[int, Sequence[int]]
    """Which source, and the numbers of its examples that are to be one batch."""

MOST = 4
"""Processes, where nobody said how many."""
_asked: int | None = 0


def use_workers(count: int | None) -> None:
    """From now on, so many processes prepare batches beside this one. None: some where pictures have to be decoded."""
    global _asked
    if count is not None and count < 0:
        raise KfacpackError(f"workers {count}: expected a number that is not negative")
    _asked = count


def batches(model: Model, sources: Sequence[Source], wanted: Iterable[Wanted]) -> Generator[Batch, None, None]:
    """One batch for each that is wanted, in that order. `wanted` is looked at a little ahead, and may be endless.

    Who leaves before the end closes it, so that its processes end.
    """
    workers = _number_of(sources)
    loader = DataLoader(
        _Examples(model.prepare, sources),
        batch_size=None,
        sampler=wanted,
        num_workers=workers,
        collate_fn=_as_it_is,
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
    def __init__(self, prepare: Callable[[Sequence[Example], str], Batch], sources: Sequence[Source]):
        self._prepare, self._sources = prepare, sources

    def __getitem__(self, index: Wanted) -> Batch | KfacpackError:
        source, numbers = index
        split, task = self._sources[source]
        try:
            return self._prepare([split[number] for number in numbers], task)
        except KfacpackError as error:
            # Raised here, a process's traceback would become part of what the user is told.
            return error


def _as_it_is(batch: Any) -> Any:
    return batch


def _begin_worker(number: int) -> None:
    """Ctrl-C reaches every process of a terminal: what it means, the one that asked for the batches decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _number_of(sources: Sequence[Source]) -> int:
    if _asked is not None:
        return _asked
    if not sys.platform.startswith("linux"):
        return 0  # elsewhere, processes that fork may not go on to use the system's libraries
    ours = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(MOST, max(0, ours - 1)) if any(_decodes(split) for split, _ in sources) else 0


def _decodes(split: Split) -> bool:
    """Whether a split's pictures come from files. Those of embedded tasks are pixels already, and texts are short."""
    if not len(split):
        return False
    try:
        return getattr(split[0].get("image"), "format", None) is not None
    except KfacpackError:
        return False  # what is wrong with it is told when it is asked for
