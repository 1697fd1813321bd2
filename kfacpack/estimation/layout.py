"""Which numbers of a tensor belong to which example, found out from gradients instead of guessed from shapes.

The gradient of one example's output is zero wherever another example's numbers are. Two such gradients, of the first
and of the last example, tell where the examples lie: along a dimension of their own, or merged with the positions into
one, example by example ("outer": n = 0 0 0 1 1 1) or position by position ("inner": n = 0 1 0 1 0 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

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


def find_layout(first: Tensor, last: Tensor, examples: int) -> Layout | None:
    """The layout that the gradients of the first and of the last example have; None if examples share numbers."""
    here, there = first != 0, last != 0
    found = None
    for layout in _candidates(tuple(first.shape), examples):
        own, others = layout.by_example(here, examples), layout.by_example(there, examples)
        if own[1:].any() or others[:-1].any():
            continue
        # Where both look alike it is certain; two orders can both be possible when only few positions matter to f.
        if bool((own[0] == others[-1]).all()):
            return layout
        found = found or layout
    return found


def _candidates(shape: tuple[int, ...], examples: int) -> Iterator[Layout]:
    for dim, size in enumerate(shape):
        if size == examples:
            yield Layout(dim, "whole")
    for dim, size in enumerate(shape):
        if size > examples and size % examples == 0:
            yield Layout(dim, "outer")
            yield Layout(dim, "inner")
