"""A look at the model with one example, twice: what f's graph is, and where in it the examples lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from kfacpack.errors import KfacpackError
from kfacpack.estimation.batch import Batch, Forward, length, map_tensors, run
from kfacpack.estimation.graph import Graph
from kfacpack.estimation.layout import Layout, layout_of_doubled, layout_of_two

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
            return layout_of_doubled(gradients[0]) or layout_of_doubled(gradients[0], self._noise)
        return layout_of_two(gradients[0], gradients[1], self.examples)

    @cached_property
    def _noise(self) -> float:
        """What rounding leaves where a gradient should be zero, as behind an attention that has a single choice."""
        largest = max(float(each.abs().amax()) for found in self.gradients.values() for each in found if each.numel())
        return 100 * torch.finfo(self.f.dtype).eps * largest


def trace(forward: Forward, batch: Batch, parameters: Mapping[str, Tensor]) -> Trace:
    """`parameters` require gradients; those that f does not depend on are not in the graph."""
    f, twice = _two_examples(forward, batch)
    if len(f) < 2:
        problem = "the first batch has one example, and its first dimension is not the examples'"
        raise KfacpackError(f"{problem}; give at least two examples, to see how they are laid out")
    if f.grad_fn is None:
        raise KfacpackError("f does not depend on any of the chosen parameters; is it computed under torch.no_grad?")
    graph = Graph(f)
    nodes = graph.reach(parameter for parameter in parameters.values() if graph.uses(parameter))
    direction = torch.randn(f.shape[1:], generator=torch.Generator().manual_seed(0)).to(f)
    seeds = [torch.zeros_like(f)] if twice else [torch.zeros_like(f), torch.zeros_like(f)]
    seeds[0][0] = direction
    seeds[-1][-1] = 2 * direction
    found = [_gradients_at(f, nodes, graph, seed) for seed in seeds]
    return Trace(graph, f, twice, {node: tuple(each[node] for each in found) for node in nodes if node in found[0]})


def _two_examples(forward: Forward, batch: Batch) -> tuple[Tensor, bool]:
    """f of the first example, twice; or of the whole batch, if its inputs do not have examples along dimension 0."""
    if length(batch) is not None:
        try:
            f = run(forward, map_tensors(batch, lambda tensor: tensor[[0, 0]]))
        except (RuntimeError, ValueError, IndexError):
            # Cut along the wrong dimension, a batch may be no input at all. If it was none before, we hear of it now.
            return run(forward, batch), False
        if len(f) == 2:
            return f, True
    return run(forward, batch), False


def _gradients_at(f: Tensor, nodes: set[Node], graph: Graph, seed: Tensor) -> dict[Node, Tensor]:
    found: dict[Node, Tensor] = {}

    def keeping(node: Node) -> Callable[[tuple[Tensor | None, ...]], None]:
        def keep(gradients: tuple[Tensor | None, ...]) -> None:
            if len(gradients) == 1 and gradients[0] is not None:
                found[node] = gradients[0]

        return keep

    sinks = list(graph.sinks(nodes))
    handles = [node.register_prehook(keeping(node)) for node in nodes]
    edges = [GradientEdge(node, 0) for node in sinks]
    gradients = torch.autograd.grad(f, edges, seed, retain_graph=True, allow_unused=True)
    for handle in handles:
        handle.remove()
    found.update((node, gradient) for node, gradient in zip(sinks, gradients, strict=True) if gradient is not None)
    return found
