"""Which parameters of a module are meant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kfacpack.errors import KfacpackError


def zeros_for(wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """τ = 0 for these parameters, in float32 at least: where training starts."""
    return {
        name: torch.zeros_like(each, dtype=torch.promote_types(each.dtype, torch.float32), requires_grad=False)
        for name, each in wanted.items()
    }


def choose(model: nn.Module, params: Iterable[str] | str | None, frozen: Iterable[str] = ()) -> dict[str, Tensor]:
    """The parameters that are wanted, in state-dict order: all that are not frozen, or those that patterns name.

    One that has several names (tied weights) goes by the first of them, whichever was asked for.
    """
    named: dict[str, Tensor] = {
        name: p
        for name, p in model.named_parameters(remove_duplicate=False)
        if is_lazy(p) or (p.is_floating_point() and p.numel())
    }
    if not named:
        raise KfacpackError("the model has no parameters")
    first: dict[int, str] = {}
    for name, parameter in named.items():
        first.setdefault(id(parameter), name)
    if params is None:
        left_out = tuple(frozen)
        wanted = {name: p for name, p in named.items() if not any(fnmatchcase(name, each) for each in left_out)}
        if not wanted:
            raise KfacpackError("every parameter of the model is frozen; name those you want")
        return {name: p for name, p in wanted.items() if first[id(p)] == name}
    patterns = [params] if isinstance(params, str) else list(params)
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise KfacpackError(f"params {patterns}: expected names or patterns of parameters, at least one")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            some = ", ".join(list(named)[:3])
            raise KfacpackError(f"no parameter is called {pattern!r}; the model has {len(named)}: {some}, …")
    chosen = {first[id(p)] for name, p in named.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}
    return {name: p for name, p in named.items() if name in chosen}
