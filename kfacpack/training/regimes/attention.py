"""`attention`: the model itself, but of its parameters only those of attention layers move.

That keeps a non-linear model nearer to its linearisation than moving all of them does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kfacpack.training.regimes.base import require_some
from kfacpack.training.regimes.full import Full

if TYPE_CHECKING:
    from torch import Tensor

    from kfacpack.models.base import Model

ATTENTION = re.compile(r"(^|\.|_)(self_?|encdec|cross_?)?(attn|attention)(\.|_|$)", re.IGNORECASE)
"""What families call an attention layer: attn, attention, SelfAttention, EncDecAttention."""
NORM = re.compile("norm", re.IGNORECASE)


class Attention(Full):
    name = "attention"

    def choose(self, model: Model, params: Iterable[str] | str | None) -> dict[str, Tensor]:
        wanted = super().choose(model, params)
        if params is None:
            wanted = {k: v for k, v in wanted.items() if ATTENTION.search(k) and not NORM.search(k)}
        require_some(wanted, self.name, model)
        return wanted
