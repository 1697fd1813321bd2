"""Reads from autograd's graph where parameters enter a computation.

An edge leads from the operation that used a tensor to the one that computed it; a parameter is a leaf. In the opposite
direction, from a parameter outwards, there are first operations on the parameter alone (a transpose, a cast, one part
of a fused projection), and then the operation where it meets the examples. Estimates are made from that operation.
Modules are neither inspected nor changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import CheckpointError

from kfacpack._torch import (
    RESHAPING_OPERATIONS,
    accumulated_leaf,
    call_backward,
    input_shape,
    operation_name,
    output_count,
    slice_start,
)
from kfacpack.errors import KfacpackError

if TYPE_CHECKING:
    from torch.autograd.graph import Node


class GraphStep(NamedTuple):
    """One operation on the path from a parameter outwards."""

    node: Node
    slot: int
    """Which of its inputs the operation takes the previous result as."""
    output: int
    """Which output of the previous operation it takes."""

    @property
    def operand_shape(self) -> tuple[int, ...]:
        """Shape of the input that it takes."""
        return input_shape(self.node, self.slot)


@dataclass(frozen=True)
class UsagePath:
    """Description of the path from a parameter to its operation, to find it again in the graph of the next batch."""

    ends: frozenset[tuple[str, int]]
    """Name and slot of the operation. A product may be one of several, depending on the memory layout of its rows."""
    length: int | None
    """Number of steps; None if it depends on the memory layout."""
    parts: tuple[int, ...]
    """Which output was taken, for every operation on the path that has several."""
    count: int
    """Number of paths from this parameter."""


GraphSteps = tuple[GraphStep, ...]
VisitFn = Callable[["Node", Tensor, bool], None]
"""Called with an operation, the gradient at its output, and whether the backward pass is still running."""


class AutogradGraph:
    """The operations between f and the parameters it was computed from.

    Args:
        f: Output with its graph.
    """

    def __init__(self, f: Tensor):
        self._consumers: dict[Node, list[GraphStep]] = defaultdict(list)
        self._leaves: dict[int, Node] = {}
        self._nodes: list[Node] = []
        stack = [f.grad_fn] if f.grad_fn is not None else []
        seen = set(stack)
        while stack:
            node = stack.pop()
            self._nodes.append(node)
            leaf = accumulated_leaf(node)
            if leaf is not None:
                self._leaves[id(leaf)] = node
            for slot, (child, output) in enumerate(node.next_functions):
                if child is None:
                    continue
                self._consumers[child].append(GraphStep(node, slot, output))
                if child not in seen:
                    seen.add(child)
                    stack.append(child)

    def uses(self, parameter: Tensor) -> bool:
        """Returns whether f was computed from a parameter."""
        return id(parameter) in self._leaves

    def reach(self, parameters: Iterable[Tensor]) -> set[Node]:
        """Returns every operation that may be the first to combine one of the parameters with anything else.

        That includes operations whose only differentiable input is computed from one parameter. Operations that only
        reshape or cast a parameter are left out: seeing their gradient would require computing the parameter's.
        """
        nodes: set[Node] = set()
        stack = [self._leaves[id(parameter)] for parameter in parameters]
        for node in stack:
            stack.extend(
                step.node for step in self._consumers[node] if operation_name(step.node) in RESHAPING_OPERATIONS
            )
        reshaped = set(stack)
        while stack:
            for step in self._consumers[stack.pop()]:
                if step.node not in nodes and step.node not in reshaped:
                    nodes.add(step.node)
                    if _has_one_input(step.node):
                        stack.append(step.node)
        return nodes

    def paths(self, parameter: Tensor, ends: Callable[[GraphSteps], bool]) -> Iterator[GraphSteps]:
        """Yields every path outwards from a parameter.

        Args:
            parameter: A parameter that f was computed from.
            ends: Whether a path ends at its last step. It ends anyway at an operation with another differentiable
                input.
        """
        return self._paths_from(self._leaves[id(parameter)], (), ends)

    def _paths_from(self, node: Node, steps: GraphSteps, ends: Callable[[GraphSteps], bool]) -> Iterator[GraphSteps]:
        for step in self._consumers[node]:
            longer = (*steps, step)
            if ends(longer) or not _has_one_input(step.node):
                yield longer
            else:
                yield from self._paths_from(step.node, longer, ends)

    def follow(self, parameter: Tensor, path: UsagePath) -> GraphSteps | None:
        """Returns the steps of a path in this graph; None if it is not there, or the parameter has other paths."""
        if not self.uses(parameter):
            return None

        def ends(steps: GraphSteps) -> bool:
            return last_operation(steps) in path.ends if path.length is None else len(steps) == path.length

        paths = list(self.paths(parameter, ends))
        matches = [s for s in paths if last_operation(s) in path.ends and selected_outputs(s) == path.parts]
        return matches[0] if len(matches) == 1 and len(paths) == path.count else None

    def source(self, node: Node, slot: int, through: Collection[str]) -> Node | None:
        """Returns the operation that computed an input, behind operations whose names are in `through`.

        Returns:
            The operation; None if anything else uses its result, or one of the results on the way.
        """
        child = node.next_functions[slot][0]
        while child is not None and len(self._consumers[child]) == 1:
            if operation_name(child) not in through:
                return child
            child = child.next_functions[0][0]
        return None

    def sinks(self, nodes: set[Node]) -> set[Node]:
        """Returns those of `nodes` from which a backward pass reaches no other of them: it can stop there."""
        reaches: dict[Node, bool] = {}
        for node in self._inputs_first():
            children = [child for child, _ in node.next_functions if child is not None]
            reaches[node] = any(child in nodes or reaches[child] for child in children)
        return {node for node in nodes if not reaches[node]}

    def _inputs_first(self) -> Iterator[Node]:
        """Yields every node after all nodes that its inputs were computed by."""
        waiting = {node: _input_count(node) for node in self._nodes}
        ready = [node for node, count in waiting.items() if count == 0]
        while ready:
            node = ready.pop()
            yield node
            for step in self._consumers[node]:
                waiting[step.node] -= 1
                if waiting[step.node] == 0:
                    ready.append(step.node)


def pass_back(
    f: Tensor, seed: Tensor, nodes: Iterable[Node], sinks: set[Node], visit: VisitFn, *, retain: bool
) -> None:
    """Runs a backward pass from f down to `nodes`, and computes no gradient of a parameter.

    Args:
        f: Output with its graph.
        seed: Gradient at f.
        nodes: Operations to visit.
        sinks: Those of `nodes` from which no other is reached. They are not run; they are visited last, when the
            backward pass is done.
        visit: Called with every operation and the gradient at its output.
        retain: Whether to keep the graph for another pass.

    Raises:
        KfacpackError: If the model uses gradient checkpointing.
    """

    def prehook(node: Node) -> Callable[[tuple[Tensor | None, ...]], None]:
        def call(gradients: tuple[Tensor | None, ...]) -> None:
            if len(gradients) == 1 and gradients[0] is not None:
                visit(node, gradients[0], True)

        return call

    handles = [node.register_prehook(prehook(node)) for node in nodes if node not in sinks]
    edges = [GradientEdge(node, 0) for node in sinks]
    try:
        gradients = torch.autograd.grad(f, edges, seed, retain_graph=retain, allow_unused=True)
    except CheckpointError as error:
        raise KfacpackError("the model uses gradient checkpointing; disable it") from error
    finally:
        for handle in handles:
            handle.remove()
    with torch.no_grad():
        for node, gradient in zip(sinks, gradients, strict=True):
            if gradient is not None:
                visit(node, gradient, False)


def last_operation(steps: GraphSteps) -> tuple[str, int]:
    """Returns the name of the last operation of a path, and the slot that the path enters it by."""
    return operation_name(steps[-1].node), steps[-1].slot


def selected_outputs(steps: GraphSteps) -> tuple[int, ...]:
    """Returns which part was taken, for every operation on a path that splits a tensor."""
    parts: list[int] = []
    for before, after in pairwise(steps):
        if output_count(before.node) > 1:
            parts.append(after.output)
        elif (start := slice_start(before.node)) is not None:
            parts.append(start)
    return tuple(parts)


def _input_count(node: Node) -> int:
    """Number of differentiable inputs."""
    return sum(child is not None for child, _ in node.next_functions)


def _has_one_input(node: Node) -> bool:
    return _input_count(node) == 1


def backward_to_operand(step: GraphStep, gradient: Tensor) -> Tensor:
    """Returns the gradient at the input that `step` names, from the gradient at the first output of its operation."""
    return call_backward(step.node, 0, step.slot, gradient)


def backward_to_parameter(steps: GraphSteps, gradient: Tensor) -> Tensor:
    """Returns the gradient at a parameter, from the gradient at the operand of the last of `steps`."""
    for before, after in reversed(list(pairwise(steps))):
        gradient = call_backward(before.node, after.output, before.slot, gradient)
    return gradient
