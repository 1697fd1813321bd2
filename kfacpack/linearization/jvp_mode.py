"""Computes tangents alongside a forward pass, operation by operation.

The dispatch mode runs below autograd, where a model is a sequence of operations on plain tensors, whatever modules,
casts, fused layers or custom functions it consists of. Every operation is computed once, together with its tangent,
which is the change in its result along τ (a change in the parameters). Autograd records the operation, but not the
computation of the tangent.

Most tangents come from torch's forward mode. Matrix products and convolutions have rules here because torch's
derivatives do redundant work. Fused attention kernels have rules because torch has no forward-mode derivative for them.

The rules in `GRAPHLESS_RULES` save the setup time of torch's forward mode. They are used in passes that keep no graph.
In passes that keep a graph, these rules would change the order of allocations, and glibc's heap would become more
fragmented: on ViT-B/32, the peak resident memory of a training step would be more than 1.2 times that of a step without
tangents. If a pass may be recorded, layer norm has a rule as well, because torch's derivative of layer norm is compiled
and cannot be recorded.

A rule is called with the operation, a function that returns the tangent of a tensor (None for zero), and the arguments
of the operation, of which at least one has a tangent. It returns the result of the operation and the tangent of the
result. If the operation has several results, only the tangent of the first result is returned.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import WeakTensorKeyDictionary

from kfacpack._torch import (
    DispatchMode,
    attention_operators,
    autocast_disabled,
    base_of,
    bound_arguments,
    forward_ad_below_autograd,
    is_mutating,
    softmax_backward,
    tangent_of_dual,
    unsafe_view_operator,
    written_arguments,
)
from kfacpack.errors import KfacpackError

TangentOf = Callable[[Tensor], Tensor | None]
JvpRule = Callable[..., tuple[Any, Tensor]]

aten = torch.ops.aten


def product(operation: Any, tangent_of: TangentOf, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Computes a b and its tangent da b + a db, where a has shape (..., n, k) and b has shape (..., k, m)."""
    return operation(a, b), _product_tangent(tangent_of, None, a, b)


def added_product(
    operation: Any, tangent_of: TangentOf, start: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> tuple[Tensor, Tensor]:
    """Computes β start + α a b, and its tangent."""
    out = operation(start, a, b, beta=beta, alpha=alpha)
    d_start = tangent_of(start)
    if d_start is not None:
        d_start = d_start.expand(out.shape) * beta if beta != 1 else d_start.expand(out.shape)
    return out, _product_tangent(tangent_of, d_start, a, b, alpha)


def _product_tangent(tangent_of: TangentOf, start: Tensor | None, a: Tensor, b: Tensor, alpha: float = 1) -> Tensor:
    """Computes start + α (da b + a db); the second product is added in place to the first."""
    da, db = tangent_of(a), tangent_of(b)
    multiply, add = (torch.mm, torch.addmm) if a.dim() == 2 else (torch.bmm, torch.baddbmm)
    total = start
    for left, right in ((da, b), (a, db)):
        if left is None or right is None:
            continue
        if total is None:
            total = multiply(left, right) if alpha == 1 else alpha * multiply(left, right)
        elif total is start:
            total = add(total, left, right, alpha=alpha)
        else:
            total = add(total, left, right, alpha=alpha, out=total)
    assert total is not None
    return total


def convolution(
    operation: Any, tangent_of: TangentOf, x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any
) -> tuple[Tensor, Tensor]:
    """Computes a convolution and its tangent.

    The shapes are (N, in, ...) for x, (out, in / groups, ...) for the weight and (out,) for the bias.
    """
    out: Tensor = operation(x, weight, bias, *geometry)
    dx, d_weight = tangent_of(x), tangent_of(weight)
    d_bias = None if bias is None else tangent_of(bias)
    terms = []
    if d_weight is not None:
        terms.append(operation(x, d_weight, d_bias, *geometry))
    elif d_bias is not None:
        terms.append(d_bias.view(-1, *[1] * (out.dim() - 2)).expand(out.shape))
    if dx is not None:
        terms.append(operation(dx, weight, None, *geometry))
    return out, terms[0] if len(terms) == 1 else terms[1].add_(terms[0])


def attention(operation: Any, tangent_of: TangentOf, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
    """Computes softmax(s) v with a fused kernel, and its tangent with separate operations; s = scale q kᵀ + mask.

    q has shape (..., L, D); k and v have shape (..., S, D). The tangent of p = softmax(s) is dp = p (ds - <p, ds>).

    Raises:
        KfacpackError: If the attention has dropout.
    """
    out = operation(*args, **kwargs)
    arguments = bound_arguments(operation, args, kwargs)
    if arguments.get("dropout_p"):
        raise KfacpackError("attention applies dropout in evaluation mode, so f is random; disable dropout")
    q, k, v = arguments["query"], arguments["key"], arguments["value"]
    mask = arguments.get("attn_mask", arguments.get("attn_bias"))
    scale = q.shape[-1] ** -0.5 if arguments.get("scale") is None else arguments["scale"]
    dq, dk, dv = tangent_of(q), *(_repeat_heads(tangent_of(tensor), q) for tensor in (k, v))
    k, v = (_repeat_heads(tensor, q) for tensor in (k, v))

    scores = (q * scale) @ k.mT
    if mask is not None:
        scores = scores + mask
    if arguments.get("is_causal"):
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, -torch.inf)
    p = torch.softmax(scores, dim=-1)
    del scores
    if mask is not None:
        p = p.nan_to_num()  # the kernels return zero for a position whose keys are all masked
    ds = _sum_of_products((dq, k.mT), (q, None if dk is None else dk.mT))
    if ds is not None:
        ds.mul_(scale)
    if mask is not None and (d_mask := tangent_of(mask)) is not None:
        ds = d_mask.expand(p.shape) if ds is None else ds.add_(d_mask)
    # The Jacobian of softmax is symmetric, so dp is what its backward pass computes for the gradient ds.
    dp = None if ds is None else softmax_backward(ds, p)
    del ds
    tangent = _sum_of_products((p, dv), (dp, v))
    assert tangent is not None
    return out, tangent


def _sum_of_products(*pairs: tuple[Tensor | None, Tensor | None]) -> Tensor | None:
    """Computes the sum of the products a b over pairs (a, b) with shapes (..., n, k) and (..., k, m).

    Pairs that contain None are skipped. Each product is added in place to the sum of the previous products.
    """
    total: Tensor | None = None
    for a, b in pairs:
        if a is None or b is None:
            continue
        if total is None:
            total = a @ b
        else:
            total.flatten(0, -3).baddbmm_(a.flatten(0, -3), b.flatten(0, -3))
    return total


def _repeat_heads(tensor: Any, q: Tensor) -> Any:
    """Repeats keys or values that are shared by several query heads (grouped-query attention)."""
    if tensor is None or tensor.shape[-3] == q.shape[-3]:
        return tensor
    return tensor.repeat_interleave(q.shape[-3] // tensor.shape[-3], dim=-3)


def layer_norm(
    operation: Any,
    tangent_of: TangentOf,
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Any, Tensor]:
    """Computes y = w x̂ + b with x̂ = (x - mean) / std over the last dimensions, and dy = w dx̂ + (dw x̂ + db).

    The term in parentheses is another layer norm of x. The Jacobian of x̂ is symmetric, so dx̂ is the result
    of the backward pass for the gradient dx. Each term takes one pass over the memory. Autograd treats the mean and
    1 / std, which the operation also returns, as constants.
    """
    out, mean, inverse_std = operation(x, shape, weight, bias, eps)
    dx, d_weight, d_bias = (None if tensor is None else tangent_of(tensor) for tensor in (x, weight, bias))
    tangent: Tensor | None = None
    if dx is not None:
        only_x = [True, False, False]
        tangent = aten.native_layer_norm_backward(dx, x, shape, mean, inverse_std, None, None, only_x)[0]
    if d_weight is not None:
        # If there are two terms, one is added to the other in place, which saves a temporary tensor.
        affine = operation(x, shape, d_weight, d_bias, eps)[0]
        if tangent is not None:
            affine = affine.add_(tangent) if weight is None else affine.addcmul_(tangent, weight)
        return (out, mean, inverse_std), affine
    if tangent is not None and weight is not None:
        tangent.mul_(weight)
    if d_bias is not None:
        tangent = d_bias.expand(out.shape) if tangent is None else tangent.add_(d_bias)
    assert tangent is not None
    return (out, mean, inverse_std), tangent.to(out.dtype)


def gelu(operation: Any, tangent_of: TangentOf, x: Tensor, *, approximate: str = "none") -> tuple[Tensor, Tensor]:
    """Computes the GELU of x and its tangent, which is the derivative of the GELU times dx."""
    return operation(x, approximate=approximate), aten.gelu_backward(tangent_of(x), x, approximate=approximate)


def addition(operation: Any, tangent_of: TangentOf, a: Any, b: Any, *, alpha: float = 1) -> tuple[Tensor, Tensor]:
    """Computes a + α b, with broadcasting, and its tangent da + α db."""
    out: Tensor = operation(a, b, alpha=alpha)
    da, db = (tangent_of(value) if isinstance(value, Tensor) else None for value in (a, b))
    if db is not None:
        db = db if alpha == 1 else alpha * db
    tangent = da + db if da is not None and db is not None else db if da is None else da
    assert tangent is not None
    return out, tangent.to(out.dtype).expand(out.shape)


def copy(operation: Any, tangent_of: TangentOf, x: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Copies x and its tangent."""
    return operation(x, **kwargs), operation(tangent_of(x), **kwargs)


def reshape(operation: Any, tangent_of: TangentOf, x: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Reshapes x and its tangent, whose strides may differ from those of x."""
    tangent = tangent_of(x)
    assert tangent is not None
    return operation(x, shape), tangent.reshape(shape)


RULES: dict[Any, JvpRule] = {
    aten.mm.default: product,
    aten.bmm.default: product,
    aten.addmm.default: added_product,
    aten.baddbmm.default: added_product,
    aten.convolution.default: convolution,
    **dict.fromkeys(attention_operators(), attention),
}
"""Rules by operator, for forward passes that keep a graph and are never recorded."""

TRACEABLE_RULES: dict[Any, JvpRule] = {**RULES, aten.native_layer_norm.default: layer_norm}
"""Rules by operator, for forward passes that keep a graph and may be recorded."""

GRAPHLESS_RULES: dict[Any, JvpRule] = {
    **TRACEABLE_RULES,
    aten.gelu.default: gelu,
    aten.add.Tensor: addition,
    aten.clone.default: copy,
    unsafe_view_operator(): reshape,
}
"""Rules by operator, for forward passes that keep no graph."""


class TangentMap:
    """Maps tensors to their tangents. An entry is kept as long as its tensor is alive.

    Only tensors that own memory have an entry. The tangent of a view is the same view of its base's tangent, so views
    need no entries of their own, even if they are written to.

    Args:
        tangents: Tangents of the parameters, by parameter.
    """

    def __init__(self, tangents: Mapping[Tensor, Tensor] | None = None) -> None:
        self._tangents: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._parameter_ids = {id(tensor) for tensor in tangents or ()}
        for tensor, tangent in (tangents or {}).items():
            self.put(tensor, tangent)

    def get(self, tensor: Tensor) -> Tensor | None:
        """Returns the tangent of a tensor; None if the tangent is zero.

        Tensors that the model computes without gradients are constants for autograd, and therefore have a zero tangent.
        """
        base = base_of(tensor)
        tangent: Tensor | None = self._tangents.get(base)
        if tangent is None or (torch.is_grad_enabled() and self._is_constant(tensor, base)):
            return None
        if base is tensor:
            return tangent
        return _view_of_tangent(self._with_strides_of(base, tangent), tensor, base)

    def _is_constant(self, tensor: Tensor, base: Tensor) -> bool:
        """Returns whether autograd has no path from the tensor to a parameter.

        Leaves that are not parameters are constants, even if they require a gradient.
        """
        return not tensor.requires_grad or (base.grad_fn is None and id(base) not in self._parameter_ids)

    def put(self, tensor: Tensor, tangent: Tensor | None) -> None:
        """Sets the tangent of a tensor. For a view, sets the corresponding part of the tangent of its base."""
        base = base_of(tensor)
        if base is tensor:
            if tangent is not None:
                self._tangents[tensor] = tangent
            else:
                self._tangents.pop(tensor, None)
            return
        base_tangent = self._tangents.get(base)
        if base_tangent is None and tangent is None:
            return
        # Copied, because the tangent of another tensor may share this memory, for example after adding a constant.
        full_tangent = _empty_like(base).zero_() if base_tangent is None else _empty_like(base).copy_(base_tangent)
        part = _view_of_tangent(full_tangent, tensor, base)
        if tangent is None:
            part.zero_()
        else:
            part.copy_(tangent)
        self._tangents[base] = full_tangent

    def _with_strides_of(self, base: Tensor, tangent: Tensor) -> Tensor:
        """Returns the tangent with the strides of its tensor. A tangent with other strides is converted and stored."""
        if tangent.stride() != base.stride():
            self._tangents[base] = tangent = _empty_like(base).copy_(tangent)
        return tangent


def _empty_like(base: Tensor) -> Tensor:
    return torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device=base.device)


def _view_of_tangent(tangent: Tensor, view: Tensor, base: Tensor) -> Tensor:
    if view.dtype != base.dtype or view.is_conj() or view.is_neg():
        raise KfacpackError(
            "cannot linearise a complex tensor, or a view whose dtype differs from the dtype of its base; "
            "use real floating-point tensors"
        )
    offset = view.storage_offset() - base.storage_offset() + tangent.storage_offset()
    return tangent.as_strided(view.shape, view.stride(), offset)


class JvpMode(DispatchMode):
    """Dispatch mode that computes the tangent of every operation that runs inside it.

    Args:
        tangents: Tangents of the parameters. The tangents of all other tensors are added to this map.
        keeps_graph: Whether autograd saves the tensors of the forward pass for a backward pass.
        traceable: Whether forward passes of this model may be recorded.
        recorded: Whether an enclosing dispatch mode records all operations, including those that compute derivatives.
    """

    def __init__(
        self, tangents: TangentMap, *, keeps_graph: bool, traceable: bool = True, recorded: bool = False
    ) -> None:
        super().__init__()
        self._tangents = tangents
        self._recorded = recorded
        self._rules = GRAPHLESS_RULES if not keeps_graph else TRACEABLE_RULES if traceable else RULES
        _warm_up_forward_ad()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # The result needs no entry: `TangentMap.get` finds the tangent of a view through its base, and recognises a
        # detached tensor as a constant.
        if func.is_view:
            return func(*args, **kwargs)
        tangents = self._nonzero_tangents((args, kwargs))
        if not tangents:
            return func(*args, **kwargs)
        with autocast_disabled():  # autocast was applied before the operation was dispatched here
            if func in self._rules:
                out, tangent = self._rules[func](func, lambda tensor: tangents.get(id(tensor)), *args, **kwargs)
                self._tangents.put(out if isinstance(out, Tensor) else out[0], tangent)
                return out
            try:
                if is_mutating(func):
                    return self._write(func, args, kwargs, tangents)
                return self._differentiate(func, args, kwargs, tangents)
            except NotImplementedError as error:
                problem = f"cannot linearise: torch has no forward-mode derivative of {func}, which the model uses"
                raise KfacpackError(f"{problem}. Replace it with operations that have such a derivative") from error

    def _nonzero_tangents(self, arguments: Any) -> dict[int, Tensor]:
        """Returns the nonzero tangents of all tensors in the arguments, by the id of the tensor."""
        tangents: dict[int, Tensor] = {}
        for tensor in _tensors(arguments):
            if (tangent := self._tangents.get(tensor)) is not None:
                tangents[id(tensor)] = tangent
            else:
                require_tracked(tensor)
        return tangents

    def _differentiate(self, func: Any, args: Any, kwargs: Any, tangents: Mapping[int, Tensor]) -> Any:
        """Computes the result of one operation and its tangent with torch's forward-mode derivative."""
        with forward_ad_below_autograd(visible=self._recorded):
            args, kwargs = _duals((args, kwargs), tangents)
            out = func(*args, **kwargs)
            pairs = [(tensor, tangent_of_dual(tensor)) for tensor in _tensors(out)]
        for tensor, tangent in pairs:
            if tangent is not None:
                self._tangents.put(tensor, tangent)
        return out

    def _write(self, func: Any, args: Any, kwargs: Any, tangents: Mapping[int, Tensor]) -> Any:
        """Runs an operation that writes to its first argument, and updates the tangent of that argument."""
        target, *other_args = args
        if any(tensor is not target for tensor in written_arguments(func, args, kwargs)):
            problem = f"cannot linearise: {func} writes to an argument other than the first"
            raise KfacpackError(f"{problem}. Replace this operation with one that does not write to its arguments")
        # The tangent is copied, because the operation modifies it as well.
        tangent = tangents[id(target)].clone() if id(target) in tangents else None
        if torch.Tag.inplace_view in func.tags:
            func(*args, **kwargs)
            if tangent is not None and base_of(target) is target:
                func(tangent, *other_args, **kwargs)
                self._tangents.put(target, tangent)
            return target
        with forward_ad_below_autograd(visible=self._recorded):
            dual = target.detach()
            if tangent is not None:
                dual = forward_ad.make_dual(dual, tangent)
            other_args, kwargs = _duals((other_args, kwargs), tangents)
            func(dual, *other_args, **kwargs)
            tangent = tangent_of_dual(dual)
        self._tangents.put(target, tangent)
        return target


@cache
def _warm_up_forward_ad() -> None:
    """Triggers torch's one-time compilation of some derivatives, and suppresses the DeprecationWarning it issues."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore", DeprecationWarning)
        forward_ad.make_dual(torch.zeros(1), torch.zeros(1))


def require_tracked(tensor: Tensor) -> None:
    """Checks that a tensor without a tangent is a constant.

    Custom autograd functions are differentiated like other operations, unless they use other libraries or detach their
    input. In that case, autograd has a path to the parameters, but the tangent is lost.

    Raises:
        KfacpackError: If a custom autograd function computed the tensor and the tangent was lost.
    """
    producer = base_of(tensor).grad_fn
    constant = torch.is_grad_enabled() and not tensor.requires_grad
    if constant or not isinstance(producer, BackwardCFunction):
        return
    name = producer.name().removesuffix("Backward")
    problem = f"cannot linearise: the output of the custom autograd function {name!r} is detached from its input"
    raise KfacpackError(f"{problem} (by detach, numpy or a custom kernel). Use a plain torch implementation")


def _tensors(value: Any) -> Iterable[Tensor]:
    """Yields all tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _duals(value: Any, tangents: Mapping[int, Tensor]) -> Any:
    """Returns the arguments, with tensors that have a tangent replaced by dual tensors."""
    if isinstance(value, Tensor):
        return forward_ad.make_dual(value.detach(), tangents[id(value)]) if id(value) in tangents else value
    if isinstance(value, (list, tuple)):
        return type(value)(_duals(item, tangents) for item in value)
    if isinstance(value, dict):
        return {key: _duals(item, tangents) for key, item in value.items()}
    return value
