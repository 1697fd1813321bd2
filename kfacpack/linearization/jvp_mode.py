"""Computes tangents alongside a forward pass, operation by operation.

The dispatch mode runs below autograd, where a model is a sequence of operations on plain tensors, whatever modules,
casts, fused layers or custom functions it consists of. Every operation is computed once, together with its tangent:
its change along τ. Autograd records the operation and does not see the tangent.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import WeakTensorKeyDictionary

from kfacpack._torch import (
    DispatchMode,
    autocast_disabled,
    base_of,
    forward_ad_below_autograd,
    is_mutating,
    tangent_of_dual,
    writes_first_argument_only,
)
from kfacpack.errors import KfacpackError
from kfacpack.linearization.jvp_rules import GRAPHLESS_RULES, RULES


class TangentMap:
    """Tangents by tensor, kept as long as the tensor is alive.

    Only tensors that own memory have an entry. The tangent of a view is the same view of its base's tangent, so views
    and in-place writes need no bookkeeping.

    Args:
        tangents: Tangents of the parameters, by parameter.
    """

    def __init__(self, tangents: Mapping[Tensor, Tensor] | None = None) -> None:
        self._tangents: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._parameter_ids = {id(tensor) for tensor in tangents or ()}
        for tensor, tangent in (tangents or {}).items():
            self.put(tensor, tangent)

    def get(self, tensor: Tensor) -> Tensor | None:
        """Returns the tangent of a tensor; None if it is zero.

        Tensors that the model computes without gradient are constants for autograd, and also have a zero tangent.
        """
        base = base_of(tensor)
        tangent: Tensor | None = self._tangents.get(base)
        if tangent is None or (torch.is_grad_enabled() and self._is_constant(tensor, base)):
            return None
        if base is tensor:
            return tangent
        return _view_of_tangent(self._with_strides_of(base, tangent), tensor, base)

    def _is_constant(self, tensor: Tensor, base: Tensor) -> bool:
        """Returns whether autograd has no path from the tensor to the parameters; the tensor may be a leaf itself."""
        return not tensor.requires_grad or (base.grad_fn is None and id(base) not in self._parameter_ids)

    def put(self, tensor: Tensor, tangent: Tensor | None) -> None:
        """Sets the tangent of a new or modified tensor; for a view, the corresponding part of its base's tangent."""
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
        # The tangent of another tensor may share this memory (as with a sum with a constant), hence a copy.
        full_tangent = _empty_like(base).zero_() if base_tangent is None else _empty_like(base).copy_(base_tangent)
        part = _view_of_tangent(full_tangent, tensor, base)
        if tangent is None:
            part.zero_()
        else:
            part.copy_(tangent)
        self._tangents[base] = full_tangent

    def _with_strides_of(self, base: Tensor, tangent: Tensor) -> Tensor:
        """Returns the tangent in the memory layout of its tensor; the converted tangent is stored."""
        if tangent.stride() != base.stride():
            self._tangents[base] = tangent = _empty_like(base).copy_(tangent)
        return tangent


def _empty_like(base: Tensor) -> Tensor:
    return torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device=base.device)


def _view_of_tangent(tangent: Tensor, view: Tensor, base: Tensor) -> Tensor:
    if view.dtype != base.dtype or view.is_conj() or view.is_neg():
        raise KfacpackError("cannot linearise a view with another dtype, or a complex tensor; use real floats")
    offset = view.storage_offset() - base.storage_offset() + tangent.storage_offset()
    return tangent.as_strided(view.shape, view.stride(), offset)


class JvpMode(DispatchMode):
    """Dispatch mode that computes the tangent of every operation that runs inside it.

    Args:
        tangents: Tangents of the parameters; those of all other tensors are added.
        keeps_graph: Whether autograd keeps the tensors of the pass for a gradient.
    """

    def __init__(self, tangents: TangentMap, *, keeps_graph: bool) -> None:
        super().__init__()
        self._tangents = tangents
        self._rules = RULES if keeps_graph else GRAPHLESS_RULES
        _warm_up_forward_ad()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A view has its base's tangent, and a detached tensor none; autograd marks the result as either.
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
                raise KfacpackError(f"{problem}. Replace it with operations that have one") from error

    def _nonzero_tangents(self, arguments: Any) -> dict[int, Tensor]:
        """Returns the nonzero tangents, by the id of their tensor."""
        tangents: dict[int, Tensor] = {}
        for tensor in _tensors(arguments):
            if (tangent := self._tangents.get(tensor)) is not None:
                tangents[id(tensor)] = tangent
            else:
                require_tracked(tensor)
        return tangents

    def _differentiate(self, func: Any, args: Any, kwargs: Any, tangents: Mapping[int, Tensor]) -> Any:
        """Computes the result and its tangent by torch's forward-mode derivative of this one operation."""
        with forward_ad_below_autograd():
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
        if not writes_first_argument_only(func) or not isinstance(target, Tensor):
            raise KfacpackError(f"cannot linearise {func}, which writes to more than its first argument")
        # Copied, because it is modified as well.
        tangent = tangents[id(target)].clone() if id(target) in tangents else None
        if torch.Tag.inplace_view in func.tags:
            func(*args, **kwargs)
            if tangent is not None and base_of(target) is target:
                func(tangent, *other_args, **kwargs)
                self._tangents.put(target, tangent)
            return target
        with forward_ad_below_autograd():
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
    """Triggers torch's one-time compilation of some derivatives, which emits a DeprecationWarning of its own."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore", DeprecationWarning)
        forward_ad.make_dual(torch.zeros(1), torch.zeros(1))


def require_tracked(tensor: Tensor) -> None:
    """Checks that a tensor without a tangent is a constant.

    Custom autograd functions are differentiated like other operations, unless they use other libraries or detach their
    input. In that case autograd has a path to the parameters, but the tangent is lost.

    Raises:
        KfacpackError: If a custom autograd function computed the tensor and its tangent was lost.
    """
    producer = base_of(tensor).grad_fn
    constant = torch.is_grad_enabled() and not tensor.requires_grad
    if constant or not isinstance(producer, BackwardCFunction):
        return
    name = producer.name().removesuffix("Backward")
    problem = f"cannot linearise: the output of the custom autograd function {name!r} is detached from its input"
    raise KfacpackError(f"{problem} (by a detach, numpy, or a custom kernel). Use a plain torch implementation of it")


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
