"""Wrappers around the private parts of torch that kfacpack uses.

The only other module of the package that may use private names of torch is `_compat`. Each docstring names the private
attribute or function that is used. All functions are tested with torch 2.13: `tests/test_torch_private.py` has one test
per function, and the name of a failing test shows which function must be adapted.

Two features depend on this module. `kp.estimate` reads the arguments that autograd nodes have saved, for which torch
has no public API. `kp.linearize` computes tangents below autograd; if a private name that it needs is missing (see
`missing_jvp_parts`), it falls back to `torch.func.jvp`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import enable_reentrant_dispatch

from kfacpack._compat import require
from kfacpack.errors import KfacpackError

if TYPE_CHECKING:
    from torch.autograd.graph import Node

require("torch")

_NODE_SUFFIX = "Backward0"

RESHAPING_OPERATIONS = frozenset(
    ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "ToCopy", "Alias")
)
"""Names (see `operation_name`) of operations that only rearrange or cast the elements of a tensor."""

VIEW_OPERATIONS = frozenset(("View", "UnsafeView", "ReshapeAlias", "Alias"))
"""Names of operations that change the shape of a tensor and keep the order of its elements."""


# Autograd nodes


def operation_name(node: Node) -> str:
    """Returns the name of an operation, such as `Addmm` or `NativeLayerNorm`.

    `node.name()` is public, but the names that it returns (`AddmmBackward0`) are not. Other overloads
    (`MulBackward1`) and custom functions (`MyFunctionBackward`) keep their full names. Known to work with torch 2.13.
    """
    return node.name().removesuffix(_NODE_SUFFIX)


def accumulated_leaf(node: Node) -> Tensor | None:
    """Returns the leaf tensor that an `AccumulateGrad` node adds gradients to; None for any other node.

    Reads `AccumulateGrad.variable`. Known to work with torch 2.13.
    """
    leaf: Tensor | None = getattr(node, "variable", None)
    return leaf


def saved(node: Node, name: str) -> Any:
    """Returns a value that an operation has saved for its backward pass.

    Reads `node._saved_<name>`. Known to work with torch 2.13.

    Args:
        node: The operation.
        name: Name of the argument in torch's `derivatives.yaml`: `mat1`, `other`, `alpha`, ...

    Raises:
        KfacpackError: If the value is not saved, for example because this version of torch saves other arguments.
    """
    try:
        return getattr(node, f"_saved_{name}")
    except AttributeError as error:
        problem = f"torch {torch.__version__} does not save the argument {name!r} of {node.name()!r}"
        raise KfacpackError(f"{problem}; use torch 2.13, with which kfacpack is tested") from error


def product_scales(node: Node) -> tuple[Any, Any]:
    """Returns the coefficients (alpha, beta) of a matrix product; 1 for a coefficient that the operation does not have.

    Reads `node._saved_alpha` and `node._saved_beta`. Known to work with torch 2.13.
    """
    return getattr(node, "_saved_alpha", 1), getattr(node, "_saved_beta", 1)


def slice_start(node: Node) -> int | None:
    """Returns the start index of a slice operation; returns None for any other operation.

    Reads `node._saved_start`. Known to work with torch 2.13.
    """
    start: int | None = getattr(node, "_saved_start", None)
    return start


def output_count(node: Node) -> int:
    """Returns the number of outputs of an operation.

    Reads `node._input_metadata`: a backward function has one input for each output of the operation.
    Known to work with torch 2.13.
    """
    return len(node._input_metadata)


def output_shape(node: Node, output: int = 0) -> tuple[int, ...]:
    """Returns the shape of one output of an operation.

    Reads `node._input_metadata[output].shape`. Known to work with torch 2.13.
    """
    return tuple(node._input_metadata[output].shape)


def input_shape(node: Node, slot: int) -> tuple[int, ...]:
    """Returns the shape of input number `slot` of an operation; the input must require a gradient.

    Reads `_input_metadata` from the node that computed the input. Known to work with torch 2.13.
    """
    producer, output = node.next_functions[slot]
    assert producer is not None
    return output_shape(producer, output)


def call_backward(node: Node, output: int, slot: int, gradient: Tensor) -> Tensor:
    """Runs the backward function of one operation, outside autograd's engine.

    Calls the node as a function. Known to work with torch 2.13.

    Args:
        node: The operation.
        output: Index of the output to which `gradient` belongs. The gradients of other outputs are taken to be zero.
        slot: Index of the input whose gradient is returned.
        gradient: The gradient with respect to the output.

    Returns:
        The gradient with respect to the input, in the shape of the input.

    Raises:
        KfacpackError: If the operation is a custom autograd function or was created by torch.compile.
    """
    call: Any = node
    if not callable(call):
        problem = f"{node.name()!r} is not a built-in operation of torch, so its backward function cannot be called"
        raise KfacpackError(f"{problem}; use a model without torch.compile and without custom autograd functions")
    gradients: list[Tensor | None] = [None] * output_count(node)
    gradients[output] = gradient
    with torch.no_grad():
        results = call(*gradients)
    result: Tensor = results[slot] if isinstance(results, tuple) else results
    # Broadcasting is undone by autograd's engine, not by the operation itself.
    return result.sum_to_size(input_shape(node, slot))


class ConvolutionArguments(NamedTuple):
    """Arguments of a convolution, as saved by autograd."""

    input: Tensor
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    groups: int


def convolution_arguments(node: Node) -> ConvolutionArguments:
    """Returns the arguments of a convolution; `kernel` is the spatial shape of the weight.

    Reads `_saved_input`, `_saved_weight`, `_saved_stride`, `_saved_padding`, `_saved_dilation`, `_saved_transposed`
    and `_saved_groups`. Known to work with torch 2.13.
    """
    return ConvolutionArguments(
        input=saved(node, "input"),
        kernel=tuple(saved(node, "weight").shape[2:]),
        stride=saved(node, "stride"),
        padding=saved(node, "padding"),
        dilation=saved(node, "dilation"),
        transposed=saved(node, "transposed"),
        groups=saved(node, "groups"),
    )


class EmbeddingArguments(NamedTuple):
    """Arguments of an embedding lookup, as saved by autograd."""

    indices: Tensor
    padding_index: int
    scale_grad_by_freq: bool


def embedding_arguments(node: Node) -> EmbeddingArguments:
    """Returns the arguments of an embedding lookup; `padding_index` is -1 if the embedding has no padding index.

    Reads `_saved_indices`, `_saved_padding_idx` and `_saved_scale_grad_by_freq`. Known to work with torch 2.13.
    """
    index = saved(node, "padding_idx")
    index = index - 2**64 if index >= 2**63 else index  # some versions of torch return -1 as an unsigned number
    return EmbeddingArguments(saved(node, "indices"), index, saved(node, "scale_grad_by_freq"))


def layer_norm_rows(node: Node) -> Tensor:
    """Returns the normalised input of a layer norm, before scaling and shifting.

    Reads `_saved_input`, `_saved_result1` (mean) and `_saved_result2` (1 / sqrt(variance + eps)).
    Known to work with torch 2.13.
    """
    return (saved(node, "input") - saved(node, "result1")) * saved(node, "result2")  # type: ignore[no-any-return]


# Dispatch below autograd


def _lookup(path: str) -> Any:
    """Returns the object at a dotted path that begins with `torch`; None if this torch version does not have it."""
    value: Any = torch
    for name in path.split(".")[1:]:
        value = getattr(value, name, None)
    return value


_JVP_PARTS = (
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch._C._DisableAutocast",
    "torch._C._DisableTorchDispatch",
    "torch._C._autograd._get_current_graph_task_keep_graph",
    "torch.autograd.forward_ad._set_fwd_grad_enabled",
    "torch.Tensor._is_view",
    "torch.Tensor._is_zerotensor",
    "torch.Tensor._base",
    "torch.Tensor._version",
)


def missing_jvp_parts() -> tuple[str, ...]:
    """Returns the private names that the fast path of `kp.linearize` needs but this torch version lacks.

    Looks up the names in `_JVP_PARTS`, and the `_schema` of an operator. Known to work with torch 2.13, where the
    result is empty.
    """
    missing = [path for path in _JVP_PARTS if _lookup(path) is None]
    if not hasattr(torch.ops.aten.mm.default, "_schema"):
        missing.append("torch.ops.OpOverload._schema")
    return tuple(missing)


autocast_disabled: Any = _lookup("torch._C._DisableAutocast")
"""Context manager that disables autocast.

This is an alias of `torch._C._DisableAutocast`, because a wrapper around it would slow down every operation.
Unlike `torch.autocast(enabled=False)`, it also works below autograd's dispatch key. Known to work with torch 2.13.
"""

_dispatch_disabled: Any = _lookup("torch._C._DisableTorchDispatch")
_forward_grad_enabled: Any = _lookup("torch.autograd.forward_ad._set_fwd_grad_enabled")
_below_autograd: Any = _lookup("torch._C._AutoDispatchBelowAutograd") or nullcontext
_graph_is_kept: Any = _lookup("torch._C._autograd._get_current_graph_task_keep_graph")


class DispatchMode(_lookup("torch.utils._python_dispatch.TorchDispatchMode") or object):  # type: ignore[misc]
    """Base class of context managers that intercept operations below autograd, in `__torch_dispatch__`.

    Extends `torch.utils._python_dispatch.TorchDispatchMode`. Overrides `_should_skip_dynamo`, because torch would
    otherwise import its compiler, which takes seconds. Known to work with torch 2.13.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@contextmanager
def forward_ad_below_autograd(*, visible: bool = False) -> Iterator[None]:
    """Enables forward-mode differentiation inside `__torch_dispatch__`, without recording a graph.

    Uses `torch._C._DisableTorchDispatch` and `torch._C._DisableAutocast`. Also uses `forward_ad._set_fwd_grad_enabled`,
    because custom autograd functions disable forward mode while they run. Known to work with torch 2.13.

    Args:
        visible: Whether enclosing dispatch modes also intercept the operations that compute the derivatives.
    """
    with (
        torch.no_grad(),
        enable_reentrant_dispatch(),
        nullcontext() if visible else _dispatch_disabled(),
        autocast_disabled(),
        _forward_grad_enabled(True),
        forward_ad.dual_level(),
    ):
        yield


@contextmanager
def below_autograd(*, bypass: bool = True) -> Iterator[None]:
    """Disables gradients, autocast and inference mode inside this context.

    If `bypass` is True, operations also skip autograd's dispatch key. Uses `torch._C._DisableAutocast` and, where torch
    provides it, `torch._C._AutoDispatchBelowAutograd`. Known to work with torch 2.13.
    """
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        autocast_disabled(),
        _below_autograd() if bypass else nullcontext(),
    ):
        yield


def tangent_of_dual(tensor: Tensor) -> Tensor | None:
    """Returns the tangent of a dual tensor, or None if the tangent is zero. Must be called inside a `dual_level`.

    Reads `Tensor._is_zerotensor()`. Known to work with torch 2.13.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    tangent = forward_ad.unpack_dual(tensor).tangent
    return None if tangent is None or tangent._is_zerotensor() else tangent


def is_mutating(operator: Any) -> bool:
    """Returns whether an operator writes to one of its arguments.

    Reads `OpOverload._schema.is_mutable`. Known to work with torch 2.13.
    """
    return bool(operator._schema.is_mutable)


def written_arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns the arguments of a call that a mutating operator writes to. Lists of tensors are flattened.

    Reads `alias_info` of `OpOverload._schema.arguments`. Known to work with torch 2.13.
    """
    bound = bound_arguments(operator, args, kwargs)
    aliases = {argument.name: argument.alias_info for argument in operator._schema.arguments}
    written = [bound[name] for name, alias in aliases.items() if alias is not None and alias.is_write]
    return [item for value in written for item in (value if isinstance(value, (list, tuple)) else [value])]


def callable_of(value: Any) -> Any:
    """Returns the function that an operator calls. A value that is not an operator is returned unchanged.

    A direct call avoids one Python frame. Reads `OpOverload._op` if available. Known to work with torch 2.13.
    """
    return getattr(value, "_op", value) if isinstance(value, torch._ops.OpOverload) else value


def is_number_read(operator: Any) -> bool:
    """Returns whether an operator is `aten._local_scalar_dense` (`Tensor.item`). Known to work with torch 2.13."""
    return operator is torch.ops.aten._local_scalar_dense.default


def bound_arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by name, with defaults for omitted arguments.

    Reads names and defaults from `OpOverload._schema.arguments`. Known to work with torch 2.13.
    """
    arguments = operator._schema.arguments
    bound = {argument.name: argument.default_value for argument in arguments} | dict(kwargs)
    return bound | {argument.name: value for argument, value in zip(arguments, args, strict=False)}


def attention_operators() -> list[Any]:
    """Returns the fused kernels of scaled dot-product attention, which have no forward-mode derivative.

    Looks up `torch.ops.aten._scaled_dot_product_*` and skips missing kernels. Known to work with torch 2.13.
    """
    kernels = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    packets = [getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}", None) for kernel in kernels]
    return [packet.default for packet in packets if packet is not None]


def softmax_backward(gradient: Tensor, p: Tensor) -> Tensor:
    """Returns the gradient with respect to the input of a softmax over the last dimension: p (g - <p, g>).

    p is the output of the softmax, and g is `gradient`; both have shape (..., n).
    Calls `torch.ops.aten._softmax_backward_data`. Known to work with torch 2.13.
    """
    result: Tensor = torch.ops.aten._softmax_backward_data(gradient, p, -1, p.dtype)
    return result


def unsafe_view_operator() -> Any:
    """Returns the operator that restores the batch dimensions of a matrix product.

    Looks up `torch.ops.aten._unsafe_view`. Known to work with torch 2.13.
    """
    return torch.ops.aten._unsafe_view.default


# Many tensors at once


def add_each(targets: Sequence[Tensor], tensors: Sequence[Tensor], factor: float = 1.0) -> None:
    """Adds `factor` times each tensor to the corresponding target in place, with few kernel launches on a GPU.

    The targets must not overlap. Calls `torch._foreach_add_`. Known to work with torch 2.13.
    """
    if targets:
        torch._foreach_add_(list(targets), list(tensors), alpha=factor)


def copy_each(targets: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copies each tensor to the corresponding target of the same shape, with few kernel launches on a GPU.

    Calls `torch._foreach_copy_`. Known to work with torch 2.13.
    """
    torch._foreach_copy_(list(targets), list(tensors))


def set_to_zero(tensors: Sequence[Tensor]) -> None:
    """Sets all tensors to zero in place, with few kernel launches on a GPU.

    Calls `torch._foreach_zero_`. Known to work with torch 2.13.
    """
    torch._foreach_zero_(list(tensors))


def largest_magnitude(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the largest absolute value in a list of tensors, as a 0-d float32 tensor. NaN and Inf propagate.

    All tensors must be on the same device. Calls `torch._foreach_norm`. Known to work with torch 2.13.
    """
    norms = torch._foreach_norm(list(tensors), float("inf"))
    return torch.stack([norm.float() for norm in norms]).amax()


# Tensors and the state of autograd


def base_of(tensor: Tensor) -> Tensor:
    """Returns the base tensor of a view; returns the tensor itself if it is not a view.

    Reads `Tensor._is_view()` and `Tensor._base`. Known to work with torch 2.13.
    """
    base = tensor._base if tensor._is_view() else None
    return tensor if base is None else base


def memory_address(tensor: Tensor) -> int:
    """Returns the address of the memory that a tensor shares with its views; 0 for a tensor without memory.

    Reads `Tensor._is_zerotensor()`: the zero tangents of forward mode have no memory. Known to work with torch 2.13.
    """
    return 0 if tensor._is_zerotensor() else tensor.untyped_storage().data_ptr()


def tensor_versions(tensors: Iterable[Tensor]) -> list[int]:
    """Returns the version counters of tensors, which every in-place operation increments.

    Reads `Tensor._version`. Known to work with torch 2.13.
    """
    return [tensor._version for tensor in tensors]


def tensor_layouts(tensors: Iterable[Tensor]) -> list[tuple[Any, ...]]:
    """Returns the type, memory layout, dtype and device of each tensor, or only its hooks if the tensor has hooks.

    Reads `Tensor._backward_hooks`, which is None for a tensor without hooks. Known to work with torch 2.13.
    """
    return [
        (type(tensor), tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)
        if tensor._backward_hooks is None
        else (tensor._backward_hooks,)
        for tensor in tensors
    ]


def global_module_hooks() -> list[Mapping[Any, Any]]:
    """Returns the dicts of hooks that apply to all modules.

    Reads the dicts `torch.nn.modules.module._global_*_hooks`. Known to work with torch 2.13.
    """
    return [
        value
        for name, value in vars(torch.nn.modules.module).items()
        if name.startswith("_global_") and name.endswith("hooks") and isinstance(value, dict)
    ]


def backward_retains_graph() -> bool:
    """Returns whether the current backward pass was started with `retain_graph=True`.

    Calls `torch._C._autograd._get_current_graph_task_keep_graph`. If torch does not provide it, returns True, which is
    always safe: the caller then keeps the graph, at the cost of more memory. Known to work with torch 2.13.
    """
    return True if _graph_is_kept is None else bool(_graph_is_kept())


def eager_mode() -> AbstractContextManager[Any]:
    """Returns a context manager that makes functions compiled by `torch.compile` run eagerly.

    Uses `torch.compiler.set_stance` (public since torch 2.6), but only if `torch._dynamo` is already imported:
    importing it takes seconds, and without it nothing is compiled. Known to work with torch 2.13.
    """
    if "torch._dynamo" not in sys.modules or not hasattr(torch.compiler, "set_stance"):
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
