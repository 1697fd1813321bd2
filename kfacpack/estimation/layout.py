"""Which numbers of a tensor belong to which example, found out from gradients instead of guessed from shapes.

Gradients are linear in what f is asked. Of one example given twice, and the second time asked twice as much, every
number of the second is double the number of the first. So it shows where the two lie: along a dimension of their own,
or merged with the positions into one, example by example ("outer": n = 0 0 0 1 1 1) or position by position ("inner":
n = 0 1 0 1 0 1). Where inputs cannot be cut into examples, a whole batch is asked twice, for its first and for its last
example: the gradient of one is zero where the other's numbers are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Where the examples are."""

    dim: int
    order: Literal["whole", "outer", "inner"]

    def by_example(self, tensor: Tensor, examples: int) -> Tensor:
        """(…) -> (N, …), a view; a merged dimension leaves its positions behind, where it was."""
        if self.order == "whole":
            return tensor.movedim(self.dim, 0)
        outer = self.order == "outer"
        split: Tensor = tensor.unflatten(self.dim, (examples, -1) if outer else (-1, examples))
        return split.movedim(self.dim if outer else self.dim + 1, 0)

    def per_example(self, tensor: Tensor, shape: tuple[int, ...], examples: int) -> Tensor:
        """(…) -> (N, numbers): summed, for each example, to what a tensor of `shape` was broadcast from."""
        padded = [1] * (tensor.dim() - len(shape)) + list(shape)
        target = padded[: self.dim] + padded[self.dim + 1 :] if self.order == "whole" else padded
        split = self.by_example(tensor, examples)
        summed = [k for k, size in enumerate(target, start=1) if size == 1 and split.shape[k] > 1]
        return (split.sum(summed) if summed else split).reshape(examples, -1)

    def fits(self, tensor: Tensor, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of `shape` was broadcast along the examples, and so is shared by all."""
        place = self.dim - (tensor.dim() - len(shape))
        return place < 0 or shape[place] == 1


def layout_of_doubled(g: Tensor, noise: float = 0.0) -> Layout | None:
    """The layout of the gradients of one example twice, the second doubled; None if the two share numbers, or are zero.

    With `noise`, numbers no larger than that stand for zero, and zero fits any layout.
    """
    tolerance = torch.finfo(g.dtype).eps ** 0.5 * g.abs().amax() + noise
    if tolerance == 0:
        return None
    for layout in _candidates(tuple(g.shape), 2):
        one, two = layout.by_example(g, 2)
        if bool((two - 2 * one).abs().amax() <= tolerance):
            return layout
    return None


def layout_of_two(first: Tensor, last: Tensor, examples: int) -> Layout | None:
    """The layout of the gradients of a batch's first and of its last example; None if examples share numbers.

    Where only few positions matter to f, several would be possible; then it is the first of them.
    """
    if not (first.any() and last.any()):
        return None
    for layout in _candidates(tuple(first.shape), examples):
        own, others = layout.by_example(first, examples), layout.by_example(last, examples)
        if not (own[1:].any() or others[:-1].any()):
            return layout
    return None


def any_layout(shape: tuple[int, ...], examples: int) -> Layout | None:
    """A layout that is possible for this shape, where there is nothing to tell them apart by."""
    return next(_candidates(shape, examples), None)


def _candidates(shape: tuple[int, ...], examples: int) -> Iterator[Layout]:
    for dim, size in enumerate(shape):
        if size == examples:
            yield Layout(dim, "whole")
    for dim, size in enumerate(shape):
        if size > examples and size % examples == 0:
            yield Layout(dim, "outer")
            yield Layout(dim, "inner")
