"""What a model makes of a split's examples, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kfacpack.errors import KfacpackError, NotFiniteError, printable
from kfacpack.function.batch import run
from kfacpack.models.base import Batch, Model
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
    for chosen in batched(numbers, batch_size):
        batch = model.prepare([split[number] for number in chosen], task)
        try:
            with torch.no_grad():
                f = forward(batch) if forward else run(model.forward, batch)
        except NotFiniteError as error:
            place = f"{printable(task)}, split {split.source.split!r}, examples {chosen[0]} to {chosen[-1]}"
            problem = "f is not finite; check the weights, or use another dtype for the model"
            raise KfacpackError(f"{place}: {problem}") from error
        yield chosen, f.to(torch.promote_types(f.dtype, torch.float32))
