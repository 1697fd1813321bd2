"""The tangents of the tensors of one forward pass: of each, by how much it changes when the parameters move along τ.

Tangents computed alongside a forward pass, operation by operation.

It listens below autograd: there a model is nothing but operations on plain tensors, whatever modules, casts, fused
layers or functions of its own it consists of. Each is computed once, its tangent beside it, and autograd records the
first and knows nothing of the second.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from kfacpack.errors import KfacpackError
from kfacpack.linearization.jvp_rules import RULES


class TangentMap:
    """One for each tensor that owns memory, let go with the tensor. A view's is the same view of its owner's.

    So views, parts and whatever is written into them need no bookkeeping.
    """

    def __init__(self, of: Mapping[Tensor, Tensor] | None = None) -> None:
        """`of` the parameters: where the tangents of all others come from."""
        self._of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._starts = {id(tensor) for tensor in of or ()}
        for tensor, tangent in (of or {}).items():
            self.put(tensor, tangent)

    def get(self, tensor: Tensor) -> Tensor | None:
        """None stands for zero. What the model computes without gradient is a constant to its gradient, and to us."""
        owner = base_of(tensor)
        found: Tensor | None = self._of.get(owner)
        if found is None or (torch.is_grad_enabled() and self._cut_off(tensor, owner)):
            return None
        if owner is tensor:
            return found
        return _view_of_tangent(self._laid_out(owner, found), tensor, owner)

    def _cut_off(self, tensor: Tensor, owner: Tensor) -> bool:
        """Whether autograd knows of no way from it to the parameters, be it that it was made to start a graph anew."""
        return not tensor.requires_grad or (owner.grad_fn is None and id(owner) not in self._starts)

    def put(self, tensor: Tensor, tangent: Tensor | None) -> None:
        """For a new tensor, or for one that was written to; a view's goes into its owner's."""
        if not tensor._is_view():
            if tangent is not None:
                self._of[tensor] = tangent
            else:
                self._of.pop(tensor, None)
            return
        owner = tensor._base
        assert owner is not None
        found = self._of.get(owner)
        if found is None and tangent is None:
            return
        # Another tensor's tangent may share this memory (a sum with a constant has the same one), hence a copy.
        whole = _like(owner).zero_() if found is None else _like(owner).copy_(found)
        part = _view_of_tangent(whole, tensor, owner)
        if tangent is None:
            part.zero_()
        else:
            part.copy_(tangent)
        self._of[owner] = whole

    def _laid_out(self, owner: Tensor, tangent: Tensor) -> Tensor:
        """In memory as its owner is, from now on."""
        if tangent.stride() != owner.stride():
            self._of[owner] = tangent = _like(owner).copy_(tangent)
        return tangent


def base_of(tensor: Tensor) -> Tensor:
    """Itself, or what it is a view of."""
    base = tensor._base if tensor._is_view() else None
    return tensor if base is None else base


def _like(owner: Tensor) -> Tensor:
    return torch.empty_strided(owner.shape, owner.stride(), dtype=owner.dtype, device=owner.device)


def _view_of_tangent(tangent: Tensor, view: Tensor, owner: Tensor) -> Tensor:
    if view.dtype != owner.dtype or view.is_conj() or view.is_neg():
        raise KfacpackError("cannot linearise a view as another type, or of complex numbers; use real ones throughout")
    offset = view.storage_offset() - owner.storage_offset() + tangent.storage_offset()
    return tangent.as_strided(view.shape, view.stride(), offset)


class JvpMode(TorchDispatchMode):
    def __init__(self, tangents: TangentMap) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tangents = tangents
        _warm_up_forward_ad()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """To be told that there is nothing to compile here, torch would import its compiler, for seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A view has its owner's tangent, and what is detached has none; autograd will mark the result as which it is.
        if func.is_view:
            return func(*args, **kwargs)
        tangents = self._tangents_among((args, kwargs))
        if not tangents:
            return func(*args, **kwargs)
        with torch._C._DisableAutocast():  # which has had its say when it came to this operation
            if func._schema.is_mutable:
                return self._write(func, args, kwargs, tangents)
            if func in RULES:
                out, tangent = RULES[func](func, lambda tensor: tangents.get(id(tensor)), *args, **kwargs)
                self._tangents.put(out if isinstance(out, Tensor) else out[0], tangent)
                return out
            return self._differentiate(func, args, kwargs, tangents)

    def _tangents_among(self, arguments: Any) -> dict[int, Tensor]:
        """Those that are not zero, by the identity of the tensor."""
        found: dict[int, Tensor] = {}
        for tensor in _tensors(arguments):
            if (tangent := self._tangents.get(tensor)) is not None:
                found[id(tensor)] = tangent
            else:
                require_tracked(tensor)
        return found

    def _differentiate(self, func: Any, args: Any, kwargs: Any, tangents: Mapping[int, Tensor]) -> Any:
        """By torch's own forward-mode derivative of this one operation, which gives its result as well."""
        with _forward_mode(func):
            args, kwargs = _duals((args, kwargs), tangents)
            out = func(*args, **kwargs)
            made = [(each, _tangent_of(each)) for each in _tensors(out)]
        for tensor, tangent in made:
            if tangent is not None:
                self._tangents.put(tensor, tangent)
        return out

    def _write(self, func: Any, args: Any, kwargs: Any, tangents: Mapping[int, Tensor]) -> Any:
        """An operation that writes to its first argument, and to no other."""
        target, *others = args
        written = [each for each in func._schema.arguments if each.alias_info and each.alias_info.is_write]
        if len(written) != 1 or written[0].name != func._schema.arguments[0].name or not isinstance(target, Tensor):
            raise KfacpackError(f"cannot linearise {func}, which writes to more than its first argument")
        # A copy, since it will be written to as well.
        tangent = tangents[id(target)].clone() if id(target) in tangents else None
        if torch.Tag.inplace_view in func.tags:
            func(*args, **kwargs)
            if tangent is not None and not target._is_view():
                func(tangent, *others, **kwargs)
                self._tangents.put(target, tangent)
            return target
        with _forward_mode(func):
            dual = target.detach()
            if tangent is not None:
                dual = forward_ad.make_dual(dual, tangent)
            others, kwargs = _duals((others, kwargs), tangents)
            func(dual, *others, **kwargs)
            tangent = _tangent_of(dual)
        self._tangents.put(target, tangent)
        return target


@cache
def _warm_up_forward_ad() -> None:
    """The first time, torch compiles some derivatives, and warns of its own doing."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore", DeprecationWarning)
        forward_ad.make_dual(torch.zeros(1), torch.zeros(1))


@contextmanager
def _forward_mode(func: Any) -> Iterator[None]:
    """Where forward-mode works and nothing is recorded, though we are below autograd already."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(enable_reentrant_dispatch())
        stack.enter_context(torch._C._DisableTorchDispatch())
        stack.enter_context(torch._C._DisableAutocast())
        stack.enter_context(forward_ad._set_fwd_grad_enabled(True))  # which functions of the model's own switch off
        stack.enter_context(forward_ad.dual_level())
        try:
            yield
        except NotImplementedError as error:
            problem = f"cannot linearise: torch has no forward-mode derivative of {func}, which the model uses"
            raise KfacpackError(f"{problem}. Replace it by operations that have one") from error


def _tangent_of(tensor: Tensor) -> Tensor | None:
    continuous = tensor.is_floating_point() or tensor.is_complex()
    tangent = forward_ad.unpack_dual(tensor).tangent if continuous else None
    return None if tangent is None or tangent._is_zerotensor() else tangent


def require_tracked(tensor: Tensor) -> None:
    """Refuse a tensor without tangent that autograd knows the way back from: its tangent is not zero, but was lost.

    A function of the model's own is followed like everything else, unless it leaves torch or detaches its input.
    """
    made_by = base_of(tensor).grad_fn
    constant = torch.is_grad_enabled() and not tensor.requires_grad
    if constant or not isinstance(made_by, BackwardCFunction):
        return
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


def _duals(value: Any, tangents: Mapping[int, Tensor]) -> Any:
    """The same arguments, the tensors among them with their tangents."""
    if isinstance(value, Tensor):
        return forward_ad.make_dual(value.detach(), tangents[id(value)]) if id(value) in tangents else value
    if isinstance(value, (list, tuple)):
        return type(value)(_duals(each, tangents) for each in value)
    if isinstance(value, dict):
        return {key: _duals(each, tangents) for key, each in value.items()}
    return value
