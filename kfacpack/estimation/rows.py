"""Rows of all positions, (P, features), put together by example.

`kept` is (P,), false where a position is only padding; None keeps all.
"""

from __future__ import annotations

from torch import Tensor

from kfacpack.errors import KfacpackError
from kfacpack.estimation.layout import Layout


def kept_rows(mask: Tensor | None, layout: Layout, gradients: Tensor, examples: int) -> Tensor | None:
    """Which of the rows of `gradients` (P, out) a mask (N, R) keeps.

    It speaks of operations that have R positions, and of those where f does not depend on what it leaves out: others
    may have as many positions by chance, such as a decoder beside an encoder.
    """
    if mask is None or layout.order == "whole" or len(gradients) != mask.numel() or len(mask) != examples:
        return None
    kept = (mask if layout.order == "outer" else mask.T).reshape(-1)
    return None if bool(gradients[~kept].any()) else kept


def by_example(rows: Tensor, layout: Layout, examples: int) -> Tensor:
    """(P, …) -> (N, R, …)."""
    if layout.order == "whole" and len(rows) != examples:
        problem = f"an operation had one position in the first batch, and has {len(rows) // examples} now"
        raise KfacpackError(f"{problem}; begin with a batch that has as many as others have")
    split = layout.by_example(rows, examples)
    return split[:, None] if layout.order == "whole" else split


def sums(rows: Tensor, layout: Layout, examples: int, kept: Tensor | None) -> Tensor:
    """Each example's sum over its positions, (N, features)."""
    if kept is not None:
        rows = rows * kept[:, None]
    return by_example(rows, layout, examples).sum(1)


def means(rows: Tensor, layout: Layout, examples: int, kept: Tensor | None) -> Tensor:
    """Each example's mean over its positions, (N, features)."""
    if kept is None:
        return by_example(rows, layout, examples).mean(1)
    number = by_example(kept, layout, examples).sum(1).clamp(min=1)
    return sums(rows, layout, examples, kept) / number[:, None]
