"""A module as a function f of a batch and of its parameters.

Calls a model on a batch (a tensor, tuple or dict), selects parameters by name or pattern, and temporarily switches a
module to eval mode. f has shape (N, C): N examples, width C. An example of a language model may have several
consecutive rows of f.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import CheckpointFunction

from kfacpack.errors import KfacpackError, NotFiniteError

ModelInput: TypeAlias = "Tensor | Sequence[Any] | Mapping[str, Any]"
"""Arguments of one forward pass: one tensor, positional arguments or keyword arguments."""
Forward: TypeAlias = Callable[..., Any]
"""A function from the arguments in a batch to f."""


NOT_FINITE = "f contains NaN or Inf; check the inputs, or use another dtype for the model"
"""Error message for an f that is not finite."""


_PATCH_LOCK = threading.RLock()


@contextmanager
def reentrant_checkpoints_refused(remedy: str) -> Iterator[None]:
    """Context manager in which this thread may not call `torch.utils.checkpoint` with `use_reentrant=True`.

    Such a call computes a part of the model without gradients, and its parameters are missing from autograd's graph.

    Args:
        remedy: What to do instead, for the error message.

    Raises:
        KfacpackError: If the model makes such a call.
    """
    thread = threading.get_ident()
    with _PATCH_LOCK:
        original: Callable[..., Any] = CheckpointFunction.forward

        def forward(ctx: Any, *args: Any) -> Any:
            if threading.get_ident() == thread:
                problem = "the model calls torch.utils.checkpoint with use_reentrant=True"
                raise KfacpackError(f"{problem}, which hides parameters from autograd; {remedy}")
            return original(ctx, *args)

        CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]
        try:
            yield
        finally:
            CheckpointFunction.forward = staticmethod(original)  # type: ignore[method-assign]


def call_model(forward: Forward, batch: ModelInput, *, finite: bool = True) -> Tensor:
    """Calls a model on a batch and checks its output.

    Args:
        forward: Function from a batch to f.
        batch: A tensor, a tuple or list of positional arguments, or a dict of keyword arguments.
        finite: Whether to check that f is finite, which synchronises with the device.

    Returns:
        f, of shape (N, C).

    Raises:
        KfacpackError: If the batch has an unsupported type or no examples, or f is not a float tensor of shape (N, C).
        NotFiniteError: If f contains NaN or Inf.
    """
    if not isinstance(batch, (Tensor, Mapping, list, tuple)):
        raise KfacpackError(f"expected a batch that is a tensor, a tuple or a dict, got {type(batch).__name__}")
    if (sizes := [len(tensor) for tensor in tensors_of(batch) if tensor.dim()]) and not any(sizes):
        raise KfacpackError("the batch is empty; expected at least one example")
    try:
        if isinstance(batch, Tensor):
            f = forward(batch)
        else:
            f = forward(**batch) if isinstance(batch, Mapping) else forward(*batch)
    except TypeError as error:
        hint = "A batch contains the arguments of f without labels: use ((x,) for x, y in loader) to drop them"
        raise KfacpackError(f"the model cannot be called with this batch: {error}. {hint}") from error
    if not isinstance(f, Tensor) or f.dim() != 2 or not f.is_floating_point() or 0 in f.shape:
        output = f"{f.dtype} of shape {list(f.shape)}" if isinstance(f, Tensor) else type(f).__name__
        problem = f"expected the model to return f as floats of shape (examples, width), got {output}"
        raise KfacpackError(f"{problem}. Select f with 'forward', such as forward=lambda x: model(x).pooler_output")
    if finite:
        require_finite(f)
    return f


def require_finite(f: Tensor) -> None:
    """Checks that f is finite.

    Raises:
        NotFiniteError: If f contains NaN or Inf.
    """
    if not bool(f.detach().isfinite().all()):
        raise NotFiniteError(NOT_FINITE)


def map_tensors(batch: ModelInput, function: Callable[[Tensor], Tensor]) -> Any:
    """Returns the batch with `function` applied to each of its tensors, including nested ones."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, function) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return tuple(map_tensors(value, function) for value in batch)
    return batch


def tensors_of(batch: ModelInput) -> list[Tensor]:
    """Returns all tensors of a batch, including nested ones."""
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(batch, collect)
    return tensors


def batch_size_of(batch: ModelInput) -> int | None:
    """Returns the number of examples, or None if the tensors of the batch differ in their first dimension."""
    sizes = {len(tensor) if tensor.dim() else 0 for tensor in tensors_of(batch)}
    return sizes.pop() if len(sizes) == 1 else None


def to_device(batch: ModelInput, device: torch.device) -> Any:
    """Returns the batch with its tensors on a device."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


class TensorPack:
    """Several tensors in one byte buffer on the CPU, so that one copy moves all of them to a device.

    Tensors with the widest elements come first, so that all are aligned without padding.

    Args:
        tensors: The tensors; they are copied.
        pin: Whether to allocate pinned memory, from which a GPU can copy asynchronously.
    """

    def __init__(self, tensors: Sequence[Tensor], *, pin: bool):
        self._specs = [(tensor.dtype, tensor.shape) for tensor in tensors]
        self._starts, end = [0] * len(tensors), 0
        for index in sorted(range(len(tensors)), key=lambda index: -tensors[index].itemsize):
            self._starts[index], end = end, end + tensors[index].nbytes
        self.nbytes = end
        """Size of the buffer."""
        self.buffer = torch.empty(end, dtype=torch.uint8, pin_memory=pin)
        """All values, as bytes."""
        for view, tensor in zip(self.views(self.buffer), tensors, strict=True):
            view.copy_(tensor)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Returns the tensors as views of a copy of the buffer.

        Args:
            buffer: A byte tensor on any device that begins with the content of `buffer`.
        """
        return [
            buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for start, (dtype, shape) in zip(self._starts, self._specs, strict=True)
        ]


class BatchMover:
    """Moves batches to a device, all tensors of a batch in one copy.

    On CUDA devices, the copy runs on a separate stream, from pinned memory, in parallel with earlier work.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: ModelInput) -> Any:
        """Returns the batch with its tensors on the device; they may share memory."""
        tensors = tensors_of(batch)
        if not tensors or all(tensor.device == self._device for tensor in tensors):
            return batch
        pack = TensorPack(tensors, pin=self._stream is not None)
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            buffer = pack.buffer.to(self._device, non_blocking=True)
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            buffer.record_stream(current)
        views = iter(pack.views(buffer))
        return map_tensors(batch, lambda tensor: next(views))


class DeferredValues:
    """The values of a tensor, read after later work has been started, so that the device is not idle.

    Args:
        tensor: The tensor, which must not be modified. On CUDA devices, its copy to the CPU starts immediately.
    """

    def __init__(self, tensor: Tensor):
        self._values, self._copied = tensor, None
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.current_stream(tensor.device).record_event()

    def read(self) -> list[float]:
        """Returns the values; waits until they are computed."""
        if self._copied is not None:
            self._copied.synchronize()
        values: list[float] = self._values.tolist()
        return values


ANSWERS = "answers"
"""Key of the mask, (N, R), of the positions whose outputs are rows of f, in batches with several rows per example."""


def padding_mask(batch: ModelInput) -> Tensor | None:
    """Returns the batch's `attention_mask` as a bool tensor (N, R), False for padding; None if it has none.

    R counts the positions of all sequences of an example.
    """
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask.bool().flatten(1) if isinstance(mask, Tensor) and mask.dim() > 1 else None


def rows_per_example(batch: ModelInput) -> list[int] | None:
    """Returns how many rows of f each example has; None for a batch whose examples have one row each."""
    answers = batch.get(ANSWERS) if isinstance(batch, Mapping) else None
    return answers.flatten(1).sum(1).tolist() if isinstance(answers, Tensor) and answers.dim() > 1 else None


def answer_targets(batch: ModelInput) -> Tensor:
    """Returns the token that each row of f should predict, (P,): the one after each position of an answer."""
    assert isinstance(batch, Mapping)
    targets: Tensor = batch["input_ids"].roll(-1, dims=-1)[batch[ANSWERS].bool()]
    return targets


@contextmanager
def eval_mode(model: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Temporarily switches a module to eval mode, with gradients for `parameters` only.

    Restores all `training` and `requires_grad` flags afterwards.

    Args:
        model: Module to switch.
        parameters: Parameters that need gradients, by name.

    Raises:
        KfacpackError: If a parameter is lazy, on the meta device or an inference tensor.
    """
    training = [(module, module.training) for module in model.modules()]
    required = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    chosen = {id(parameter) for parameter in parameters.values()}
    for name, parameter in parameters.items():
        if is_lazy(parameter) or parameter.is_meta:
            raise KfacpackError(f"parameter {name!r} has no values; load or initialise the model first")
        if parameter.is_inference():
            problem = "was created in torch.inference_mode and cannot be differentiated"
            raise KfacpackError(f"parameter {name!r} {problem}; load the model outside of it")
    try:
        model.eval()
        for parameter, _ in required:
            parameter.requires_grad_(id(parameter) in chosen)
        with torch.enable_grad():
            yield
    finally:
        for module, flag in training:
            module.training = flag
        for parameter, flag in required:
            parameter.requires_grad_(flag)


def zeros_like_parameters(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns τ = 0, in at least float32: the starting point of training."""
    return {
        name: torch.zeros_like(
            parameter, dtype=torch.promote_types(parameter.dtype, torch.float32), requires_grad=False
        )
        for name, parameter in parameters.items()
    }


def select_parameters(
    model: nn.Module, params: Iterable[str] | str | None, frozen: Iterable[str] = ()
) -> dict[str, Tensor]:
    """Selects parameters of a module by name.

    A parameter with several names (tied weights) is returned under its first name, regardless of the selected name.

    Args:
        model: Module to select from.
        params: Names or fnmatch patterns; None selects all parameters that are not frozen.
        frozen: fnmatch patterns of the parameters to leave out if `params` is None.

    Returns:
        The parameters by name, in state-dict order.

    Raises:
        KfacpackError: If no parameter is selected, a pattern matches none, or the module is sharded.
    """
    require_unsharded(model)
    named: dict[str, Tensor] = {
        name: p
        for name, p in model.named_parameters(remove_duplicate=False)
        if is_lazy(p) or (p.is_floating_point() and p.numel())
    }
    if not named:
        raise KfacpackError("the model has no parameters")
    first: dict[int, str] = {}
    for name, parameter in named.items():
        first.setdefault(id(parameter), name)
    if params is None:
        excluded = tuple(frozen)
        free = {name: p for name, p in named.items() if not any(fnmatchcase(name, pattern) for pattern in excluded)}
        if not free:
            raise KfacpackError("every parameter of the model is frozen; select parameters by name")
        return {name: p for name, p in free.items() if first[id(p)] == name}
    patterns = [params] if isinstance(params, str) else list(params)
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise KfacpackError(f"params {patterns}: expected at least one parameter name or pattern")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            first_names = ", ".join(list(named)[:3])
            available = f"the model has {len(named)} parameters: {first_names}, …"
            raise KfacpackError(f"no parameter matches {pattern!r}; {available}")
    chosen = {first[id(p)] for name, p in named.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}
    return {name: p for name, p in named.items() if name in chosen}


def require_unsharded(model: nn.Module) -> None:
    """Rejects a module whose parameters are divided among processes.

    Such parameters are gathered only while their layer computes. Curvature and tangents refer to whole parameters, and
    would silently miss those of other processes.

    Args:
        model: The module.

    Raises:
        KfacpackError: If the module is wrapped by FSDP, or a parameter is a `DTensor` (FSDP2, tensor parallelism).
    """
    remedy = (
        "Each process needs the whole model: use data parallelism without sharding, and --offload, --micro-batch-size "
        'and compressed bundles if memory is short; see "A model that does not fit" in docs/how-to/several-gpus.md'
    )
    # Neither class exists in a process that has not imported its module, and importing them takes seconds.
    wrapper: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    if any(isinstance(module, wrapper) for module in model.modules()):
        problem = "the parameters of a module in FullyShardedDataParallel are sharded; expected whole parameters"
        raise KfacpackError(f"{problem}. {remedy}")
    sharded: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    for name, parameter in model.named_parameters():
        if isinstance(parameter, sharded):
            placements = ", ".join(map(str, parameter.placements))
            found = f"a DTensor over {parameter.device_mesh.size()} processes, placed as {placements}"
            shape = list(parameter.shape)
            raise KfacpackError(f"parameter {name!r}: expected a whole tensor of shape {shape}, got {found}. {remedy}")


def at_least_float32(tensor: Tensor) -> Tensor:
    """Converts half-precision tensors to float32: in bfloat16, a small change of f would be rounded away."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
