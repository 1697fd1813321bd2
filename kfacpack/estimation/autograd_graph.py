"""Finds the operations in autograd's graph that use parameters.

In autograd's graph, an edge leads from the operation that used a tensor to the operation that computed it. Parameters
are leaves. The paths in this module have the opposite direction. A path from a parameter begins with operations on the
parameter alone (a transpose, a cast, a slice of a fused projection) and ends at the operation that combines the
parameter with the examples. The curvature is computed from the inputs of this last operation and the gradient with
respect to its output. Modules are neither inspected nor changed.
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


WITHOUT_CHECKPOINTS = "disable checkpointing for the estimate, and use smaller batches to save memory"
"""Remedy for a model with activation checkpointing."""


class GraphStep(NamedTuple):
    """One operation on the path from a parameter to f."""

    node: Node
    slot: int
    """Index of the input at which the path enters the operation."""
    output: int
    """Index of the output at which the path leaves the previous operation."""

    @property
    def operand_shape(self) -> tuple[int, ...]:
        """Shape of the input at which the path enters the operation."""
        return input_shape(self.node, self.slot)


@dataclass(frozen=True)
class UsagePath:
    """Description of the path from a parameter to an operation. It identifies the path in the graph of any batch."""

    ends: frozenset[tuple[str, int]]
    """Pairs of a name and a slot (index of an input) that identify the operation. A matrix product has several pairs,
    because torch chooses the operation according to the memory layout of the inputs."""
    length: int | None
    """Number of steps; None if the number depends on the memory layout."""
    parts: tuple[int, ...]
    """For each operation that splits or slices a tensor, the index of the part or the start of the slice."""
    count: int
    """Number of paths from the parameter to operations that use it."""


GraphSteps = tuple[GraphStep, ...]
VisitFn = Callable[["Node", Tensor, bool], None]
"""Function that is called with an operation, the gradient with respect to its output, and a flag that is True if the
backward pass is still running."""


class AutogradGraph:
    """The graph of the operations that computed f from the parameters.

    Args:
        f: Output of a model, with its autograd graph.
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
        """Returns whether f was computed from the given parameter."""
        return id(parameter) in self._leaves

    def leaf(self, tensor: Tensor) -> Node | None:
        """Returns the node that receives the gradient of a leaf tensor; None if f was not computed from this leaf."""
        return self._leaves.get(id(tensor))

    def first_operations(self, parameters: Iterable[Tensor]) -> set[Node]:
        """Returns all operations that may be the first to combine a parameter with the examples.

        Operations whose only differentiable input is computed from a parameter are included, because inputs without
        gradients, such as the examples, are missing from the graph. Operations that only reshape or cast a parameter
        are excluded, because a backward pass that reaches them would also have to compute the parameter's gradient.
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
        """Yields all paths from a parameter towards f.

        Args:
            parameter: A parameter that f was computed from.
            ends: Function that receives a path and returns whether the path is complete. Regardless of this function,
                a path ends at an operation that has another differentiable input.
        """
        return self._paths_from(self._leaves[id(parameter)], (), ends)

    def _paths_from(self, node: Node, steps: GraphSteps, ends: Callable[[GraphSteps], bool]) -> Iterator[GraphSteps]:
        for step in self._consumers[node]:
            longer = (*steps, step)
            if ends(longer) or not _has_one_input(step.node):
                yield longer
            else:
                yield from self._paths_from(step.node, longer, ends)

    def find_path(self, parameter: Tensor, path: UsagePath) -> GraphSteps | None:
        """Finds the path in this graph that a `UsagePath` describes.

        Returns:
            The steps from the parameter to the operation; None if there is not exactly one such path, or if
            the number of paths from the parameter is not `path.count`.
        """
        if not self.uses(parameter):
            return None

        def ends(steps: GraphSteps) -> bool:
            return last_operation(steps) in path.ends if path.length is None else len(steps) == path.length

        paths = list(self.paths(parameter, ends))
        matches = [
            steps for steps in paths if last_operation(steps) in path.ends and selected_outputs(steps) == path.parts
        ]
        return matches[0] if len(matches) == 1 and len(paths) == path.count else None

    def source(self, node: Node, slot: int, through: Collection[str]) -> Node | None:
        """Returns the operation that computed input `slot` of `node`, skipping operations whose names are in `through`.

        Returns:
            The operation; None if no operation computed the input, or if the result of this operation or of a skipped
            operation is used more than once.
        """
        child = node.next_functions[slot][0]
        while child is not None and len(self._consumers[child]) == 1:
            if operation_name(child) not in through:
                return child
            child = child.next_functions[0][0]
        return None

    def sinks(self, nodes: set[Node]) -> set[Node]:
        """Returns the nodes from which a backward pass reaches no other node in `nodes`. The pass can stop there."""
        reaches: dict[Node, bool] = {}
        for node in self._inputs_first():
            children = [child for child, _ in node.next_functions if child is not None]
            reaches[node] = any(child in nodes or reaches[child] for child in children)
        return {node for node in nodes if not reaches[node]}

    def _inputs_first(self) -> Iterator[Node]:
        """Yields the nodes in topological order: every node after the nodes that computed its inputs."""
        waiting = {node: _input_count(node) for node in self._nodes}
        ready = [node for node, count in waiting.items() if count == 0]
        while ready:
            node = ready.pop()
            yield node
            for step in self._consumers[node]:
                waiting[step.node] -= 1
                if waiting[step.node] == 0:
                    ready.append(step.node)


def backward_to_nodes(
    f: Tensor, seed: Tensor, nodes: Iterable[Node], sinks: set[Node], visit: VisitFn, *, retain: bool
) -> None:
    """Runs a backward pass from f to `nodes`, without computing gradients of parameters.

    Args:
        f: Output of a model, with its autograd graph.
        seed: Gradient with respect to f, with which the backward pass starts.
        nodes: Operations to visit.
        sinks: Result of `AutogradGraph.sinks` for `nodes`. The backward pass ends at these operations without executing
            them. They are visited after the backward pass.
        visit: Function that is called with each operation, the gradient with respect to its output, and a flag that is
            True if the backward pass is still running.
        retain: Whether to keep the graph for another backward pass.

    Raises:
        KfacpackError: If the model uses activation checkpointing.
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
        problem = "the model calls torch.utils.checkpoint, which discards the inputs from which factors are computed"
        raise KfacpackError(f"{problem}; {WITHOUT_CHECKPOINTS}") from error
    finally:
        for handle in handles:
            handle.remove()
    with torch.no_grad():
        for node, gradient in zip(sinks, gradients, strict=True):
            if gradient is not None:
                visit(node, gradient, False)


def last_operation(steps: GraphSteps) -> tuple[str, int]:
    """Returns the name of the last operation of a path, and the index of the input at which the path enters it."""
    return operation_name(steps[-1].node), steps[-1].slot


def selected_outputs(steps: GraphSteps) -> tuple[int, ...]:
    """Returns which parts of tensors a path uses.

    Returns:
        For each operation that splits or slices a tensor, the index of the part, or the start of the slice.
    """
    parts: list[int] = []
    for before, after in pairwise(steps):
        if output_count(before.node) > 1:
            parts.append(after.output)
        elif (start := slice_start(before.node)) is not None:
            parts.append(start)
    return tuple(parts)


def _input_count(node: Node) -> int:
    """Returns the number of differentiable inputs of an operation."""
    return sum(child is not None for child, _ in node.next_functions)


def _has_one_input(node: Node) -> bool:
    return _input_count(node) == 1


def backward_to_operand(step: GraphStep, gradient: Tensor) -> Tensor:
    """Returns the gradient with respect to the operand of an operation.

    Args:
        step: The operation, and the index of the input that is the operand.
        gradient: Gradient with respect to the first output of the operation.
    """
    return call_backward(step.node, 0, step.slot, gradient)


def backward_to_parameter(steps: GraphSteps, gradient: Tensor) -> Tensor:
    """Returns the gradient with respect to a parameter.

    Args:
        steps: Path from the parameter to an operation.
        gradient: Gradient with respect to the operand of this operation.
    """
    for before, after in reversed(list(pairwise(steps))):
        gradient = call_backward(before.node, after.output, before.slot, gradient)
    return gradient
