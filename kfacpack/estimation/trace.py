"""A look at the model with one example, twice: what f's graph is, and where in it the examples lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfacpack.errors import KfacpackError
from kfacpack.estimation.batch import Batch, Forward, length, map_tensors, run
from kfacpack.estimation.graph import Graph
from kfacpack.estimation.layout import Layout, find_layout

if TYPE_CHECKING:
    from torch.autograd.graph import Node


@dataclass(frozen=True)
class Trace:
    """Of every operation that is the first to use a parameter: the gradients of two examples at its output."""

    graph: Graph
    f: Tensor
    gradients: Mapping[Node, tuple[Tensor, Tensor]]
    """At the first example and at the last one."""

    @property
    def examples(self) -> int:
        return len(self.f)

    def layout(self, node: Node) -> Layout | None:
        """Where the examples are in what this operation gives; None where they are not told apart (yet)."""
        if node not in self.gradients:
            return None
        first, last = self.gradients[node]
        return find_layout(first, last, self.examples)


def trace(forward: Forward, batch: Batch, parameters: Mapping[str, Tensor]) -> Trace:
    """`parameters` require gradients; those that f does not depend on are not in the graph."""
    f = _two_examples(forward, batch)
    if len(f) < 2:
        raise KfacpackError(
            "the first batch has one example; give at least two in it, to see how examples are laid out"
        )
    if f.grad_fn is None:
        raise KfacpackError("f does not depend on any of the chosen parameters; is it computed under torch.no_grad?")
    graph = Graph(f)
    used = [parameter for parameter in parameters.values() if graph.uses(parameter)]
    nodes = graph.reach(used)
    direction = torch.randn(f.shape[1:], generator=torch.Generator().manual_seed(0)).to(f)
    first = _gradients_at(f, nodes, graph, 0, direction)
    last = _gradients_at(f, nodes, graph, len(f) - 1, direction)
    return Trace(graph, f, {node: (first[node], last[node]) for node in first.keys() & last.keys()})


def _two_examples(forward: Forward, batch: Batch) -> Tensor:
    """f of the first example, twice; of the whole batch, where the first dimension of its inputs is not examples'."""
    if length(batch) is not None:
        try:
            f = run(forward, map_tensors(batch, lambda tensor: tensor[[0, 0]]))
        except (RuntimeError, ValueError, IndexError):
            # Cut along the wrong dimension, a batch may be no input at all. Whether it was one, the next line tells.
            return run(forward, batch)
        if len(f) == 2:
            return f
    return run(forward, batch)


def _gradients_at(f: Tensor, nodes: set[Node], graph: Graph, example: int, direction: Tensor) -> dict[Node, Tensor]:
    found: dict[Node, Tensor] = {}

    def hook_for(node: Node) -> None:
        def keep(gradients: tuple[Tensor | None, ...]) -> None:
            if len(gradients) == 1 and gradients[0] is not None:
                found[node] = gradients[0]

        handles.append(node.register_prehook(keep))

    handles: list[torch.utils.hooks.RemovableHandle] = []
    sinks = list(graph.sinks(nodes))
    for node in nodes:
        hook_for(node)
    seed = torch.zeros_like(f)
    seed[example] = direction
    edges = [torch.autograd.graph.GradientEdge(node, 0) for node in sinks]
    gradients = torch.autograd.grad(f, edges, seed, retain_graph=True, allow_unused=True)
    for handle in handles:
        handle.remove()
    found.update((node, gradient) for node, gradient in zip(sinks, gradients, strict=True) if gradient is not None)
    return found
