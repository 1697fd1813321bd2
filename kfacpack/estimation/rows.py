"""Rows of all positions, (P, features), put together by example.

`kept` is (P,), false where a position is only padding; None keeps all.
"""

from __future__ import annotations

from torch import Tensor

from kfacpack.estimation.layout import Layout


def kept_rows(mask: Tensor | None, layout: Layout, count: int, examples: int) -> Tensor | None:
    """Which of `count` rows a mask (N, R) keeps. It speaks of operations that have R positions, and of no others."""
    if mask is None or layout.order == "whole" or count != mask.numel() or len(mask) != examples:
        return None
    return (mask if layout.order == "outer" else mask.T).reshape(-1)


def by_example(rows: Tensor, layout: Layout, examples: int) -> Tensor:
    """(P, …) -> (N, R, …)."""
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
