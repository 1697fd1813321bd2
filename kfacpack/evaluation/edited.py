"""A model with a task vector: linearised ones as they were trained, others added to the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch

from kfacpack.errors import NotFiniteError
from kfacpack.function.batch import run
from kfacpack.function.parameters import choose
from kfacpack.function.precision import widened
from kfacpack.linear.linearize import Linearized

if TYPE_CHECKING:
    from torch import Tensor

    from kfacpack.models.base import Batch, Model
    from kfacpack.vectors.vector import TaskVector

    Forward = Callable[[Batch], Tensor]
    """A batch -> f, (N, C), without gradient."""
    Forwards = Callable[[Batch], list[Tensor]]
    """A batch -> f with each of some multiples of a vector, each (N, C), without gradient."""


@contextmanager
def edited(model: Model, vector: TaskVector | None, alpha: float = 1.0) -> Iterator[Forward]:
    """f of the model with α τ, as long as the context lasts; the model is then as it was."""
    (only,) = passes(model, vector, (alpha,))
    with only as forwards:
        yield lambda batch: forwards(batch)[0]


def passes(model: Model, vector: TaskVector | None, alphas: Sequence[float]) -> list[AbstractContextManager[Forwards]]:
    """How often the data has to be gone through for f with every α τ: what each pass gives, in a row, is as `alphas`.

    A linearised vector needs one pass, f and J τ, whatever the α; others one for each.
    """
    if vector is None:
        return [_plain(model)]
    if vector.is_linear:
        return [_linearized(model, vector, alphas)]
    return [_applied(model, alpha * vector) for alpha in alphas]


def device_of(model: Model) -> torch.device:
    return next(model.module.parameters()).device


@contextmanager
def _linearized(model: Model, vector: TaskVector, alphas: Sequence[float]) -> Iterator[Forwards]:
    vector.check(model.module, model.function)
    # J is applied to what it was before anybody multiplied it: 0.3 τ at α = 1 is then τ at α = 0.3, to the bit.
    factor, direction = vector.as_multiple()
    wanted = choose(model.module, list(direction))
    linearized = Linearized(model.module, model.forward, wanted)
    tau = {name: direction[name].to(parameter.device) for name, parameter in wanted.items()}

    def forwards(batch: Batch) -> list[Tensor]:
        f, change = map(widened, linearized.outputs(batch, tau))
        if not bool(change.isfinite().all()):
            raise NotFiniteError("J τ has numbers that are not finite")
        return [f + (alpha * factor) * change for alpha in alphas]

    yield forwards


@contextmanager
def _applied(model: Model, vector: TaskVector) -> Iterator[Forwards]:
    with vector.applied(model.module, model.function), _plain(model) as forwards:
        yield forwards


@contextmanager
def _plain(model: Model) -> Iterator[Forwards]:
    def forwards(batch: Batch) -> list[Tensor]:
        with torch.no_grad():
            return [widened(run(model.forward, batch))]

    yield forwards
