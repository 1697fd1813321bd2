"""Decides which calls of a linearised model are recorded and replayed, and computes their gradients.

A program is valid for one signature: the shapes and dtypes of the batch, the names in τ, the autocast dtype, and
settings of torch that select kernels. If a program has conditions (see the module `program`), each outcome of the
conditions has a separate program. In addition, a program is valid for only one state of the module: its submodules and
attributes, including tensors, which are compared by identity. The values of these tensors may change.

A signature is used three times before its program replaces the model. The first call is untraced, because many shapes
occur only once. The second call is recorded. The third call runs both the model and the program, and the program is
discarded unless their results agree. If programs are compiled, the first call is recorded and returns the results of
the program, and the second call runs both. Calls that cannot be recorded stay untraced; `Linearized.untraced` lists the
reasons.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from kfacpack._torch import global_module_hooks, tensor_layouts, tensor_versions
from kfacpack.errors import KfacpackError

if TYPE_CHECKING:
    from torch.autograd.graph import GradientEdge

    from kfacpack.linearization.program import Program, Recorder

_MAX_SIGNATURES = 32
"""Maximum number of signatures. If there are more, the least recently used one is dropped."""
_MAX_RECORDINGS = 4
"""Maximum number of recordings of one signature. A new recording is required when the state of the module changes."""
_CHILDREN = ("_parameters", "_buffers", "_modules")
_BASE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every module has. Except for children and hooks, their contents do not affect the output."""


class ModuleState:
    """Everything in a module that may affect its output, except for arguments and the values of tensors.

    Attributes are compared by identity. If an attribute is a container or a plain object (such as a config), its items
    or attributes are also compared by identity.

    Args:
        module: Module whose state is stored.
        forward: The function that calls the module. The state includes the variables that this function captures and,
            for a bound method, the attributes of its object.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._modules = list(module.modules())
        self.problem: str | None = None
        """Reason why a module in this state cannot be traced; None if it can."""
        if any(name not in vars(submodule) for submodule in self._modules for name in _CHILDREN):
            self.problem = "the model contains a module that is not a plain nn.Module"
            self._modules = []
        self._hooks = [
            value
            for submodule in self._modules
            for name, value in vars(submodule).items()
            if name.endswith("hooks") and "state_dict" not in name and isinstance(value, dict)
        ] + global_module_hooks()
        self._owner = getattr(forward, "__self__", None)
        self._cells = getattr(forward, "__closure__", None) or ()
        own = {
            id(value)
            for submodule in self._modules
            for name, value in vars(submodule).items()
            if name in _BASE_ATTRIBUTES
        }
        self._nested: list[Any] = []
        self._nested = [
            container
            for container in {id(value): value for value in map(_container, self._values())}.values()
            if container is not None and id(container) not in own
        ]
        self._seen = self._values()
        self.tensors = [value for value in {id(value): value for value in self._seen}.values() if type(value) in _TYPES]
        """Tensors of the model."""
        self._layouts = tensor_layouts(self.tensors)
        if any(self._hooks) or any(len(layout) == 1 for layout in self._layouts):
            self.problem = "the model has hooks"

    def holds(self) -> bool:
        """Returns whether the module is still in this state."""
        values = self._values()
        return (
            len(values) == len(self._seen)
            and all(map(is_, values, self._seen))
            and not any(self._hooks)
            and tensor_layouts(self.tensors) == self._layouts
        )

    def _values(self) -> list[Any]:
        values: list[Any] = [cell.cell_contents for cell in self._cells]
        if self._owner is not None and not isinstance(self._owner, nn.Module):
            values.extend(_items(_container(self._owner)))
        for submodule in self._modules:
            attributes = vars(submodule)
            values.extend(attributes.values())
            values.extend(attributes["_parameters"].values())
            values.extend(attributes["_buffers"].values())
            values.extend(attributes["_modules"].values())
        for container in self._nested:
            values.extend(_items(container))
        return values


_TYPES = (Tensor, nn.Parameter)


def _container(value: Any) -> Any:
    """Returns the mutable container of an object's items or attributes; None if there is no such container."""
    if isinstance(value, (dict, list, set)):
        return value
    if isinstance(value, (Tensor, nn.Module, type)) or callable(value):
        return None
    return getattr(value, "__dict__", None)


def _items(container: Any) -> Iterable[Any]:
    if container is None:
        return ()
    return container.values() if isinstance(container, dict) else container


def _agree(replayed: Tensor | None, expected: Tensor | None) -> bool:
    """Returns whether two tensors agree up to rounding errors. On a GPU, the order of summation may vary."""
    if replayed is None or expected is None or replayed.shape != expected.shape or replayed.dtype != expected.dtype:
        return replayed is expected
    tolerance = 1e3 * torch.finfo(expected.dtype).eps * float(expected.abs().amax())
    return torch.equal(replayed, expected) or float((replayed - expected).abs().amax()) <= tolerance


def signature(keeps_graph: bool, names: Iterable[str], batch: Any, device: torch.device) -> Any:
    """Returns a key that is equal for calls that can share a program; None if the batch contains unhashable values.

    Args:
        keeps_graph: Whether the call keeps the graph, so that gradients can be computed.
        names: Names of the parameters in τ.
        batch: The batch, on the model's device.
        device: The device of the model.
    """
    structure = _structure(batch)
    key = (
        keeps_graph,
        tuple(names),
        structure,
        torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _structure(batch: Any) -> Any:
    """Returns the structure of a batch: its containers and values, with tensors replaced by their layouts."""
    if isinstance(batch, Tensor):
        return tensor_layouts([batch])[0] if type(batch) in _TYPES else []
    if isinstance(batch, Mapping):
        return tuple((key, _structure(value)) for key, value in batch.items())
    if isinstance(batch, (list, tuple)):
        return tuple(_structure(value) for value in batch)
    return type(batch), batch


class ProgramEntry:
    """The program of one signature, or the reason why there is none."""

    def __init__(self) -> None:
        self._uses = 0
        self._recordings = 0
        self._state: ModuleState | None = None
        self.program: Program | None = None
        """The program; None if it has not been recorded or has been discarded."""
        self.verified = False
        """Whether the results of the program have been compared with those of the model, and agree."""
        self.refusal: str | None = None
        """Reason why calls with this signature stay untraced; None if they may be recorded."""

    def begin_use(self, module: nn.Module, forward: Callable[..., Any], *, at_once: bool) -> ModuleState | None:
        """Counts a call. Returns the state of the module if the call should be recorded, otherwise None.

        Args:
            module: Module that is called.
            forward: The function that calls the module.
            at_once: Whether to record the first call instead of the second.
        """
        self._uses += 1
        if self._state is not None and not self._state.holds():
            self.discard()
        if self.refusal is not None or self.program is not None or (self._uses == 1 and not at_once):
            return None
        if self._recordings == _MAX_RECORDINGS:
            self.discard("the attributes of the model change between calls, or gradients are never computed")
            return None
        self._recordings += 1
        state = ModuleState(module, forward)
        if state.problem:
            self.discard(state.problem)
            return None
        return state

    def discard(self, refusal: str | None = None) -> None:
        """Drops the program. If a reason is given, no further program is recorded."""
        self.program, self._state, self.verified = None, None, False
        self.refusal = refusal

    def verify(self, replayed: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> bool:
        """Compares f and J τ from the program with those from the model, and discards the program if they differ.

        Returns:
            Whether the results agree.
        """
        self.verified = all(map(_agree, replayed, expected))
        if not self.verified:
            self.discard("the recorded operations gave a different f or J τ than the model on another batch")
        return self.verified

    def accept(self, program: Program | None, state: ModuleState, refusal: str | None) -> None:
        """Stores a program and the module state in which it was recorded, or the reason why it cannot be used."""
        if refusal is not None:
            self.discard(refusal)
        elif self.program is None and state.holds():
            self.program, self._state = program, state


class ProgramCache:
    """LRU cache that maps signatures to programs."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Any, ProgramEntry] = OrderedDict()

    def entry(self, key: Any, inputs: Sequence[Tensor], copies: Sequence[Tensor | None]) -> ProgramEntry:
        """Returns the entry for a call. A call that does not satisfy the conditions of a program has its own entry.

        Args:
            key: Signature of the call.
            inputs: Tangents and tensors of the batch.
            copies: Copies of the inputs on the CPU; None for inputs without a copy.
        """
        entry = self._entry(key)
        while (program := entry.program) and (counts := program.conditions_for(inputs, copies)) != program.conditions:
            key = (key, counts)
            entry = self._entry(key)
        return entry

    def _entry(self, key: Any) -> ProgramEntry:
        if key not in self._entries:
            self._entries[key] = ProgramEntry()
            if len(self._entries) > _MAX_SIGNATURES:
                self._entries.popitem(last=False)
        self._entries.move_to_end(key)
        return self._entries[key]

    @property
    def ready(self) -> int:
        """Number of programs that have been verified and replace the model."""
        return sum(entry.verified for entry in self._entries.values())

    @property
    def refusals(self) -> tuple[str, ...]:
        """Reasons why calls with some signatures are not recorded and stay untraced."""
        return tuple(sorted({entry.refusal for entry in self._entries.values() if entry.refusal is not None}))


class Gradient(Protocol):
    """Function that computes Jᵀ u for each parameter, where u is the gradient of a cost with respect to f + J τ.

    Parameters that f does not depend on are left out.
    """

    def __call__(self, u: Tensor, names: Sequence[str], *, retain_graph: bool) -> Mapping[str, Tensor]:
        """Returns the gradients with respect to the parameters in `names`.

        If `retain_graph` is True, the function can be called again.
        """


class GraphGradient:
    """A `Gradient` that autograd computes from the graph of f.

    Args:
        f: Output with its graph.
        edges: Edges of the autograd graph at the parameters, by parameter name.
    """

    def __init__(self, f: Tensor, edges: Mapping[str, GradientEdge]) -> None:
        self._f = f
        self._edges = edges

    def __call__(self, u: Tensor, names: Sequence[str], *, retain_graph: bool) -> Mapping[str, Tensor]:
        """Returns the gradients with respect to the parameters in `names`."""
        if self._f.grad_fn is None:
            return {}
        edges = [self._edges[name] for name in names]
        results = torch.autograd.grad(self._f, edges, u, retain_graph=retain_graph, allow_unused=True)
        return {name: result for name, result in zip(names, results, strict=True) if result is not None}


class RecordedGradient:
    """A `Gradient` of a recorded forward pass. The operations of its first call are recorded as well.

    Args:
        gradient: Function that computes the gradient from the graph.
        names: Names of all parameters with respect to which gradients may be computed.
        recorder: Recorder of the forward pass.
        finish: Function that is called with the gradients for all names.
    """

    def __init__(
        self,
        gradient: Gradient,
        names: Sequence[str],
        recorder: Recorder,
        finish: Callable[[Mapping[str, Tensor]], None],
    ) -> None:
        self._gradient = gradient
        self._names = names
        self._recorder: Recorder | None = recorder
        self._finish = finish

    def __call__(self, u: Tensor, names: Sequence[str], *, retain_graph: bool) -> Mapping[str, Tensor]:
        """Returns the gradients with respect to the parameters in `names`."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return self._gradient(u, names, retain_graph=retain_graph)
        recorder.begin_backward(u)
        wanted = self._names if recorder.refusal is None else names
        with recorder.watching():
            results = self._gradient(u, wanted, retain_graph=retain_graph)
        self._finish(results)
        return {name: results[name] for name in names if name in results}


class ReplayedGradient:
    """A `Gradient` of a forward pass that a program has replayed.

    Args:
        program: Program that was replayed.
        saved: Values that the program's forward pass returned for the backward pass.
    """

    def __init__(self, program: Program, saved: list[Tensor]) -> None:
        self._program = program
        self._saved = saved
        self._released = False
        self._versions = self._current_versions()

    def _current_versions(self) -> list[int]:
        return tensor_versions([*self._program.watched, *self._saved])

    def __call__(self, u: Tensor, names: Sequence[str], *, retain_graph: bool) -> Mapping[str, Tensor]:
        """Returns the gradients with respect to the parameters in `names`.

        Raises:
            KfacpackError: If a tensor that the gradient needs was modified.
            RuntimeError: If this is a second call and the first call did not set `retain_graph`.
        """
        if self._released:
            raise RuntimeError("cannot compute a gradient a second time; use retain_graph=True in the first call")
        if self._current_versions() != self._versions:
            raise modified_error()
        self._released = not retain_graph
        return self._program.backward(list(self._saved) if retain_graph else self._saved, u, names)


def modified_error() -> KfacpackError:
    """Returns the error for a saved tensor that was modified before the gradient was computed."""
    problem = "a tensor that the gradient needs was modified in place after it was used"
    cause = "by the model itself or by an update of its weights"
    return KfacpackError(f"{problem}, {cause}; compute the gradient before the weights are updated")
