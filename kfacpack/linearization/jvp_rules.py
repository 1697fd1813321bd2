"""Tangent rules for single operations.

Matrix products and convolutions have a rule because torch's forward-mode derivative does redundant work; fused
attention kernels have one because torch has no forward-mode derivative for them.

The rules in `GRAPHLESS_RULES` save the time to set up torch's forward mode and, for layer norm, a dozen operations.
They are used in passes that keep no graph. In passes that keep one, tensors need no more memory, but the rules change
the order in which memory is allocated, and the heap of glibc fragments more: on ViT-B/32, the peak resident memory of
a step rises from 1.15 to 1.31 of a plain step. With MALLOC_MMAP_THRESHOLD_=262144, which bypasses the heap, it is 1.01
with and without these rules.

A rule is called with the operation, a function that returns the tangent of a tensor (None for zero), and the arguments
of the operation, of which at least one has a tangent. It returns the result of the operation, and the tangent of that
result or of its first part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kfacpack._torch import attention_operators, bound_arguments, softmax_backward, unsafe_view_operator
from kfacpack.errors import KfacpackError

TangentOf = Callable[[Tensor], Tensor | None]
JvpRule = Callable[..., tuple[Any, Tensor]]

aten = torch.ops.aten


def product(operation: Any, tangent_of: TangentOf, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Computes ab and d(ab) = da b + a db, for a (..., n, k) and b (..., k, m)."""
    return operation(a, b), _product_tangent(tangent_of, None, a, b)


def added_product(
    operation: Any, tangent_of: TangentOf, start: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> tuple[Tensor, Tensor]:
    """Computes β start + α ab, and its tangent."""
    out = operation(start, a, b, beta=beta, alpha=alpha)
    d_start = tangent_of(start)
    if d_start is not None:
        d_start = d_start.expand(out.shape) * beta if beta != 1 else d_start.expand(out.shape)
    return out, _product_tangent(tangent_of, d_start, a, b, alpha)


def _product_tangent(tangent_of: TangentOf, start: Tensor | None, a: Tensor, b: Tensor, alpha: float = 1) -> Tensor:
    """Computes start + α (da b + a db); the second product is added in place to the first."""
    da, db = tangent_of(a), tangent_of(b)
    add = torch.addmm if a.dim() == 2 else torch.baddbmm
    total = start
    for left, right in ((da, b), (a, db)):
        if left is None or right is None:
            continue
        if total is None:
            total = left @ right if alpha == 1 else alpha * (left @ right)
        elif total is start:
            total = add(total, left, right, alpha=alpha)
        else:
            total = add(total, left, right, alpha=alpha, out=total)
    assert total is not None
    return total


def convolution(
    operation: Any, tangent_of: TangentOf, x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any
) -> tuple[Tensor, Tensor]:
    """Computes a convolution and its tangent, for x (N, in, ...), weight (out, in / groups, ...) and bias (out)."""
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
    """Computes softmax(s) v with s = scale q kᵀ + mask by a fused kernel, and its tangent by the formula.

    Shapes: q (..., L, D), k and v (..., S, D). With p = softmax(s): dp = p (ds - <p, ds>).

    Raises:
        KfacpackError: If the attention has dropout.
    """
    out = operation(*args, **kwargs)
    arguments = bound_arguments(operation, args, kwargs)
    if arguments.get("dropout_p"):
        raise KfacpackError("attention applies dropout in evaluation mode, so f is random; disable it")
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
    """Computes the sum of a b over pairs of a (..., n, k) and b (..., k, m), without pairs that contain None.

    Each product is added in place to those before it.
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
    """Repeats keys or values that several query heads share (grouped-query attention)."""
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

    The term in parentheses is another layer norm of x. The Jacobian of x̂ is symmetric, so dx̂ is what the backward
    pass computes for the gradient dx. Each takes one pass over the memory. Autograd treats the mean and 1 / std, which
    the operation also returns, as constants.
    """
    out, mean, inverse_std = operation(x, shape, weight, bias, eps)
    dx, d_weight, d_bias = (None if tensor is None else tangent_of(tensor) for tensor in (x, weight, bias))
    tangent: Tensor | None = None
    if dx is not None:
        only_x = [True, False, False]
        tangent = aten.native_layer_norm_backward(dx, x, shape, mean, inverse_std, None, None, only_x)[0]
    if d_weight is not None:
        # Of two terms, the second is added in place, which saves a temporary tensor.
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
    """Computes the GELU of x, and its derivative times dx."""
    return operation(x, approximate=approximate), aten.gelu_backward(tangent_of(x), x, approximate=approximate)


def addition(operation: Any, tangent_of: TangentOf, a: Any, b: Any, *, alpha: float = 1) -> tuple[Tensor, Tensor]:
    """Computes a + α b, with broadcasting, and da + α db."""
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
    """Reshapes x and its tangent, which may have other strides."""
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
"""Rules by operator."""

GRAPHLESS_RULES: dict[Any, JvpRule] = {
    **RULES,
    aten.native_layer_norm.default: layer_norm,
    aten.gelu.default: gelu,
    aten.add.Tensor: addition,
    aten.clone.default: copy,
    unsafe_view_operator(): reshape,
}
"""Rules by operator, for passes that keep no graph."""
