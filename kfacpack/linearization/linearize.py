"""Implements `kp.linearize`: the model f(x) + J(x) τ, which is linear in τ.

Because the model is linear in τ, the gradient of a cost with respect to τ is Jᵀ u, where u is the gradient of the cost
with respect to f + J τ. One ordinary backward pass of the base model, starting from u, computes Jᵀ u. J τ itself
needs no graph. A training step therefore consists of a forward pass with its graph, a tangent computed alongside
without a graph, and a backward pass. The step needs about as much memory as a step of fine-tuning.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from kfacpack import _torch
from kfacpack._torch import add_each, backward_retains_graph, eager_mode, tensor_versions
from kfacpack.curvature.curvature import check_task_vector
from kfacpack.linearization.jvp_mode import JvpMode, TangentMap, require_tracked
from kfacpack.linearization.program import Recorder
from kfacpack.linearization.program_cache import (
    GraphGradient,
    ProgramCache,
    RecordedGradient,
    ReplayedGradient,
    modified_error,
    signature,
)
from kfacpack.models.functional import (
    MirroredTensor,
    call_model,
    device_tensor,
    eval_mode,
    host_copy,
    map_tensors,
    reentrant_checkpoints_refused,
    require_finite,
    select_parameters,
    tensors_of,
    zeros_like_parameters,
)
from kfacpack.models.model import unwrap_model

if TYPE_CHECKING:
    from kfacpack.linearization.program import Program
    from kfacpack.linearization.program_cache import Gradient, ModuleState, ProgramEntry
    from kfacpack.models.functional import Forward, ModelInput
    from kfacpack.models.model import Model

_LOCK = threading.RLock()
"""Lock that is held during a call: calls change flags of the module, which must not affect calls in other threads."""


_LARGE_MODEL = 50_000_000
"""Number of parameters above which the Python overhead of a step on a CPU is negligible."""


def _is_large_on_cpu(parameters: Mapping[str, Tensor]) -> bool:
    on_cpu = all(parameter.device.type == "cpu" for parameter in parameters.values())
    return on_cpu and sum(parameter.numel() for parameter in parameters.values()) > _LARGE_MODEL


class SlowLinearizationWarning(UserWarning):
    """Issued if the fast path of `kp.linearize` does not work with the installed torch version.

    `torch.func.jvp` is used instead.
    """


def linearize(
    model: nn.Module | Model,
    params: Iterable[str] | str | None = None,
    *,
    forward: Forward | None = None,
    trace: bool | None = None,
    compile: bool = False,
) -> Linearized:
    """Linearises a model in its parameters: `lin(batch, tau)` is f + J τ, differentiable in τ.

    The model is used in eval mode, and the previous mode of each module is restored after a call. If the installed
    torch version lacks the private functions that the fast path needs, `torch.func.jvp` is used instead, and a
    `SlowLinearizationWarning` is issued.

    Args:
        model: A module, where f is `model(*batch)` of shape (N, C); or a model from `kp.load_model`, which defines f
            itself.
        params: Names or patterns of the parameters that τ may change. Defaults to all parameters, except those that the
            family of a model from `kp.load_model` freezes.
        forward: Function that computes f from a batch, if f is not `model(*batch)`.
        trace: Whether calls are recorded once per shape of the batch and replayed without the model. The results are
            the same. Set it to False if f depends on Python state outside the model, such as a global variable.
            Defaults to True, except for models with more than 50 million parameters on a CPU: the operations of such
            models take longer than the Python code around them, and recording needs additional memory.
        compile: Whether to compile the recorded operations with torch.compile, using CUDA graphs on a GPU.

    Returns:
        The linearised model.

    Raises:
        KfacpackError: If `model` has an unsupported type, or a pattern in `params` matches no parameter.

    Example:
        >>> lin = kp.linearize(model)
        >>> tau = {name: value.requires_grad_() for name, value in lin.zeros().items()}
        >>> lin(x, tau).square().mean().backward()
    """
    module, own_forward, frozen = unwrap_model(model)
    chosen = select_parameters(module, params, frozen)
    return Linearized(module, own_forward if forward is None else forward, chosen, trace=trace, compile=compile)


class Linearized:
    """The function f(x) + J(x) τ of a module in eval mode.

    τ is a dict that maps state-dict names to tensors with the shapes of the parameters. Missing tensors count as zero.
    The dtype of τ may differ from that of the parameters.

    Args:
        module: The module that owns the parameters.
        forward: Function that computes f, (N, C), from the arguments in a batch.
        parameters: Parameters that τ may change, by state-dict name.
        trace: Whether calls are recorded and replayed; see `linearize`.
        compile: Whether recorded calls are compiled.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Forward,
        parameters: Mapping[str, Tensor],
        *,
        trace: bool | None = None,
        compile: bool = False,
    ) -> None:
        self._module = module
        self._forward = forward
        self._parameters = dict(parameters)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        missing = _torch.missing_jvp_parts()
        self._fast = not missing
        self._compile = compile
        self._traceable = trace is not None or compile or not _is_large_on_cpu(self._parameters)
        self._traces = self._fast and self._traceable and (trace is not False)
        self._programs = ProgramCache()
        if missing:
            problem = (
                f"torch {torch.__version__} has no {', '.join(missing)}, which kp.linearize needs for its fast path"
            )
            remedy = "torch.func.jvp is used instead, which gives the same results but needs more time and memory"
            warnings.warn(f"{problem}; {remedy}", SlowLinearizationWarning, stacklevel=3)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that τ may change, in state-dict order."""
        return tuple(self._parameters)

    @property
    def programs(self) -> int:
        """Number of recorded programs that replace the model in calls with matching shapes."""
        return self._programs.ready

    @property
    def untraced(self) -> tuple[str, ...]:
        """Reasons why calls with certain shapes always run the model and are not recorded; empty if there are none."""
        return self._programs.refusals

    def zeros(self) -> dict[str, Tensor]:
        """Returns τ = 0, the starting point of training, in at least float32."""
        return zeros_like_parameters(self._parameters)

    def __call__(self, batch: ModelInput, tau: Mapping[str, Tensor]) -> Tensor:
        """Returns f + J τ, (N, C), which can be differentiated once with respect to τ.

        Args:
            batch: A tensor, a tuple of arguments or a dict of keyword arguments.
            tau: Change to the parameters, by state-dict name.

        Raises:
            TaskVectorError: If the names or shapes in `tau` do not match the parameters.
            KfacpackError: If the model cannot be linearised.
        """
        check_task_vector(tau, self._shapes, "lin")
        if torch.is_grad_enabled() and any(value.requires_grad for value in tau.values()):
            output: Tensor = _LinearizedFunction.apply(self, batch, tuple(tau), *tau.values())  # type: ignore[no-untyped-call]
            return output
        f, change = self.outputs(batch, tau)
        return f + change

    def outputs(self, batch: ModelInput, tau: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns f and J τ, both (N, C), without a graph. f + α J τ is then cheap to compute for any α.

        Args:
            batch: See `__call__`.
            tau: See `__call__`.

        Raises:
            TaskVectorError: If the names or shapes in `tau` do not match the parameters.
            KfacpackError: If the model cannot be linearised.
        """
        point = self._linearization(batch, tau, keeps_graph=False)
        return point.f, point.change

    def at(self, batch: ModelInput, tau: Mapping[str, Tensor], *, finite: bool = True) -> Linearization:
        """Returns f and J τ together with the graph of f, for training loops that do not use autograd themselves.

        Args:
            batch: See `__call__`.
            tau: See `__call__`.
            finite: Whether to check that f is finite. The check synchronises with the device.

        Raises:
            TaskVectorError: If the names or shapes in `tau` do not match the parameters.
            KfacpackError: If the model cannot be linearised.
        """
        return self._linearization(batch, tau, keeps_graph=True, finite=finite)

    def _linearization(
        self, batch: ModelInput, tau: Mapping[str, Tensor], *, keeps_graph: bool, finite: bool = True
    ) -> Linearization:
        """Replays the program for this call if one was recorded; otherwise, calls the model and may record the call."""
        check_task_vector(tau, self._shapes, "lin")
        dtypes = {name: value.dtype for name, value in tau.items()}
        with _LOCK, torch.inference_mode(False):
            parameters = {name: self._parameters[name] for name in tau}
            tangents = {name: _tangent(tau[name], parameter) for name, parameter in parameters.items()}
            device = next(iter(parameters.values())).device
            moved = map_tensors(batch, lambda tensor: _detached(tensor, device))
            arguments = map_tensors(moved, device_tensor)
            call = partial(self._run_model, keeps_graph=keeps_graph, finite=finite)
            run = partial(call, moved if self._fast else arguments, tangents)
            key = signature(keeps_graph, tau, arguments, device) if self._traces else None
            if key is None:
                return Linearization(*run(), dtypes)
            inputs = [*tangents.values(), *tensors_of(arguments)]
            copies = [*[None] * len(tangents), *map(host_copy, tensors_of(moved))]
            entry = self._programs.entry(key, inputs, copies)
            state = entry.begin_use(self._module, self._forward, at_once=self._compile)
            if state is not None:
                recorder = Recorder(inputs, state.tensors)
                f, change, backward = call(arguments, tangents, recorder)
                finish = partial(self._finish_recording, entry, state, recorder)
                if keeps_graph:
                    backward = RecordedGradient(backward, tuple(tau), recorder, finish)
                else:
                    finish({})
                if not self._compile:
                    return Linearization(f, change, backward, dtypes)
                if keeps_graph:
                    backward(torch.zeros_like(f), list(tau), retain_graph=False)
            if entry.program is None:
                return Linearization(*run(), dtypes)
            if entry.verified or state is not None:
                return self._replay(entry.program, inputs, dtypes, finite=finite)
            # Compiled results differ in rounding, so they replace those of the model from the first call on.
            if self._compile:
                expected = run()[:2]
                point = self._replay(entry.program, inputs, dtypes, finite=finite)
                return point if entry.verify((point.f, point.change), expected) else Linearization(*run(), dtypes)
            replayed = entry.program.outputs(list(inputs))
            f, change, backward = run()
            entry.verify(replayed, (f, change))
            return Linearization(f, change, backward, dtypes)

    @staticmethod
    def _replay(
        program: Program, inputs: Sequence[Tensor], dtypes: Mapping[str, torch.dtype], *, finite: bool
    ) -> Linearization:
        f, change, saved = program.forward(list(inputs))
        if finite:
            require_finite(f)
        return Linearization(f, change, ReplayedGradient(program, saved), dtypes)

    def _finish_recording(
        self, entry: ProgramEntry, state: ModuleState, recorder: Recorder, gradients: Mapping[str, Tensor]
    ) -> None:
        """Stores the program of a recorded call, or the reason why there is none, in the cache entry of the call."""
        with _LOCK:
            program = recorder.program(gradients, compiled=self._compile)
            entry.accept(program, state, recorder.refusal)

    def _run_model(
        self,
        arguments: Any,
        tangents: Mapping[str, Tensor],
        recorder: Recorder | None = None,
        *,
        keeps_graph: bool,
        finite: bool,
    ) -> tuple[Tensor, Tensor | None, Gradient]:
        """Calls the model in eval mode. Returns f, J τ and a function that computes gradients."""
        parameters = {name: self._parameters[name] for name in tangents}
        if not self._fast:
            context: Any = torch.enable_grad() if keeps_graph else torch.no_grad()
        elif keeps_graph:
            context = saved_tensors_hooks(_save_tensor, _load_tensor)
        else:
            context = saved_tensors_hooks(_save_nothing, _no_load)
        refused = reentrant_checkpoints_refused("pass use_reentrant=False")
        with eval_mode(self._module, parameters), _no_autocast_cache(), eager_mode(), refused, context:
            edges = {name: get_gradient_edge(parameter) for name, parameter in parameters.items()}
            change: Tensor | None
            if not self._fast:
                f, change = self._torch_jvp(arguments, tangents)
            elif recorder is None:
                f, change = self._forward_with_tangent(arguments, tangents, keeps_graph=keeps_graph)
            else:
                with recorder.watching():
                    f, change = self._forward_with_tangent(arguments, tangents, keeps_graph=keeps_graph, recorded=True)
                    recorder.end_forward(f, change)
            if finite:
                require_finite(f)
            return f.detach(), change, GraphGradient(f, edges)

    def _forward_with_tangent(
        self, batch: Any, tangents: Mapping[str, Tensor], *, keeps_graph: bool, recorded: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Returns f with its graph, and J τ computed alongside by `JvpMode`."""
        tangent_map = TangentMap({self._parameters[name]: tangent for name, tangent in tangents.items()})
        with JvpMode(tangent_map, keeps_graph=keeps_graph, traceable=self._traceable, recorded=recorded):
            f = call_model(self._forward, batch, finite=False)
        if (change := tangent_map.get(f)) is None:
            require_tracked(f)
        return f, change

    def _torch_jvp(self, batch: Any, tangents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Computes f and J τ like `_forward_with_tangent`, but with `torch.func.jvp`, which is public API."""
        caller = _ForwardModule(self._module, lambda: call_model(self._forward, batch))
        parameters = {f"module.{name}": self._parameters[name] for name in tangents}
        directions = {f"module.{name}": tangent for name, tangent in tangents.items()}
        # Fused attention and the fast path of nn.MultiheadAttention have no forward-mode derivative.
        with sdpa_kernel(SDPBackend.MATH), _no_attention_fast_path():
            outputs: Any = torch.func.jvp(
                lambda values: torch.func.functional_call(caller, values, ()), (parameters,), (directions,)
            )
        f, change = outputs
        return f, change.detach()


class Linearization:
    """The output f for one batch, its change along τ, and a function that computes gradients.

    Args:
        f: Output, (N, C).
        change: J τ, (N, C); None for zero.
        backward: Function that computes Jᵀ u; see `Gradient`.
        dtypes: Dtype of the gradient with respect to each parameter, by name.
    """

    def __init__(self, f: Tensor, change: Tensor | None, backward: Gradient, dtypes: Mapping[str, torch.dtype]) -> None:
        self._backward = backward
        self._dtypes = dtypes
        self.f = f
        """Output f, (N, C)."""
        self.change = torch.zeros_like(self.f) if change is None else change
        """J τ, the change in the output along τ, (N, C)."""

    def gradient(
        self,
        u: Tensor,
        names: Iterable[str] | None = None,
        *,
        into: dict[str, Tensor] | None = None,
        retain_graph: bool = False,
    ) -> dict[str, Tensor]:
        """Computes Jᵀ u, the gradient of a cost with respect to τ.

        Args:
            u: Gradient of a cost with respect to f + J τ, (N, C).
            names: Parameters to differentiate with respect to. Defaults to all names in τ.
            into: Gradients by parameter name, to which the results are added in place.
            retain_graph: Whether to keep the graph for another call.

        Returns:
            `into`, or a new dict. Parameters that f does not depend on are left out.
        """
        gradients = {} if into is None else into
        selected = list(self._dtypes if names is None else names)
        if not selected:
            return gradients
        if u.shape != self.f.shape:
            raise ValueError(f"expected u to have the shape of f, {list(self.f.shape)}, got {list(u.shape)}")
        # Expanded tensors, such as the gradient of a sum, have other strides, which recorded operations do not support.
        results = self._backward(u.detach().to(self.f).contiguous(), selected, retain_graph=retain_graph)
        with torch.no_grad():
            present = [name for name in results if name in gradients]
            add_each([gradients[name] for name in present], [results[name] for name in present])
            for name in [name for name in results if name not in gradients]:
                # Copied if results may be added to it later, because two parameters may share a gradient tensor.
                gradients[name] = results[name].to(self._dtypes[name], copy=into is not None)
        return gradients


class _LinearizedFunction(torch.autograd.Function):
    """Computes f + J τ as a differentiable function of τ. Its backward pass is the backward pass of f."""

    @staticmethod
    def forward(ctx: Any, lin: Linearized, batch: ModelInput, names: tuple[str, ...], *values: Tensor) -> Tensor:
        ctx.names = names
        ctx.point = lin.at(batch, dict(zip(names, values, strict=True)))
        output: Tensor = ctx.point.f + ctx.point.change
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
        needed = [name for name, needs in zip(ctx.names, ctx.needs_input_grad[3:], strict=True) if needs]
        gradients = ctx.point.gradient(u, needed, retain_graph=backward_retains_graph())
        return None, None, None, *(gradients.get(name) for name in ctx.names)


class _ForwardModule(nn.Module):
    """Module that calls a function, so that `functional_call` can replace the parameters of `module` in the call."""

    def __init__(self, module: nn.Module, call: Callable[[], Tensor]) -> None:
        super().__init__()
        self.module = module
        self._call = call

    def forward(self) -> Tensor:
        return self._call()


def _tangent(value: Tensor, parameter: Tensor) -> Tensor:
    """Converts a tensor of τ to the dtype, device and memory layout of its parameter."""
    tangent = _detached(value).to(parameter)
    if tangent.stride() == parameter.stride():
        return tangent
    return torch.empty_like(parameter, requires_grad=False).copy_(tangent)


def _detached(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Returns the tensor without its graph, on `device` if one is given.

    Inference tensors are copied, because autograd cannot use them. Returns a `MirroredTensor` on `device` unchanged.
    """
    if isinstance(tensor, MirroredTensor) and tensor.device_tensor.device == device:
        return tensor
    detached = tensor.clone() if tensor.is_inference() else tensor.detach()
    return detached if device is None else detached.to(device, non_blocking=True)


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Clears autocast's cache around a call, because tensors cast in another call lack the tangents of this call."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def _no_attention_fast_path() -> Iterator[None]:
    """Disables the fused inference kernels of nn.MultiheadAttention and nn.TransformerEncoderLayer."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


# If autograd saved the tensors of the model themselves, TangentMap would also keep their tangents alive. Saving other
# tensors with the same memory frees a tangent as soon as the model releases its tensor.


def _save_tensor(tensor: Tensor) -> tuple[Tensor, int]:
    alias = tensor.detach()
    return alias, tensor_versions([alias])[0]


def _load_tensor(saved: tuple[Tensor, int]) -> Tensor:
    tensor, version = saved
    if tensor_versions([tensor]) != [version]:
        raise modified_error()
    return tensor


def _save_nothing(tensor: Tensor) -> None:
    return None


def _no_load(saved: None) -> Tensor:
    raise AssertionError("f was computed without a graph")
