"""Tangents computed alongside a forward pass, operation by operation.

It listens below autograd: there a model is nothing but operations on plain tensors, whatever modules, casts, fused
layers or functions of its own it consists of. Each is computed once, its tangent beside it, and autograd records the
first and knows nothing of the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from kfacpack.errors import KfacpackError
from kfacpack.linear.rules import RULES
from kfacpack.linear.tangents import Tangents


class Follow(TorchDispatchMode):
    def __init__(self, tangents: Tangents) -> None:
        super().__init__()
        self._tangents = tangents

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """To be told that there is nothing to compile here, torch would import its compiler, for seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A view has its owner's tangent, and what is detached has none; autograd will mark the result as which it is.
        if func.is_view:
            return func(*args, **kwargs)
        at = self._tangents.get
        moved = False
        for tensor in _tensors((args, kwargs)):
            if at(tensor) is not None:
                moved = True
            elif isinstance(tensor.grad_fn, BackwardCFunction):
                _refuse_unseen(tensor.grad_fn)
        if not moved:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return self._write(func, args, kwargs)
        if func in RULES:
            out, tangent = RULES[func](func, at, *args, **kwargs)
            self._tangents.put(out if isinstance(out, Tensor) else out[0], tangent)
            return out
        return self._differentiate(func, args, kwargs)

    def _differentiate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """By torch's own forward-mode derivative of this one operation, which gives its result as well."""
        with _forward_mode(func):
            out = func(*_changed(args, self._dual), **_changed(kwargs, self._dual))
            made = [(each, _tangent_of(each)) for each in _tensors(out)]
        for tensor, tangent in made:
            if tangent is not None:
                self._tangents.put(tensor, tangent)
        return out

    def _write(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation that writes to its first argument, and to no other."""
        written = [each for each in func._schema.arguments if each.alias_info and each.alias_info.is_write]
        target = args[0]
        if len(written) != 1 or written[0] is not func._schema.arguments[0] or not isinstance(target, Tensor):
            raise KfacpackError(f"cannot linearise {func}, which writes to more than its first argument")
        if torch.Tag.inplace_view in func.tags:
            tangent = self._tangents.get(target)
            func(*args, **kwargs)
            if tangent is not None and not target._is_view():
                turned = tangent.clone()
                func(turned, *args[1:], **kwargs)
                self._tangents.put(target, turned)
            return target
        with _forward_mode(func):
            dual = self._dual(target, own=True)
            func(dual, *_changed(args[1:], self._dual), **_changed(kwargs, self._dual))
            tangent = _tangent_of(dual)
        self._tangents.put(target, tangent)
        return target

    def _dual(self, tensor: Tensor, own: bool = False) -> Tensor:
        """The same memory, with its tangent, or a copy of that which may be written to (`own`)."""
        tangent = self._tangents.get(tensor)
        if tangent is None:
            return tensor.detach() if own else tensor
        return forward_ad.make_dual(tensor.detach(), tangent.clone() if own else tangent)


@contextmanager
def _forward_mode(func: Any) -> Iterator[None]:
    """Where forward-mode works and nothing is recorded, though we are below autograd already."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(enable_reentrant_dispatch())
        stack.enter_context(torch._C._DisableTorchDispatch())
        stack.enter_context(forward_ad.dual_level())
        try:
            yield
        except NotImplementedError as error:
            problem = f"cannot linearise: torch has no forward-mode derivative of {func}, which the model uses"
            raise KfacpackError(f"{problem}. Replace it by operations that have one") from error


def _tangent_of(tensor: Tensor) -> Tensor | None:
    tangent = forward_ad.unpack_dual(tensor).tangent if tensor.is_floating_point() else None
    return None if tangent is None or tangent._is_zerotensor() else tangent


def _refuse_unseen(made_by: Any) -> None:
    """A function of the model's own is followed like everything else, unless it leaves torch or detaches its input."""
    name = made_by.name().removesuffix("Backward")
    problem = f"cannot linearise: what the custom autograd function {name!r} computes is cut off from its input"
    raise KfacpackError(f"{problem} (a detach, numpy, a kernel of its own). Use a plain implementation of it")


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_changed(each, change) for each in value)
    if isinstance(value, dict):
        return {key: _changed(each, change) for key, each in value.items()}
    return value
