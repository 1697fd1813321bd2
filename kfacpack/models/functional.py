"""Helpers that treat a module as a function f of a batch and of the module's parameters.

They call a model on a batch (a tensor, tuple or dict), select parameters by name or pattern, and temporarily switch a
module to eval mode. f has shape (N, C), where N is the number of examples and C is the width of f. In language models,
one example may have several consecutive rows of f.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import CheckpointFunction

from kfacpack._torch import tensor_versions
from kfacpack.errors import KfacpackError, NotFiniteError, abbreviate

ModelInput: TypeAlias = "Tensor | Sequence[Any] | Mapping[str, Any]"
"""Arguments of one forward pass: one tensor, positional arguments or keyword arguments."""
Forward: TypeAlias = Callable[..., Any]
"""A function that computes f from the arguments in a batch."""


NOT_FINITE = "f contains NaN or Inf; check the inputs, or use another dtype for the model"
"""Error message for outputs that are not finite."""


_PATCH_LOCK = threading.RLock()


@contextmanager
def reentrant_checkpoints_refused(remedy: str) -> Iterator[None]:
    """Context manager that raises an error if this thread calls `torch.utils.checkpoint` with `use_reentrant=True`.

    Such a call runs part of the model without gradients. The autograd graph lacks the parameters of this part.

    Args:
        remedy: Advice to the user, for the error message.

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
        forward: Function that computes f from a batch.
        batch: A tensor, a tuple or list of positional arguments, or a dict of keyword arguments.
        finite: Whether to check that f is finite. The check waits for the device.

    Returns:
        f, of shape (N, C).

    Raises:
        KfacpackError: If the batch has an unsupported type or no examples, or f is not a float tensor of shape (N, C).
        NotFiniteError: If f contains NaN or Inf.
    """
    if not isinstance(batch, (Tensor, Mapping, list, tuple)):
        raise KfacpackError(f"expected the batch to be a tensor, tuple, list or dict, got {type(batch).__name__}")
    if (sizes := [len(tensor) for tensor in tensors_of(batch) if tensor.dim()]) and not any(sizes):
        raise KfacpackError("the batch is empty; expected at least one example")
    try:
        if isinstance(batch, Tensor):
            f = forward(batch)
        else:
            f = forward(**batch) if isinstance(batch, Mapping) else forward(*batch)
    except TypeError as error:
        hint = "A batch must contain the model's inputs without labels; use ((x,) for x, y in loader) to drop labels"
        raise KfacpackError(f"the model cannot be called with this batch: {error}. {hint}") from error
    if not isinstance(f, Tensor) or f.dim() != 2 or not f.is_floating_point() or 0 in f.shape:
        output = f"{f.dtype} of shape {list(f.shape)}" if isinstance(f, Tensor) else type(f).__name__
        problem = f"expected the model to return a float tensor of shape (examples, width), got {output}"
        remedy = "Pass a function that returns such a tensor, for example forward=lambda x: model(x).pooler_output"
        raise KfacpackError(f"{problem}. {remedy}")
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
    """Returns the number of examples in a batch, or None if it has no tensors or their lengths differ."""
    sizes = {len(tensor) if tensor.dim() else 0 for tensor in tensors_of(batch)}
    return sizes.pop() if len(sizes) == 1 else None


def to_device(batch: ModelInput, device: torch.device) -> Any:
    """Returns the batch with its tensors on a device."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


_READS = frozenset(("__bool__", "__int__", "__index__", "__float__", "item", "tolist"))
"""Names of functions that return the values of a tensor as Python objects."""
_MIRRORED = frozenset((
    "to", "bool", "int", "long", "detach", "clone", "contiguous", "flatten", "view", "reshape", "squeeze", "unsqueeze",
    "expand", "transpose", "permute", "__getitem__", "all", "any", "sum", "amax", "amin", "max", "min", "cumsum",
    "diff", "clamp", "eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__",
    "add", "sub", "mul", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__",
    "logical_not", "logical_and", "logical_or", "bitwise_not", "bitwise_and", "bitwise_or",
    "__invert__", "__and__", "__or__", "__rand__", "__ror__",
))  # fmt: skip
"""Names of functions that map mirrored tensors to mirrored tensors. All are deterministic and exact for integers."""


class MirroredTensor(Tensor):
    """An integer or Boolean tensor on a device, with a CPU copy that can be read without waiting for the device.

    Some models read values of their inputs; for example, transformers checks whether a mask contains padding. The
    result of a function in `_MIRRORED` is mirrored as well, and its CPU copy is computed when it is first read. Other
    functions return ordinary tensors. After an in-place change, values are read from the device.
    """

    device_tensor: Tensor
    """The tensor on the device."""
    _host: Tensor | Callable[[], Tensor]
    _versions: list[int]

    @classmethod
    def of(cls, tensor: Tensor, host: Tensor | Callable[[], Tensor]) -> Tensor:
        """Returns a mirrored tensor, or `tensor` itself if it is a float, complex or inference tensor.

        Inference tensors do not record modifications, so an outdated copy could not be detected.

        Args:
            tensor: The tensor on the device.
            host: A CPU tensor with the same values, or a function that returns this tensor.
        """
        if tensor.is_floating_point() or tensor.is_complex() or tensor.is_inference():
            return tensor
        mirrored = tensor.as_subclass(cls)
        mirrored.device_tensor, mirrored._host, mirrored._versions = tensor, host, tensor_versions([tensor])
        return mirrored

    def is_current(self) -> bool:
        """Returns whether the values on the CPU are still equal to those on the device."""
        return tensor_versions([self.device_tensor]) == self._versions

    def host(self) -> Tensor:
        """Returns a CPU tensor with the values that this tensor had when it was created."""
        if not isinstance(self._host, Tensor):
            self._host = self._host()
        return self._host

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a torch function on the CPU copies if it only reads values, otherwise on the device tensors."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        tensors = _nested_tensors([*args, *kwargs.values()])
        known = all(isinstance(tensor, cls) and tensor.is_current() for tensor in tensors)
        if known and name in _READS:
            return func(tensors[0].host())
        if known and name == "nonzero" and not kwargs:
            mask, count = tensors[0].device_tensor, int(tensors[0].host().count_nonzero())
            if mask.dtype is torch.bool and mask.dim() == 1:
                return true_positions(mask, count)[:, None]
        result = func(*_replaced(args, device_tensor), **_replaced(kwargs, device_tensor))
        if not known or name not in _MIRRORED or not isinstance(result, Tensor):
            return result

        def on_cpu(value: Any) -> Any:
            if isinstance(value, cls):
                return value.host()
            names_device = isinstance(value, torch.device) or (name == "to" and type(value) in (str, int))
            return torch.device("cpu") if names_device else value

        return cls.of(result, lambda: func(*_replaced(args, on_cpu), **_replaced(kwargs, on_cpu)))


def device_tensor(value: Any) -> Any:
    """Returns the device tensor of a mirrored tensor; returns any other value unchanged."""
    return value.device_tensor if isinstance(value, MirroredTensor) else value


def host_copy(tensor: Tensor) -> Tensor | None:
    """Returns the CPU copy of a mirrored tensor, or None if the tensor is not mirrored or has been modified."""
    return tensor.host() if isinstance(tensor, MirroredTensor) and tensor.is_current() else None


def _replaced(value: Any, function: Callable[[Any], Any]) -> Any:
    """Applies `function` to every item of nested lists, tuples and dicts; returns the results in the same structure."""
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, function) for item in value)
    if type(value) is dict:
        return {key: _replaced(item, function) for key, item in value.items()}
    return function(value)


def _nested_tensors(value: Any) -> list[Any]:
    """Returns all tensors in nested lists, tuples and dicts."""
    tensors: list[Any] = []
    _replaced(value, lambda item: tensors.append(item) if isinstance(item, Tensor) else None)
    return tensors


_RAW_READS = frozenset(("tolist", "numpy", "__array__", "__dlpack__", "data_ptr", "storage"))
"""Names of methods that read the memory of a tensor without calling an operation that a dispatch mode can intercept."""


@contextmanager
def reads_reported(report: Callable[[str], None]) -> Iterator[None]:
    """Context manager that reports calls to methods that read the values of a tensor without using the dispatcher.

    The methods are replaced temporarily. A `TorchFunctionMode` is not used, because it disables the fast path of
    nn.MultiheadAttention, and the model would then run different operations.

    Args:
        report: Called with a description of each call.
    """
    own = vars(Tensor)

    def wrapped(name: str) -> Callable[..., Any]:
        method = getattr(Tensor, name)

        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            report(f"the model calls Tensor.{name}")
            return method(tensor, *args, **kwargs)

        return call

    with _PATCH_LOCK:
        originals = {name: own.get(name) for name in _RAW_READS}
        try:
            for name in originals:
                setattr(Tensor, name, wrapped(name))
            yield
        finally:
            for name, method in originals.items():
                if method is None:
                    delattr(Tensor, name)
                else:
                    setattr(Tensor, name, method)


def true_positions(mask: Tensor, count: int) -> Tensor:
    """Returns the positions of the true elements in ascending order, like `nonzero` but without waiting for the device.

    Args:
        mask: Boolean, (length,).
        count: Number of true elements.

    Returns:
        The positions, (count,).
    """
    positions = torch.arange(len(mask), device=mask.device)
    return positions.masked_fill(mask.logical_not(), len(mask)).sort().values[:count]


class TensorPack:
    """Several tensors in one byte buffer on the CPU, so that a single copy moves all of them to a device.

    Tensors with the widest elements come first, so that all tensors are aligned without padding.

    Args:
        tensors: The tensors to copy into the buffer.
        pin: Whether to allocate pinned memory, from which a GPU can copy asynchronously.
    """

    def __init__(self, tensors: Sequence[Tensor], *, pin: bool):
        self._specs = [(tensor.dtype, tensor.shape) for tensor in tensors]
        self._starts, end = [0] * len(tensors), 0
        for index in sorted(range(len(tensors)), key=lambda index: -tensors[index].itemsize):
            self._starts[index], end = end, end + tensors[index].nbytes
        self.nbytes = end
        """Size of the buffer in bytes."""
        self.buffer = torch.empty(end, dtype=torch.uint8, pin_memory=pin)
        """The buffer, which contains the bytes of all tensors."""
        for view, tensor in zip(self.views(self.buffer), tensors, strict=True):
            view.copy_(tensor)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Returns the tensors as views of a copy of the buffer.

        Args:
            buffer: A byte tensor, on any device, that begins with the content of the attribute `buffer`.
        """
        return [
            buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for start, (dtype, shape) in zip(self._starts, self._specs, strict=True)
        ]


ANSWERS = "answers"
"""Key of the mask that marks the positions with a row in f, (N, length) or (N, sequences per example, length).

Only the batches of models that may have several rows of f per example contain this key."""


def padding_mask(batch: ModelInput) -> Tensor | None:
    """Returns the batch's `attention_mask` as a bool tensor (N, R), or None if the batch contains no such mask.

    The mask is False for padding. R is the total number of positions in all sequences of an example.
    """
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask.bool().flatten(1) if isinstance(mask, Tensor) and mask.dim() > 1 else None


def rows_per_example(batch: ModelInput) -> list[int] | None:
    """Returns the number of rows of f for each example, or None if the batch does not contain the key `ANSWERS`."""
    answers = batch.get(ANSWERS) if isinstance(batch, Mapping) else None
    return answers.flatten(1).sum(1).tolist() if isinstance(answers, Tensor) and answers.dim() > 1 else None


def answer_positions(batch: ModelInput, count: int) -> tuple[Tensor, Tensor]:
    """Returns, for each row of f, the index of its example and the token at the next position, which the row predicts.

    Args:
        batch: A batch with several rows per example.
        count: Number of rows of f, P.

    Returns:
        Indices of the examples, (P,), and tokens, (P,).
    """
    assert isinstance(batch, Mapping)
    ids, answers = device_tensor(batch["input_ids"]), device_tensor(batch[ANSWERS])
    positions = true_positions(answers.bool().flatten(), count)
    return positions // answers[0].numel(), ids.roll(-1, dims=-1).flatten()[positions]


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
            raise KfacpackError(f"parameter {name!r} is not initialised; load or initialise the model first")
        if parameter.is_inference():
            problem = "was created in torch.inference_mode and cannot be differentiated"
            raise KfacpackError(f"parameter {name!r} {problem}; load the model outside of inference mode")
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
    """Returns a zero tensor in at least float32 for each parameter: the task vector τ at the start of training."""
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

    A parameter with several names (tied weights) can be selected by any of them and is returned under its first name.

    Args:
        model: Module to select from.
        params: Names or fnmatch patterns; None selects all parameters that are not frozen.
        frozen: fnmatch patterns of the parameters to leave out if `params` is None.

    Returns:
        The parameters by name, in state-dict order.

    Raises:
        KfacpackError: If no parameter is selected, a pattern matches no parameter, or the module is sharded.
    """
    require_unsharded(model)
    named: dict[str, Tensor] = {
        name: p
        for name, p in model.named_parameters(remove_duplicate=False)
        if is_lazy(p) or (p.is_floating_point() and p.numel())
    }
    if not named:
        raise KfacpackError("the model has no floating-point parameters")
    first: dict[int, str] = {}
    for name, parameter in named.items():
        first.setdefault(id(parameter), name)
    if params is None:
        excluded = tuple(frozen)
        free = {name: p for name, p in named.items() if not any(fnmatchcase(name, pattern) for pattern in excluded)}
        if not free:
            raise KfacpackError("every parameter of the model is frozen; select some of them with --params (params)")
        return {name: p for name, p in free.items() if first[id(p)] == name}
    patterns = [params] if isinstance(params, str) else list(params)
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise KfacpackError(f"params {patterns}: expected one or more parameter names or patterns, as strings")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise KfacpackError(f"no parameter matches {pattern!r}; parameters of the model: {abbreviate(named, 3)}")
    chosen = {first[id(p)] for name, p in named.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}
    return {name: p for name, p in named.items() if name in chosen}


def require_unsharded(model: nn.Module) -> None:
    """Rejects a module whose parameters are divided among processes.

    In such a module, each process holds only its own part of a parameter. Curvature and tangents would be computed for
    this part alone, and the parts in other processes would be silently ignored.

    Args:
        model: Module whose parameters are checked.

    Raises:
        KfacpackError: If the module is wrapped by FSDP, or a parameter is a `DTensor` (FSDP2, tensor parallelism).
    """
    remedy = (
        "Each process needs the whole model. Use data parallelism without sharding; to save memory, use --offload, "
        '--micro-batch-size or compressed bundles (see "A model that does not fit" in docs/how-to/several-gpus.md)'
    )
    # Neither class exists in a process that has not imported its module, and importing them takes seconds.
    wrapper: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    if any(isinstance(module, wrapper) for module in model.modules()):
        problem = "a module is wrapped by FullyShardedDataParallel, which shards parameters; expected whole parameters"
        raise KfacpackError(f"{problem}. {remedy}")
    sharded: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    for name, parameter in model.named_parameters():
        if isinstance(parameter, sharded):
            placements = ", ".join(map(str, parameter.placements))
            actual = f"a DTensor with placements {placements} (number of processes: {parameter.device_mesh.size()})"
            shape = list(parameter.shape)
            raise KfacpackError(f"parameter {name!r}: expected a whole tensor of shape {shape}, got {actual}. {remedy}")


def at_least_float32(tensor: Tensor) -> Tensor:
    """Converts a half-precision tensor to float32, because half precision would round away small changes in f."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
