"""A learning rate that fits the model.

The first step of Adam moves every parameter by the learning rate, in the direction of its gradient's sign. How far that
moves f differs from model to model by orders of magnitude, but can be computed: the model is linear there. So the rate
is the one with which such a step moves f by a given share of its own size: the length of a normalised f, the deviation
from its mean of any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import cross_entropy

from kfacpack.errors import KfacpackError
from kfacpack.linear.linearize import Linearized

if TYPE_CHECKING:
    from torch import Tensor

    from kfacpack.heads import Head
    from kfacpack.models.base import Batch
    from kfacpack.training.regimes import Regime

_DIGITS = 2
"""Of the rate: enough to train by, and the same whatever the order of additions."""


def fitting_rate(regime: Regime, head: Head, batch: Batch, labels: Tensor) -> float:
    linearized = Linearized(regime.model.module, regime.model.forward, regime.wanted)
    point = linearized.at(batch, linearized.zeros())
    f = point.f.detach().float().requires_grad_()
    (u,) = torch.autograd.grad(cross_entropy(head.logits(f), labels), f)
    gradient = point.gradient(u.to(point.f))
    if not gradient:
        raise no_influence(regime)
    step = {name: each.sign() for name, each in gradient.items()}
    _, change = linearized.outputs(batch, step)
    moved = float(change.float().norm() / _size(point.f.float(), normalized=regime.model.function.normalized))
    if not 0 < moved < float("inf"):
        raise KfacpackError(
            "no learning rate can be found from the first batch: its gradient is zero; give one with --lr"
        )
    return float(f"{regime.reach / moved:.{_DIGITS}g}")


def _size(f: Tensor, *, normalized: bool) -> Tensor:
    """Norm that a change of f (N, C) is compared with.

    An f that is not normalised may have a mean that is large compared with its variation over examples, and only the
    variation tells examples apart. So such an f is centred, unless that leaves nothing.
    """
    centred = f - f.mean(0)
    size: Tensor = f.norm() if normalized or not bool(centred.any()) else centred.norm()
    return size


def require_influence(regime: Regime, batch: Batch) -> None:
    """Refuse parameters that f does not depend on: nothing can be learnt by moving them."""
    linearized = Linearized(regime.model.module, regime.model.forward, regime.wanted)
    point = linearized.at(batch, linearized.zeros())
    if not point.gradient(torch.ones_like(point.f)):
        raise no_influence(regime)


def no_influence(regime: Regime) -> KfacpackError:
    names = list(regime.wanted)
    some = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return KfacpackError(
        f"f does not depend on the parameters that were chosen ({some}); there is nothing to learn by moving them. "
        "Choose others with --params"
    )
