"""A look at the model with one example, twice: what f's graph is, and where in it the examples lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfacpack.errors import KfacpackError
from kfacpack.estimation.graph import Graph, pass_back
from kfacpack.estimation.layout import Layout, any_layout, layout_of_doubled, layout_of_two
from kfacpack.function.batch import Batch, Forward, length, map_tensors, run

if TYPE_CHECKING:
    from torch.autograd.graph import Node


@dataclass
class Trace:
    """Of every operation that is the first to use a parameter: gradients at its output that tell examples apart."""

    graph: Graph
    f: Tensor
    twice: bool
    """Whether it is the batch's first example, twice, or the whole batch."""
    gradients: Mapping[Node, tuple[Tensor, ...]]
    """Of f at a single example twice, the second time doubled; or at the first and at the last of a batch."""
    example: int = 0
    """Which of the batch it is."""
    silent: int = 0
    """How many operations were found where this example has no gradient, so that another one may tell more."""
    _layouts: dict[Node, Layout | None] = field(default_factory=dict)

    @property
    def examples(self) -> int:
        return len(self.f)

    def layout(self, node: Node) -> Layout | None:
        """Where the examples are in what this operation gives; None where they are not told apart (yet)."""
        if node not in self._layouts:
            self._layouts[node] = self.layout_of(self.gradients[node]) if node in self.gradients else None
        return self._layouts[node]

    def layout_of(self, gradients: tuple[Tensor, ...]) -> Layout | None:
        if len(gradients) == 1:
            return layout_of_doubled(gradients[0])
        return layout_of_two(gradients[0], gradients[1], self.examples)

    def layout_of_zero(self, gradients: tuple[Tensor, ...]) -> Layout | None:
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


def trace(forward: Forward, batch: Batch, parameters: Mapping[str, Tensor], example: int = 0) -> Trace:
    """`parameters` require gradients; those that f does not depend on are not in the graph."""
    f, twice = _two_examples(forward, batch, example)
    if len(f) < 2:
        problem = "the first batch has one example, and its first dimension is not the examples'"
        raise KfacpackError(f"{problem}; give at least two examples, to see how they are laid out")
    graph = Graph(f)
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
    return Trace(
        graph, f, twice, {node: tuple(each[node] for each in found) for node in nodes if node in found[0]}, example
    )


def _two_examples(forward: Forward, batch: Batch, example: int) -> tuple[Tensor, bool]:
    """f of one example, twice; or of the whole batch, if its inputs do not have examples along dimension 0."""
    if length(batch) is not None:
        try:
            f = run(forward, map_tensors(batch, lambda tensor: tensor[[example, example]]))
        except (RuntimeError, ValueError, IndexError):
            f = None  # cut along the wrong dimension, a batch may be no input at all; if it was none, we hear of it
        if f is not None and len(f) == 2 and same_output(f[0], f[1]):
            return f, True
    f = run(forward, batch)
    with torch.no_grad():
        if not all(map(same_output, f, run(forward, batch))):
            problem = "f is not the same when it is computed again, so that it has no curvature"
            raise KfacpackError(f"{problem}; see to it that nothing in the model is random in evaluation mode")
    return f, False


def same_output(one: Tensor, other: Tensor) -> bool:
    """Whether two (C,) are equal up to rounding."""
    return bool((one - other).norm() <= torch.finfo(one.dtype).eps ** 0.5 * other.norm())


def _gradients_at(f: Tensor, nodes: set[Node], graph: Graph, seed: Tensor) -> dict[Node, Tensor]:
    found: dict[Node, Tensor] = {}

    def keep(node: Node, g: Tensor, at_work: bool) -> None:
        found[node] = g

    pass_back(f, seed, nodes, graph.sinks(nodes), keep, retain=True)
    return found
