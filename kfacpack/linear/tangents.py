"""The tangents of the tensors of one forward pass: of each, by how much it changes when the parameters move along τ."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kfacpack.errors import KfacpackError


class Tangents:
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
        owner = owner_of(tensor)
        found: Tensor | None = self._of.get(owner)
        if found is None or (torch.is_grad_enabled() and self._cut_off(tensor, owner)):
            return None
        if owner is tensor:
            return found
        return _viewed(self._laid_out(owner, found), tensor, owner)

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
        part = _viewed(whole, tensor, owner)
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


def owner_of(tensor: Tensor) -> Tensor:
    """Itself, or what it is a view of."""
    base = tensor._base if tensor._is_view() else None
    return tensor if base is None else base


def _like(owner: Tensor) -> Tensor:
    return torch.empty_strided(owner.shape, owner.stride(), dtype=owner.dtype, device=owner.device)


def _viewed(tangent: Tensor, view: Tensor, owner: Tensor) -> Tensor:
    if view.dtype != owner.dtype or view.is_conj() or view.is_neg():
        raise KfacpackError("cannot linearise a view as another type, or of complex numbers; use real ones throughout")
    offset = view.storage_offset() - owner.storage_offset() + tangent.storage_offset()
    return tangent.as_strided(view.shape, view.stride(), offset)
