"""Operations whose tangent has a rule here: products, so that nothing is done twice, and attention, which has no other.

A rule is called with the operation, `at` (the tangent of a tensor, or None for zero) and the operation's arguments. It
gives what the operation gives, and the tangent of that or of its first part. At least one argument has a tangent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kfacpack.errors import KfacpackError

TangentOf = Callable[[Tensor], Tensor | None]
JvpRule = Callable[..., tuple[Any, Tensor]]

aten = torch.ops.aten


def product(operation: Any, at: TangentOf, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a (…, n, k), b (…, k, m): d(ab) = da b + a db, the second term added where the first one lies."""
    return operation(a, b), _product_change(at, None, a, b)


def added_product(
    operation: Any, at: TangentOf, start: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> tuple[Tensor, Tensor]:
    """β start + α ab."""
    out = operation(start, a, b, beta=beta, alpha=alpha)
    d_start = at(start)
    if d_start is not None:
        d_start = d_start.expand(out.shape) * beta if beta != 1 else d_start.expand(out.shape)
    return out, _product_change(at, d_start, a, b, alpha)


def _product_change(at: TangentOf, start: Tensor | None, a: Tensor, b: Tensor, alpha: float = 1) -> Tensor:
    da, db = at(a), at(b)
    add = torch.addmm if a.dim() == 2 else torch.baddbmm
    change = start
    for one, other in ((da, b), (a, db)):
        if one is None or other is None:
            continue
        if change is None:
            change = one @ other if alpha == 1 else alpha * (one @ other)
        elif change is start:
            change = add(change, one, other, alpha=alpha)
        else:
            change = add(change, one, other, alpha=alpha, out=change)
    assert change is not None
    return change


def convolution(
    operation: Any, at: TangentOf, x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any
) -> tuple[Tensor, Tensor]:
    """x (N, in, …), weight (out, in / groups, …), bias (out)."""
    out: Tensor = operation(x, weight, bias, *how)
    dx, d_weight = at(x), at(weight)
    d_bias = None if bias is None else at(bias)
    terms = []
    if d_weight is not None:
        terms.append(operation(x, d_weight, d_bias, *how))
    elif d_bias is not None:
        terms.append(d_bias.view(-1, *[1] * (out.dim() - 2)).expand(out.shape))
    if dx is not None:
        terms.append(operation(dx, weight, None, *how))
    return out, terms[0] if len(terms) == 1 else terms[1].add_(terms[0])


def attention(operation: Any, at: TangentOf, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
    """softmax(s) v with s = scale q kᵀ + mask, by whichever kernel; its tangent by the formula, which no kernel has.

    q (…, L, D), k and v (…, S, D). With p = softmax(s): dp = p (ds - <p, ds>).
    """
    out = operation(*args, **kwargs)
    given = {each.name: each.default_value for each in operation._schema.arguments} | kwargs
    given |= {each.name: value for each, value in zip(operation._schema.arguments, args, strict=False)}
    if given.get("dropout_p"):
        raise KfacpackError("attention has dropout in evaluation mode, so that f is random; switch it off")
    q, k, v = given["query"], given["key"], given["value"]
    mask = given.get("attn_mask", given.get("attn_bias"))
    scale = q.shape[-1] ** -0.5 if given.get("scale") is None else given["scale"]
    dq, dk, dv = at(q), *(_for_each_query(at(each), q) for each in (k, v))
    k, v = (_for_each_query(each, q) for each in (k, v))

    scores = (q * scale) @ k.mT
    if mask is not None:
        scores = scores + mask
    if given.get("is_causal"):
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, -torch.inf)
    p = torch.softmax(scores, dim=-1)
    if mask is not None:
        p = p.nan_to_num()  # a position that may look at nothing sees nothing
    terms = [dq @ k.mT if dq is not None else None, q @ dk.mT if dk is not None else None]
    change = [term.mul_(scale) for term in terms if term is not None]
    if mask is not None and (d_mask := at(mask)) is not None:
        change.append(d_mask)
    found = [p @ dv] if dv is not None else []
    if change:
        ds = sum(change[1:], start=change[0]) * p
        ds -= p * ds.sum(-1, keepdim=True)
        found.append(ds @ v)
    return out, found[0] if len(found) == 1 else found[0].add_(found[1])


def _for_each_query(tensor: Any, q: Tensor) -> Any:
    """Keys or values that several heads share, once for each of these heads."""
    if tensor is None or tensor.shape[-3] == q.shape[-3]:
        return tensor
    return tensor.repeat_interleave(q.shape[-3] // tensor.shape[-3], dim=-3)


_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)

RULES: dict[Any, JvpRule] = {
    aten.mm.default: product,
    aten.bmm.default: product,
    aten.addmm.default: added_product,
    aten.baddbmm.default: added_product,
    aten.convolution.default: convolution,
    **{getattr(aten, name).default: attention for name in _ATTENTION if hasattr(aten, name)},
}
