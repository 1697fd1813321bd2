"""Tangent rules for single operations.

Matrix products and convolutions have a rule because torch's forward-mode derivative does redundant work; fused
attention kernels have one because torch has no forward-mode derivative for them.

A rule is called with the operation, a function that returns the tangent of a tensor (None for zero), and the arguments
of the operation, of which at least one has a tangent. It returns the result of the operation, and the tangent of that
result or of its first part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kfacpack._torch import attention_operators, bound_arguments
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
    if mask is not None:
        p = p.nan_to_num()  # the kernels return zero for a position whose keys are all masked
    products = [dq @ k.mT if dq is not None else None, q @ dk.mT if dk is not None else None]
    score_tangents = [product.mul_(scale) for product in products if product is not None]
    if mask is not None and (d_mask := tangent_of(mask)) is not None:
        score_tangents.append(d_mask)
    terms = [p @ dv] if dv is not None else []
    if score_tangents:
        ds = sum(score_tangents[1:], start=score_tangents[0]) * p
        ds -= p * ds.sum(-1, keepdim=True)
        terms.append(ds @ v)
    return out, terms[0] if len(terms) == 1 else terms[0].add_(terms[1])


def _repeat_heads(tensor: Any, q: Tensor) -> Any:
    """Repeats keys or values that several query heads share (grouped-query attention)."""
    if tensor is None or tensor.shape[-3] == q.shape[-3]:
        return tensor
    return tensor.repeat_interleave(q.shape[-3] // tensor.shape[-3], dim=-3)


RULES: dict[Any, JvpRule] = {
    aten.mm.default: product,
    aten.bmm.default: product,
    aten.addmm.default: added_product,
    aten.baddbmm.default: added_product,
    aten.convolution.default: convolution,
    **dict.fromkeys(attention_operators(), attention),
}
"""Rules by operator."""
