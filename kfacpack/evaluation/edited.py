"""A model with a task vector: linearised ones as they were trained, others added to the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from kfacpack.function.batch import run
from kfacpack.function.parameters import choose
from kfacpack.linear.linearize import Linearized

if TYPE_CHECKING:
    from torch import Tensor

    from kfacpack.models.base import Batch, Model
    from kfacpack.vectors.vector import TaskVector

    Forward = Callable[[Batch], Tensor]
    """A batch -> f, (N, C), without gradient."""


@contextmanager
def edited(model: Model, vector: TaskVector | None) -> Iterator[Forward]:
    """f of the model with the vector, as long as the context lasts; the model is then as it was."""
    if vector is None:
        yield _plain(model)
    elif vector.regime == "linear":
        vector.check(model.module)
        wanted = choose(model.module, list(vector))
        linearized = Linearized(model.module, model.forward, wanted)
        tau = {name: vector[name].to(parameter.device) for name, parameter in wanted.items()}

        def forward(batch: Batch) -> Tensor:
            f, change = linearized.outputs(batch, tau)
            return f.float() + change.float()

        yield forward
    else:
        with vector.applied(model.module):
            yield _plain(model)


def device_of(model: Model) -> torch.device:
    return next(model.module.parameters()).device


def _plain(model: Model) -> Forward:
    def forward(batch: Batch) -> Tensor:
        with torch.no_grad():
            return run(model.forward, batch)

    return forward
