"""The main list of layers of a model, and ways to run a model without some of its layers.

A model is divided into its stem (everything before the first layer), its layers, and its head (everything after the
last layer). Modules are not changed permanently: a layer is skipped by replacing its `forward` for the duration of a
call. Weights outside the layers stay in memory. The weights of the layers either stay in memory as well, or are loaded
one layer at a time (see `LayerWeights`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kfacpack.errors import KfacpackError
from kfacpack.models.functional import Forward, ModelInput, call_model, tensors_of

ORDINARY = "Estimate the curvature without --stream (stream=False)"
"""Remedy for a model whose curvature cannot be estimated layer by layer."""

HIDDEN = "hidden_states"
"""Keyword argument with which some models in transformers pass the hidden states to a layer."""


class LayerWeights(Protocol):
    """Loads the weights of a module into memory, one layer at a time."""

    layers: str
    """Name of the main list of layers. Weights outside this list are in memory."""

    def load(self, prefix: str) -> None:
        """Loads the parameters of a layer.

        Args:
            prefix: Prefix of the layer's parameter names.

        Raises:
            KfacpackError: If the weights cannot be read.
        """
        ...


@dataclass(frozen=True)
class LayerCall:
    """The arguments of a call to a layer, except the hidden states."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def output(self, layer: nn.Module, hidden: Tensor) -> Any:
        """Runs a layer and returns its complete output, which may be a tuple."""
        if HIDDEN in self.kwargs:
            return layer(*self.args, **{**self.kwargs, HIDDEN: hidden})
        return layer(hidden, *self.args, **self.kwargs)

    def run(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """Runs a layer and returns the hidden states in its output."""
        output = self.output(layer, hidden)
        result: Tensor = output if isinstance(output, Tensor) else output[0]
        return result

    def tensors(self) -> list[Tensor]:
        """Returns all tensors in the arguments, including nested ones."""
        return tensors_of((self.args, dict(self.kwargs)))


def _hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the hidden states from the arguments of a layer, or None if the layer receives no hidden states."""
    return kwargs.get(HIDDEN, args[0] if args else None)


class _FirstLayerReached(Exception):  # noqa: N818 - not an error: ends a forward pass early
    """Raised when a forward pass reaches the first layer, to end the pass there."""


class LayerList:
    """The main list of layers of a model.

    Args:
        module: Module that contains the list.
        forward: Function that computes f from a batch.
        parameters: The parameters whose curvature is estimated, by name. The main list is the list of layers that
            contains the most elements of these parameters.
        weights: Object that loads the weights of a layer when the layer is used; None if all weights are in memory.

    Raises:
        KfacpackError: If the model has no list of layers, or a layer shares a parameter with another part of the model.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Forward,
        parameters: Mapping[str, Tensor],
        weights: LayerWeights | None = None,
    ):
        self._module, self._forward, self._weights = module, forward, weights
        self.name = weights.layers if weights else main_list(module, parameters)
        """Name of the list in the module."""
        self.layers: list[nn.Module] = list(module.get_submodule(self.name).children())
        self._require_own_parameters()
        self._wrap: Callable[[Tensor], Any] = lambda hidden: hidden

    def __len__(self) -> int:
        return len(self.layers)

    def prefix(self, index: int) -> str:
        """Returns the prefix of a layer's parameter names."""
        child = list(dict(self._module.get_submodule(self.name).named_children()))[index]
        return f"{self.name}.{child}."

    def is_outside(self, name: str) -> bool:
        """Returns whether a parameter is outside all layers."""
        return not name.startswith(f"{self.name}.")

    @contextmanager
    def loaded(self, index: int) -> Iterator[nn.Module]:
        """Context manager that loads the weights of a layer, and frees them on exit if they were not in memory before.

        Args:
            index: Index of the layer.

        Yields:
            The layer.
        """
        layer = self.layers[index]
        if self._weights is None:
            yield layer
            return
        self._weights.load(self.prefix(index))
        try:
            yield layer
        finally:
            to_meta(layer)

    def check(self, batch: ModelInput) -> None:
        """Checks on one batch that the layers are called one after another, each with the output of the previous layer.

        Args:
            batch: A small batch on the device of the model.

        Raises:
            KfacpackError: If the layers are not called one after another, return tensors other than the hidden states,
                or receive further tensors that depend on parameters, or if f depends directly on the output of a layer
                other than the last layer.
        """
        self.find_output_form(batch)
        hidden, calls = self.stem(batch)
        if any(tensor.requires_grad for call in calls for tensor in call.tensors()):
            self._refuse(
                "the layers receive further tensors that depend on parameters, such as a learned position bias"
            )
        marks: list[Tensor] = [torch.empty_like(hidden).copy_(hidden.detach()).requires_grad_() for _ in self.layers]
        f = self._call_with(lambda index, _: self._wrap(marks[index]), batch)
        gradients = torch.autograd.grad(f.sum(), marks, allow_unused=True)
        if any(gradient is not None for gradient in gradients[:-1]):
            self._refuse("f depends directly on the output of a layer other than the last layer")

    def find_output_form(self, batch: ModelInput) -> None:
        """Determines whether the layers return a tensor or a tuple, by running the first layer on a small batch.

        Raises:
            KfacpackError: If the first layer returns tensors other than the hidden states.
        """
        hidden, calls = self._record(batch, first_only=True)
        with self.loaded(0) as layer, torch.no_grad():
            self._wrap = self._wrapper(calls[0].output(layer, hidden), hidden)

    @contextmanager
    def skipped(self) -> Iterator[None]:
        """Context manager that makes every layer return the hidden states that it receives."""
        with self._replaced(lambda index, args, kwargs: self._wrap(_hidden(args, kwargs))):
            yield

    def stem(self, batch: ModelInput) -> tuple[Tensor, list[LayerCall]]:
        """Runs the part of the model before the first layer.

        Args:
            batch: The batch, on the device of the model.

        Returns:
            The hidden states that enter the first layer, with their autograd graph, and the remaining arguments of the
            call to each layer.

        Raises:
            KfacpackError: If the layers are not called one after another.
        """
        hidden, calls = self._record(batch)
        if len(calls) != len(self.layers):
            self._refuse(f"f uses only {len(calls)} of the {len(self.layers)} layers")
        return hidden, calls

    def _record(self, batch: ModelInput, *, first_only: bool = False) -> tuple[Tensor, list[LayerCall]]:
        """Returns the hidden states that enter the first layer, and the remaining arguments of each recorded call.

        Args:
            batch: The batch.
            first_only: Whether to record only the first layer.
        """
        received: list[Tensor] = []
        calls: list[LayerCall] = []
        passed: list[Tensor] = []

        def record(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden = _hidden(args, kwargs)
            if not isinstance(hidden, Tensor) or index != len(calls) or (passed and hidden is not passed[-1]):
                self._refuse(
                    "each layer must be called once, in order, with the output of the previous layer as its input"
                )
            assert isinstance(hidden, Tensor)
            received.append(hidden)
            calls.append(LayerCall(args if HIDDEN in kwargs else args[1:], kwargs))
            if first_only:
                raise _FirstLayerReached
            # Pass a new tensor without a graph to each layer, so that other uses of hidden states are detected.
            passed.append(hidden.detach().view_as(hidden))
            return self._wrap(passed[-1])

        with self._replaced(record), suppress(_FirstLayerReached):
            call_model(self._forward, batch, finite=False)
        if not calls:
            self._refuse("f does not use any of the layers")
        return received[0], calls

    def head(self, batch: ModelInput, hidden: Tensor) -> Tensor:
        """Returns f, given the output of the last layer.

        Args:
            batch: The batch, on the device of the model.
            hidden: Output of the last layer.
        """
        last = len(self.layers) - 1
        return self._call_with(
            lambda index, received: self._wrap(hidden if index == last else received.detach()), batch
        )

    def _call_with(self, output: Callable[[int, Tensor], Any], batch: ModelInput) -> Tensor:
        """Returns f with every layer replaced by `output`, a function of the layer's index and input."""

        def replace(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return output(index, _hidden(args, kwargs))

        with self._replaced(replace):
            return call_model(self._forward, batch, finite=False)

    @contextmanager
    def _replaced(self, function: Callable[[int, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
        """Temporarily replaces every layer's `forward` by `function`, whose first argument is the layer's index."""

        def stub(index: int) -> Callable[..., Any]:
            return lambda *args, **kwargs: function(index, args, kwargs)

        try:
            for index, layer in enumerate(self.layers):
                layer.__dict__["forward"] = stub(index)
            yield
        finally:
            for layer in self.layers:
                layer.__dict__.pop("forward", None)

    def _wrapper(self, output: Any, hidden: Tensor) -> Callable[[Tensor], Any]:
        """Returns a function that converts hidden states to the form in which a layer returns its output.

        Args:
            output: Output of a layer: a tensor, or a tuple that begins with a tensor.
            hidden: Hidden states that the layer received.
        """
        if isinstance(output, Tensor) and output.shape == hidden.shape:
            return lambda hidden: hidden
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor) and not tensors_of(output[1:]):
            rest = output[1:]
            return lambda hidden: (hidden, *rest)
        self._refuse("the layers return something other than a single tensor of hidden states")
        raise AssertionError

    def _require_own_parameters(self) -> None:
        """Checks that no layer shares a parameter with another part of the model."""
        owners: dict[int, tuple[str, str]] = {}
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            own = next((p for p in map(self.prefix, range(len(self))) if name.startswith(p)), "")
            first, owner = owners.setdefault(id(parameter), (name, own))
            if owner != own:
                self._refuse(f"{first!r} and {name!r} are the same parameter, which a layer shares with other modules")

    def _refuse(self, reason: str) -> None:
        name = type(self._module).__name__
        raise KfacpackError(f"the curvature of {name} cannot be estimated layer by layer: {reason}. {ORDINARY}")


def main_list(module: nn.Module, parameters: Mapping[str, Tensor]) -> str:
    """Returns the name of the list of layers that contains the largest part of the given parameters.

    Only lists whose layers all have the same type are considered.

    Args:
        module: Module to search.
        parameters: Parameters by name. Lists are compared by the number of elements of these parameters in them.

    Raises:
        KfacpackError: If no such list contains any of the parameters.
    """
    best, most = "", 0
    for name, child in module.named_modules():
        layers = list(child.children())
        if not isinstance(child, nn.ModuleList | nn.Sequential) or len(layers) < 2 or not name:
            continue
        if len({type(layer) for layer in layers}) > 1:
            continue
        size = sum(parameter.numel() for key, parameter in parameters.items() if key.startswith(f"{name}."))
        if size > most:
            best, most = name, size
    if not best:
        problem = f"the curvature of {type(module).__name__} cannot be estimated layer by layer"
        reason = "no ModuleList or Sequential of layers of the same type contains any of the selected parameters"
        raise KfacpackError(f"{problem}: {reason}. {ORDINARY}")
    return best


def to_meta(module: nn.Module) -> None:
    """Frees the memory of a module's parameters by replacing them with parameters on the meta device."""
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            child._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Context manager that puts the parameters of new modules on the meta device. Buffers are not affected."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
