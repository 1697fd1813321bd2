"""What a model makes of a split's examples, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kfacpack.errors import KfacpackError, NotFiniteError, printable
from kfacpack.function.batch import run
from kfacpack.function.precision import widened
from kfacpack.models.base import Batch, Model
from kfacpack.models.batches import batches
from kfacpack.tasks.base import Split
from kfacpack.tasks.sampling import batched


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
    for chosen, batch in prepared(model, split, task, numbers, batch_size):
        with torch.no_grad(), naming(split, task, chosen):
            f = forward(batch) if forward else run(model.forward, batch)
        yield chosen, widened(f)


def prepared(
    model: Model, split: Split, task: str, numbers: Sequence[int], batch_size: int
) -> Iterator[tuple[Sequence[int], Batch]]:
    """The numbers of each batch's examples, and what the model takes them as."""
    every = list(batched(numbers, batch_size))
    yield from zip(every, batches(model, [(split, task)], [(0, chosen) for chosen in every]), strict=True)


@contextmanager
def naming(split: Split, task: str, chosen: Sequence[int]) -> Iterator[None]:
    """An f that is not finite is told with the examples it is of."""
    try:
        yield
    except NotFiniteError as error:
        place = f"{printable(task)}, split {split.source.split!r}, examples {chosen[0]} to {chosen[-1]}"
        problem = "f is not finite; check the weights, or use another dtype for the model"
        raise KfacpackError(f"{place}: {problem}") from error
