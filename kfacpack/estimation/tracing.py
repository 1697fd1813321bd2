"""Determines from gradients, not from shapes, which elements of a tensor belong to which example.

A backward pass starts with a seed, the gradient with respect to f, and all gradients are linear in the seed. The model
is run on one example that is passed twice, and the seed of the second copy is twice the seed of the first copy.
Then every element of the second copy's gradient is twice the corresponding element of the first copy's gradient. This
shows where the two copies are. They may be along a dimension of their own ("whole"), or merged with the positions into
one dimension, either example by example ("outer": the indices of the examples are 0 0 0 1 1 1) or position by position
("inner": 0 1 0 1 0 1).

If inputs cannot be split into examples, there are two backward passes for a whole batch, one with a seed at its first
example and one with a seed at its last example. The gradient for one example is zero at the elements of all other
examples.

Functions on rows, (P, features), group the P positions by example. `kept` is a mask, (P,), that is False at padded
positions; None keeps all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kfacpack.errors import KfacpackError
from kfacpack.estimation.autograd_graph import WITHOUT_CHECKPOINTS, AutogradGraph, backward_to_nodes
from kfacpack.models.functional import (
    Forward,
    ModelInput,
    batch_size_of,
    call_model,
    map_tensors,
    reentrant_checkpoints_refused,
    rows_per_example,
)

if TYPE_CHECKING:
    from torch.autograd.graph import Node

SYNCHRONOUS_DEVICES = ("cpu",)
"""Device types on which the values of a tensor can be read without waiting for the device."""


@dataclass(frozen=True)
class ExampleLayout:
    """Describes which elements of a tensor belong to which example."""

    dim: int
    """The dimension that contains the examples."""
    order: Literal["whole", "outer", "inner"]
    """Whether the dimension contains only the examples ("whole"), or also the positions. In the latter case, the index
    of the example is the outer index ("outer") or the inner index ("inner")."""

    def by_example(self, tensor: Tensor, examples: int) -> Tensor:
        """Returns a view of a tensor with the examples along the first dimension: (...) -> (N, ...).

        If the examples are merged with positions, the positions remain in their dimension.
        """
        if self.order == "whole":
            return tensor.movedim(self.dim, 0)
        outer = self.order == "outer"
        split: Tensor = tensor.unflatten(self.dim, (examples, -1) if outer else (-1, examples))
        return split.movedim(self.dim if outer else self.dim + 1, 0)

    def per_example(self, tensor: Tensor, shape: tuple[int, ...], examples: int) -> Tensor:
        """Sums a gradient to the shape of an operand that was broadcast, separately for every example.

        Args:
            tensor: Gradient with respect to the operand after broadcasting.
            shape: Shape of the operand.
            examples: Number of examples, N.

        Returns:
            The sums, (N, size of the operand).
        """
        padded = [1] * (tensor.dim() - len(shape)) + list(shape)
        target = padded[: self.dim] + padded[self.dim + 1 :] if self.order == "whole" else padded
        split = self.by_example(tensor, examples)
        summed = [dim for dim, size in enumerate(target, start=1) if size == 1 and split.shape[dim] > 1]
        return (split.sum(summed) if summed else split).reshape(examples, -1)

    def fits(self, tensor: Tensor, shape: tuple[int, ...]) -> bool:
        """Returns whether an operand of `shape`, broadcast to the shape of `tensor`, is shared by all examples."""
        dim = self.dim - (tensor.dim() - len(shape))
        return dim < 0 or shape[dim] == 1


def layout_of_doubled(g: Tensor) -> ExampleLayout | None:
    """Returns the layout of a gradient for one example passed twice, with a doubled seed for the second copy.

    Args:
        g: Gradient with respect to the output of an operation.

    Returns:
        The layout; None if the two copies share elements, or the gradient is zero.
    """
    tolerance = torch.finfo(g.dtype).eps ** 0.5 * g.abs().amax()
    if tolerance == 0:
        return None
    for layout in _candidates(tuple(g.shape), 2):
        first, second = layout.by_example(g, 2)
        if bool((second - 2 * first).abs().amax() <= tolerance):
            return layout
    return None


def layout_of_two(first: Tensor, last: Tensor, examples: int) -> ExampleLayout | None:
    """Returns the layout of the gradients for the first and the last example in a batch.

    If f depends on only a few positions, several layouts may be possible. In this case, the first of them is returned.

    Args:
        first: Gradient for a seed at the first example.
        last: Gradient for a seed at the last example.
        examples: Number of examples in the batch.

    Returns:
        The layout; None if examples share elements, or a gradient is zero.
    """
    if not (first.any() and last.any()):
        return None
    for layout in _candidates(tuple(first.shape), examples):
        of_first, of_last = layout.by_example(first, examples), layout.by_example(last, examples)
        if not (of_first[1:].any() or of_last[:-1].any()):
            return layout
    return None


def any_layout(shape: tuple[int, ...], examples: int) -> ExampleLayout | None:
    """Returns the first layout with which a tensor of `shape` can contain the examples; None if this is impossible."""
    return next(_candidates(shape, examples), None)


def _candidates(shape: tuple[int, ...], examples: int) -> Iterator[ExampleLayout]:
    for dim, size in enumerate(shape):
        if size == examples:
            yield ExampleLayout(dim, "whole")
    for dim, size in enumerate(shape):
        if size > examples and size % examples == 0:
            yield ExampleLayout(dim, "outer")
            yield ExampleLayout(dim, "inner")


def drops_rows(device: torch.device) -> bool:
    """Returns whether padded and zero rows are dropped on a device.

    The number of rows that remain depends on values on the device. On a GPU, the CPU would have to wait for these
    values in every block, so padded rows are set to zero instead, and products include all rows.
    """
    return device.type in SYNCHRONOUS_DEVICES


def kept_rows(mask: Tensor | None, layout: ExampleLayout, gradients: Tensor, examples: int) -> Tensor | None:
    """Returns a mask of the rows of an operation that are not padding.

    The mask of the batch applies to an operation only if both have the same number of positions and f does not depend
    on the padded positions. The second condition is needed because the operation may use different positions, such as
    those of a decoder, whose number is the same by coincidence.

    Args:
        mask: Mask of the batch, (N, R), which is False at padded positions; None if there is no mask.
        layout: Layout of the examples in the rows.
        gradients: Gradient of f with respect to the operation's output rows, (P, out).
        examples: Number of examples.

    Returns:
        A mask of the rows, (P,), or None if all rows are kept. On a GPU, a mask that is True everywhere is returned if
        f depends on padded positions, because a decision to return None would have to wait for the GPU.
    """
    if mask is None or layout.order == "whole" or len(gradients) != mask.numel() or len(mask) != examples:
        return None
    kept = (mask if layout.order == "outer" else mask.T).reshape(-1)
    if drops_rows(gradients.device):
        return None if bool(gradients[~kept].any()) else kept
    return kept | (gradients.ne(0).any(1) & ~kept).any()


def by_example(rows: Tensor, layout: ExampleLayout, examples: int) -> Tensor:
    """Groups rows by example: (P, ...) -> (N, R, ...).

    Raises:
        KfacpackError: If the layout has one position per example, but there are more rows than examples.
    """
    if layout.order == "whole" and len(rows) != examples:
        problem = f"an operation had one position per example in the first batch, but now has {len(rows) // examples}"
        raise KfacpackError(f"{problem}; start with a batch whose examples have more than one position")
    split = layout.by_example(rows, examples)
    return split[:, None] if layout.order == "whole" else split


def sums(rows: Tensor, layout: ExampleLayout, examples: int, kept: Tensor | None) -> Tensor:
    """Returns the sum of the rows over the positions of each example, (N, features)."""
    if kept is not None:
        rows = rows * kept[:, None]
    return by_example(rows, layout, examples).sum(1)


def means(rows: Tensor, layout: ExampleLayout, examples: int, kept: Tensor | None) -> Tensor:
    """Returns the mean of the rows over the positions of each example, (N, features)."""
    if kept is None:
        return by_example(rows, layout, examples).mean(1)
    counts = by_example(kept, layout, examples).sum(1).clamp(min=1)
    return sums(rows, layout, examples, kept) / counts[:, None]


@dataclass
class ModelTrace:
    """The autograd graph of f, and gradients that show which elements of an operation's output belong to which example.

    There are gradients for all operations that may be the first to combine a parameter with the examples.
    """

    graph: AutogradGraph
    f: Tensor
    examples: int
    """Number of examples for which f was computed."""
    twice: bool
    """Whether f was computed from one example passed twice, rather than from the whole batch."""
    gradients: Mapping[Node, tuple[Tensor, ...]]
    """For each operation, the gradients with respect to its output: one gradient if an example was passed twice,
    otherwise two, for the first and the last example."""
    example: int = 0
    """Index in the batch of the example that was passed twice."""
    precision: float = 0.0
    """Largest machine epsilon of the parameters; see `rounding_unit`."""
    zero_gradients: int = 0
    """Number of operations whose layout is unknown because their gradients are zero for the traced example."""
    input_gradient: Tensor | None = None
    """Gradient with respect to the inputs of a model segment; None if there are no such inputs, or if the output
    does not depend on them."""
    _layouts: dict[Node, ExampleLayout | None] = field(default_factory=dict)

    def layout(self, node: Node) -> ExampleLayout | None:
        """Returns the layout of an operation's output, or None if the examples cannot be told apart."""
        if node not in self._layouts:
            self._layouts[node] = self.layout_of(self.gradients[node]) if node in self.gradients else None
        return self._layouts[node]

    def layout_of(self, gradients: tuple[Tensor, ...]) -> ExampleLayout | None:
        """Returns the layout of the examples, or None if the gradients do not distinguish them.

        Args:
            gradients: One gradient if an example was passed twice; otherwise two, for the first and the last example.
        """
        if len(gradients) == 1:
            return layout_of_doubled(gradients[0])
        return layout_of_two(gradients[0], gradients[1], self.examples)

    def layout_of_zero(self, gradients: tuple[Tensor, ...]) -> ExampleLayout | None:
        """Returns a possible layout if all gradients are zero up to rounding; otherwise, returns None.

        For example, the gradients of queries and keys are zero in attention over a single position. f does not depend
        on elements with zero gradients, so it does not matter to which example these elements are assigned.
        """
        if any(gradient.abs().amax() > self._noise for gradient in gradients):
            return None
        self.zero_gradients += 1
        return any_layout(tuple(gradients[0].shape), self.examples)

    @cached_property
    def _noise(self) -> float:
        tensors = [gradient for gradients in self.gradients.values() for gradient in gradients if gradient.numel()]
        largest = max(float(tensor.abs().amax()) for tensor in tensors)
        return 100 * max(self.precision, torch.finfo(self.f.dtype).eps) * largest


def trace_model(forward: Forward, batch: ModelInput, parameters: Mapping[str, Tensor], example: int = 0) -> ModelTrace:
    """Runs the model on one example of a batch, passed twice, and collects gradients that show the layout of examples.

    Args:
        forward: Function that computes f from a batch.
        batch: The first batch.
        parameters: Parameters to trace, which require gradients.
        example: Index of the example in the batch.

    Returns:
        The trace.

    Raises:
        KfacpackError: If f depends on none of the parameters or is random, if the model uses reentrant checkpoints, or
            if the batch has a single example and cannot be split.
    """
    precision = rounding_unit(parameters)
    with reentrant_checkpoints_refused(f"{WITHOUT_CHECKPOINTS}. use_reentrant=False is supported only by kp.linearize"):
        f, rows = _forward_twice(forward, batch, example, precision)
    twice = rows is not None
    counts = rows or rows_per_example(batch) or [1] * len(f)
    if len(counts) < 2:
        problem = "the first batch has a single example, and cannot be split along the first dimension"
        raise KfacpackError(f"{problem}; pass at least two examples, so that the layout of examples can be determined")
    return trace_output(
        f, trace_seeds(f, counts, twice=twice), parameters, examples=len(counts), twice=twice, example=example
    )


def trace_seeds(f: Tensor, counts: Sequence[int], *, twice: bool) -> list[Tensor]:
    """Returns the seeds of the backward passes that show the layout of examples; see the top of this module.

    Args:
        f: The output, (P, C).
        counts: Number of rows of each example.
        twice: Whether one example was passed twice, rather than a whole batch.

    Returns:
        Gradients with respect to f, each (P, C). There is one if an example was passed twice; otherwise there are two.
    """
    directions = torch.randn(max(counts), f.shape[1], generator=torch.Generator().manual_seed(0)).to(f)
    seeds = [torch.zeros_like(f)] if twice else [torch.zeros_like(f), torch.zeros_like(f)]
    seeds[0][: counts[0]] = directions[: counts[0]]
    seeds[-1][len(f) - counts[-1] :] = 2 * directions[: counts[-1]]
    return seeds


def trace_output(
    output: Tensor,
    seeds: Sequence[Tensor],
    parameters: Mapping[str, Tensor],
    *,
    examples: int,
    twice: bool,
    example: int = 0,
    inputs: Tensor | None = None,
) -> ModelTrace:
    """Runs backward passes from an output, and collects gradients that show the layout of examples.

    Args:
        output: f or the output of a model segment, with its autograd graph.
        seeds: Gradients with respect to the output, one for each backward pass.
        parameters: Parameters to trace, which require gradients.
        examples: Number of examples in the output.
        twice: Whether one example was passed twice, rather than a whole batch.
        example: Index in the batch of the example that was passed twice.
        inputs: Inputs of a segment, as a leaf that requires a gradient. The gradient with respect to them is collected
            as well. None for a whole model or its first segment.

    Returns:
        The trace.

    Raises:
        KfacpackError: If f depends on none of the parameters, and `inputs` is None.
    """
    graph = AutogradGraph(output)
    nodes = graph.first_operations(parameter for parameter in parameters.values() if graph.uses(parameter))
    if not nodes and inputs is None:
        names = ", ".join([*list(parameters)[:3], *(["…"] if len(parameters) > 3 else [])])
        problem = f"f does not depend on any of the selected parameters ({names})"
        remedy = "Select other parameters, or make sure that f is not computed under torch.no_grad"
        raise KfacpackError(f"{problem}. {remedy}")
    leaf = None if inputs is None else graph.leaf(inputs)
    visited = nodes if leaf is None else {*nodes, leaf}
    by_seed = [_gradients_at(output, visited, graph, seed) for seed in seeds]
    gradients = {node: tuple(of_seed[node] for of_seed in by_seed) for node in nodes if node in by_seed[0]}
    trace = ModelTrace(graph, output, examples, twice, gradients, example, rounding_unit(parameters))
    trace.input_gradient = None if leaf is None else by_seed[0].get(leaf)
    return trace


def _forward_twice(
    forward: Forward, batch: ModelInput, example: int, precision: float
) -> tuple[Tensor, list[int] | None]:
    """Computes f for one example of a batch, passed twice, or for the whole batch if it cannot be split.

    Returns:
        f, and a list with the number of rows of each of the two copies. If f was computed for the whole batch, None is
        returned in place of the list.
    """
    if batch_size_of(batch) is not None:
        try:
            f = call_model(forward, map_tensors(batch, lambda tensor: tensor[[example, example]]))
        except (RuntimeError, ValueError, IndexError):
            f = None  # the input was split along a wrong dimension; other errors recur with the whole batch
        rows = (rows_per_example(batch) or [1] * (example + 1))[example]
        if f is not None and len(f) == 2 * rows and same_output(f[:rows], f[rows:], precision):
            return f, [rows, rows]
    f = call_model(forward, batch)
    with torch.no_grad():
        if not all(same_output(*pair, precision) for pair in zip(f, call_model(forward, batch), strict=True)):
            problem = "f differs between two evaluations on the same input, so its curvature is not defined"
            remedy = "make sure that nothing in the model is random in eval mode"
            raise KfacpackError(f"{problem}; {remedy}, and that 'forward' calls no other module in training mode")
    return f, None


def rounding_unit(parameters: Mapping[str, Tensor]) -> float:
    """Returns the largest machine epsilon of the parameters' dtypes, which may exceed that of the dtype of f."""
    return max(
        (torch.finfo(dtype).eps for dtype in {parameter.dtype for parameter in parameters.values()}), default=0.0
    )


def same_output(output: Tensor, expected: Tensor, precision: float) -> bool:
    """Returns whether two outputs are equal up to the rounding errors of the model and of f.

    Args:
        output: An output of the model.
        expected: Another output of the same shape.
        precision: Machine epsilon of the parameters; see `rounding_unit`.
    """
    precision = max(precision, torch.finfo(output.dtype).eps)
    return bool((output - expected).norm() <= precision**0.5 * expected.norm())


def _gradients_at(f: Tensor, nodes: set[Node], graph: AutogradGraph, seed: Tensor) -> dict[Node, Tensor]:
    """Returns the output gradient of each of the nodes that the backward pass reaches."""
    gradients: dict[Node, Tensor] = {}

    def store(node: Node, g: Tensor, running: bool) -> None:
        gradients[node] = g

    backward_to_nodes(f, seed, nodes, graph.sinks(nodes), store, retain=True)
    return gradients
