"""Where parameters enter a computation, read off the graph that autograd keeps of it.

An edge leads from the operation that used a tensor to the one that made it; a parameter is a leaf. Followed the other
way, from a parameter outwards, there are first operations on the parameter alone (a transpose, a cast, one part of a
fused projection) and then the one where it meets the examples. That one is what an estimate is made of. No module is
asked what it is, and none is changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import CheckpointError

from kfacpack.errors import KfacpackError

if TYPE_CHECKING:
    from torch.autograd.graph import Node


class GraphStep(NamedTuple):
    """One operation on the way outwards: it takes what came before as its input number `slot`."""

    node: Node
    slot: int
    output: int
    """Which of the outputs of the operation before it takes."""

    @property
    def operand_shape(self) -> tuple[int, ...]:
        """The shape of what it takes."""
        return input_shape(self.node, self.slot)


@dataclass(frozen=True)
class UsagePath:
    """What the way from a parameter to its operation looks like, to find it again in the next batch's graph."""

    ends: frozenset[tuple[str, int]]
    """The operation, and the slot it takes. A product may be any of several, by how its rows lie in memory."""
    length: int | None
    """How many steps it has; None where they depend on how the rows lie."""
    parts: tuple[int, ...]
    """Which part was taken, wherever something on the way has several."""
    ways: int
    """How many there are from this parameter."""


GraphSteps = tuple[GraphStep, ...]
VisitFn = Callable[["Node", Tensor, bool], None]
"""Called with an operation, the gradient at its output, and whether autograd is still at work."""


_RESHAPING_NODES = {
    f"{name}Backward0"
    for name in ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "ToCopy", "Alias")
}


class AutogradGraph:
    """The operations between f and the parameters it was computed from."""

    def __init__(self, f: Tensor):
        self._consumers: dict[Node, list[GraphStep]] = defaultdict(list)
        self._leaves: dict[int, Node] = {}
        self._order: list[Node] = []
        stack = [f.grad_fn] if f.grad_fn is not None else []
        seen = set(stack)
        while stack:
            node = stack.pop()
            self._order.append(node)
            variable = getattr(node, "variable", None)
            if variable is not None:
                self._leaves[id(variable)] = node
            for slot, (child, output) in enumerate(node.next_functions):
                if child is None:
                    continue
                self._consumers[child].append(GraphStep(node, slot, output))
                if child not in seen:
                    seen.add(child)
                    stack.append(child)

    def uses(self, parameter: Tensor) -> bool:
        return id(parameter) in self._leaves

    def reach(self, parameters: Iterable[Tensor]) -> set[Node]:
        """Everything computed from one of the parameters and nothing else that has a gradient, and what uses that.

        Without what only turns a parameter about, or casts it: that meets nobody, and to see its gradient would take
        computing the parameter's.
        """
        found: set[Node] = set()
        stack = [self._leaves[id(parameter)] for parameter in parameters]
        for node in stack:
            stack.extend(step.node for step in self._consumers[node] if step.node.name() in _RESHAPING_NODES)
        turned = set(stack)
        while stack:
            for step in self._consumers[stack.pop()]:
                if step.node not in found and step.node not in turned:
                    found.add(step.node)
                    if _takes_one(step.node):
                        stack.append(step.node)
        return found

    def paths(self, parameter: Tensor, meets: Callable[[GraphSteps], bool]) -> Iterator[GraphSteps]:
        """Every way outwards from a parameter, up to where it `meets` the examples or anything else."""
        return self._outwards(self._leaves[id(parameter)], (), meets)

    def _outwards(self, node: Node, steps: GraphSteps, meets: Callable[[GraphSteps], bool]) -> Iterator[GraphSteps]:
        for step in self._consumers[node]:
            longer = (*steps, step)
            if meets(longer) or not _takes_one(step.node):
                yield longer
            else:
                yield from self._outwards(step.node, longer, meets)

    def follow(self, parameter: Tensor, way: UsagePath) -> GraphSteps | None:
        """The same way in this graph, if it is there, and no other than the planned ones."""
        if not self.uses(parameter):
            return None

        def there(steps: GraphSteps) -> bool:
            return last_operation(steps) in way.ends if way.length is None else len(steps) == way.length

        found = list(self.paths(parameter, there))
        alike = [steps for steps in found if last_operation(steps) in way.ends and selected_outputs(steps) == way.parts]
        return alike[0] if len(alike) == 1 and len(found) == way.ways else None

    def source(self, node: Node, slot: int, through: Iterable[str]) -> Node | None:
        """What made an input, behind operations named in `through`; None if anything else used that on the way."""
        through = set(through)
        child = node.next_functions[slot][0]
        while child is not None and len(self._consumers[child]) == 1:
            if child.name() not in through:
                return child
            child = child.next_functions[0][0]
        return None

    def sinks(self, nodes: set[Node]) -> set[Node]:
        """Those of `nodes` from which no other of them can be reached: gradients must flow as far as these."""
        reaches: dict[Node, bool] = {}
        for node in self._inputs_first():
            children = [child for child, _ in node.next_functions if child is not None]
            reaches[node] = any(child in nodes or reaches[child] for child in children)
        return {node for node in nodes if not reaches[node]}

    def _inputs_first(self) -> Iterator[Node]:
        """Every node after all that it was computed from."""
        waiting = {node: sum(child is not None for child, _ in node.next_functions) for node in self._order}
        ready = [node for node, count in waiting.items() if count == 0]
        while ready:
            node = ready.pop()
            yield node
            for step in self._consumers[node]:
                waiting[step.node] -= 1
                if waiting[step.node] == 0:
                    ready.append(step.node)


def pass_back(f: Tensor, seed: Tensor, nodes: Iterable[Node], sinks: set[Node], at: VisitFn, *, retain: bool) -> None:
    """Let gradients flow from f down to `nodes`, and into no parameter, and call `at` with the one at each output.

    `sinks`, from which no other of them is reached, are not run themselves: theirs come last, when autograd is done.
    """

    def hook(node: Node) -> Callable[[tuple[Tensor | None, ...]], None]:
        def visit(gradients: tuple[Tensor | None, ...]) -> None:
            if len(gradients) == 1 and gradients[0] is not None:
                at(node, gradients[0], True)

        return visit

    handles = [node.register_prehook(hook(node)) for node in nodes if node not in sinks]
    edges = [GradientEdge(node, 0) for node in sinks]
    try:
        gradients = torch.autograd.grad(f, edges, seed, retain_graph=retain, allow_unused=True)
    except CheckpointError as error:
        raise KfacpackError("activations are checkpointed; switch gradient checkpointing off") from error
    finally:
        for handle in handles:
            handle.remove()
    with torch.no_grad():
        for node, gradient in zip(sinks, gradients, strict=True):
            if gradient is not None:
                at(node, gradient, False)


def last_operation(steps: GraphSteps) -> tuple[str, int]:
    return steps[-1].node.name(), steps[-1].slot


def selected_outputs(steps: GraphSteps) -> tuple[int, ...]:
    """Which part was taken, wherever an operation on the way makes several."""
    found: list[int] = []
    for before, after in pairwise(steps):
        if len(before.node._input_metadata) > 1:
            found.append(after.output)
        elif (start := getattr(before.node, "_saved_start", None)) is not None:
            found.append(start)
    return tuple(found)


def _takes_one(node: Node) -> bool:
    return sum(child is not None for child, _ in node.next_functions) == 1


def backward_to_operand(step: GraphStep, gradients: Tensor) -> Tensor:
    """What an operation passes back to the input that `step` names, given the gradient at its (only used) output."""
    return _backward(step.node, 0, step.slot, gradients)


def backward_to_parameter(steps: GraphSteps, gradient: Tensor) -> Tensor:
    """The gradient at a parameter, from the gradient at the operand that the last of `steps` takes."""
    for before, after in reversed(list(pairwise(steps))):
        gradient = _backward(before.node, after.output, before.slot, gradient)
    return gradient


def _backward(node: Node, output: int, slot: int, gradient: Tensor) -> Tensor:
    gradients: list[Tensor | None] = [None] * len(node._input_metadata)
    gradients[output] = gradient
    call: Any = node
    if not callable(call):
        problem = f"{node.name()!r} is no operation of torch's own, and cannot be looked through"
        raise KfacpackError(f"{problem}; estimate the model without torch.compile and custom autograd functions")
    with torch.no_grad():
        found = call(*gradients)
    passed: Tensor = found[slot] if isinstance(found, tuple) else found
    # Broadcasting is undone by autograd's engine, not by the operation itself.
    return passed.sum_to_size(input_shape(node, slot))


def input_shape(node: Node, slot: int) -> tuple[int, ...]:
    """The shape of what an operation takes as its input number `slot`."""
    made_by, output = node.next_functions[slot]
    assert made_by is not None
    return tuple(made_by._input_metadata[output].shape)
