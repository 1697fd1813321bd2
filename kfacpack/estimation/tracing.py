"""Which numbers of a tensor belong to which example, found out from gradients instead of guessed from shapes.

Gradients are linear in what f is asked. Of one example given twice, and the second time asked twice as much, every
number of the second is double the number of the first. So it shows where the two lie: along a dimension of their own,
or merged with the positions into one, example by example ("outer": n = 0 0 0 1 1 1) or position by position ("inner":
n = 0 1 0 1 0 1). Where inputs cannot be cut into examples, a whole batch is asked twice, for its first and for its last
example: the gradient of one is zero where the other's numbers are.

Rows of all positions, (P, features), put together by example.

`kept` is (P,), false where a position is only padding; None keeps all.

A look at the model with one example, twice: what f's graph is, and where in it the examples lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kfacpack.errors import KfacpackError
from kfacpack.estimation.autograd_graph import AutogradGraph, pass_back
from kfacpack.models.functional import Forward, ModelInput, batch_size_of, call_model, map_tensors

if TYPE_CHECKING:
    from torch.autograd.graph import Node


@dataclass(frozen=True)
class ExampleLayout:
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


def layout_of_doubled(g: Tensor, noise: float = 0.0) -> ExampleLayout | None:
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


def layout_of_two(first: Tensor, last: Tensor, examples: int) -> ExampleLayout | None:
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


def any_layout(shape: tuple[int, ...], examples: int) -> ExampleLayout | None:
    """A layout that is possible for this shape, where there is nothing to tell them apart by."""
    return next(_candidates(shape, examples), None)


def _candidates(shape: tuple[int, ...], examples: int) -> Iterator[ExampleLayout]:
    for dim, size in enumerate(shape):
        if size == examples:
            yield ExampleLayout(dim, "whole")
    for dim, size in enumerate(shape):
        if size > examples and size % examples == 0:
            yield ExampleLayout(dim, "outer")
            yield ExampleLayout(dim, "inner")


def kept_rows(mask: Tensor | None, layout: ExampleLayout, gradients: Tensor, examples: int) -> Tensor | None:
    """Which of the rows of `gradients` (P, out) a mask (N, R) keeps.

    It speaks of operations that have R positions, and of those where f does not depend on what it leaves out: others
    may have as many positions by chance, such as a decoder beside an encoder.
    """
    if mask is None or layout.order == "whole" or len(gradients) != mask.numel() or len(mask) != examples:
        return None
    kept = (mask if layout.order == "outer" else mask.T).reshape(-1)
    return None if bool(gradients[~kept].any()) else kept


def by_example(rows: Tensor, layout: ExampleLayout, examples: int) -> Tensor:
    """(P, …) -> (N, R, …)."""
    if layout.order == "whole" and len(rows) != examples:
        problem = f"an operation had one position in the first batch, and has {len(rows) // examples} now"
        raise KfacpackError(f"{problem}; begin with a batch that has as many as others have")
    split = layout.by_example(rows, examples)
    return split[:, None] if layout.order == "whole" else split


def sums(rows: Tensor, layout: ExampleLayout, examples: int, kept: Tensor | None) -> Tensor:
    """Each example's sum over its positions, (N, features)."""
    if kept is not None:
        rows = rows * kept[:, None]
    return by_example(rows, layout, examples).sum(1)


def means(rows: Tensor, layout: ExampleLayout, examples: int, kept: Tensor | None) -> Tensor:
    """Each example's mean over its positions, (N, features)."""
    if kept is None:
        return by_example(rows, layout, examples).mean(1)
    number = by_example(kept, layout, examples).sum(1).clamp(min=1)
    return sums(rows, layout, examples, kept) / number[:, None]


@dataclass
class ModelTrace:
    """Of every operation that is the first to use a parameter: gradients at its output that tell examples apart."""

    graph: AutogradGraph
    f: Tensor
    twice: bool
    """Whether it is the batch's first example, twice, or the whole batch."""
    gradients: Mapping[Node, tuple[Tensor, ...]]
    """Of f at a single example twice, the second time doubled; or at the first and at the last of a batch."""
    example: int = 0
    """Which of the batch it is."""
    silent: int = 0
    """How many operations were found where this example has no gradient, so that another one may tell more."""
    _layouts: dict[Node, ExampleLayout | None] = field(default_factory=dict)

    @property
    def examples(self) -> int:
        return len(self.f)

    def layout(self, node: Node) -> ExampleLayout | None:
        """Where the examples are in what this operation gives; None where they are not told apart (yet)."""
        if node not in self._layouts:
            self._layouts[node] = self.layout_of(self.gradients[node]) if node in self.gradients else None
        return self._layouts[node]

    def layout_of(self, gradients: tuple[Tensor, ...]) -> ExampleLayout | None:
        if len(gradients) == 1:
            return layout_of_doubled(gradients[0])
        return layout_of_two(gradients[0], gradients[1], self.examples)

    def layout_of_zero(self, gradients: tuple[Tensor, ...]) -> ExampleLayout | None:
        """A layout for gradients that are zero but for rounding; None if they are not.

        So they are behind an attention that has a single choice. Where f does not depend on numbers, it does not matter
        whose they are.
        """
        if any(each.abs().amax() > self._noise for each in gradients):
            return None
        self.silent += 1
        return any_layout(tuple(gradients[0].shape), self.examples)

    @cached_property
    def _noise(self) -> float:
        largest = max(float(each.abs().amax()) for found in self.gradients.values() for each in found if each.numel())
        return 100 * torch.finfo(self.f.dtype).eps * largest


def trace_model(forward: Forward, batch: ModelInput, parameters: Mapping[str, Tensor], example: int = 0) -> ModelTrace:
    """`parameters` require gradients; those that f does not depend on are not in the graph."""
    f, twice = _two_examples(forward, batch, example)
    if len(f) < 2:
        problem = "the first batch has one example, and its first dimension is not the examples'"
        raise KfacpackError(f"{problem}; give at least two examples, to see how they are laid out")
    graph = AutogradGraph(f)
    nodes = graph.reach(parameter for parameter in parameters.values() if graph.uses(parameter))
    if not nodes:
        some = ", ".join(list(parameters)[:3])
        problem = f"f does not depend on any of the chosen parameters ({some}, …)"
        raise KfacpackError(f"{problem}. Choose others; or, if it should, do not compute it under torch.no_grad")
    direction = torch.randn(f.shape[1:], generator=torch.Generator().manual_seed(0)).to(f)
    seeds = [torch.zeros_like(f)] if twice else [torch.zeros_like(f), torch.zeros_like(f)]
    seeds[0][0] = direction
    seeds[-1][-1] = 2 * direction
    found = [_gradients_at(f, nodes, graph, seed) for seed in seeds]
    return ModelTrace(
        graph, f, twice, {node: tuple(each[node] for each in found) for node in nodes if node in found[0]}, example
    )


def _two_examples(forward: Forward, batch: ModelInput, example: int) -> tuple[Tensor, bool]:
    """f of one example, twice; or of the whole batch, if its inputs do not have examples along dimension 0."""
    if batch_size_of(batch) is not None:
        try:
            f = call_model(forward, map_tensors(batch, lambda tensor: tensor[[example, example]]))
        except (RuntimeError, ValueError, IndexError):
            f = None  # cut along the wrong dimension, a batch may be no input at all; if it was none, we hear of it
        if f is not None and len(f) == 2 and same_output(f[0], f[1]):
            return f, True
    f = call_model(forward, batch)
    with torch.no_grad():
        if not all(map(same_output, f, call_model(forward, batch))):
            problem = "f is not the same when it is computed again, so that it has no curvature"
            raise KfacpackError(f"{problem}; see to it that nothing in the model is random in evaluation mode")
    return f, False


def same_output(one: Tensor, other: Tensor) -> bool:
    """Whether two (C,) are equal up to rounding."""
    return bool((one - other).norm() <= torch.finfo(one.dtype).eps ** 0.5 * other.norm())


def _gradients_at(f: Tensor, nodes: set[Node], graph: AutogradGraph, seed: Tensor) -> dict[Node, Tensor]:
    found: dict[Node, Tensor] = {}

    def keep(node: Node, g: Tensor, at_work: bool) -> None:
        found[node] = g

    pass_back(f, seed, nodes, graph.sinks(nodes), keep, retain=True)
    return found
