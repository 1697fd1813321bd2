"""What a batch is to us: a tensor, a tuple or a dict; the arguments of one forward pass.

A model lent for a call: changed for the time of it, and given back as it was.

Which parameters of a module are meant.

In which precision numbers are gone on with that a model gave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kfacpack.errors import KfacpackError, NotFiniteError

ModelInput: TypeAlias = "Tensor | Sequence[Any] | Mapping[str, Any]"
Forward: TypeAlias = Callable[..., Any]


def call_model(forward: Forward, batch: ModelInput) -> Tensor:
    """f, (N, C)."""
    if not isinstance(batch, (Tensor, Mapping, list, tuple)):
        raise KfacpackError(f"a batch must be a tensor, a tuple or a dict of tensors, found {type(batch).__name__}")
    if (sizes := [len(tensor) for tensor in tensors_of(batch) if tensor.dim()]) and not any(sizes):
        raise KfacpackError("the batch has no examples, expected at least one")
    try:
        if isinstance(batch, Tensor):
            f = forward(batch)
        else:
            f = forward(**batch) if isinstance(batch, Mapping) else forward(*batch)
    except TypeError as error:
        hint = "A batch holds the arguments of f, and no labels: ((x,) for x, y in loader) leaves them out"
        raise KfacpackError(f"the model cannot be called with this batch: {error}. {hint}") from error
    if not isinstance(f, Tensor) or f.dim() != 2 or not f.is_floating_point() or 0 in f.shape:
        found = f"{f.dtype} of shape {list(f.shape)}" if isinstance(f, Tensor) else type(f).__name__
        problem = f"expected the model to give f as floats of shape (examples, width), found {found}"
        raise KfacpackError(f"{problem}. With 'forward', choose what f is: forward=lambda x: model(x).pooler_output")
    if not bool(f.detach().isfinite().all()):
        raise NotFiniteError("f has numbers that are not finite; check the inputs, or use another dtype for the model")
    return f


def map_tensors(batch: ModelInput, change: Callable[[Tensor], Tensor]) -> Any:
    """The same batch, each of its tensors changed."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, change) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return tuple(map_tensors(value, change) for value in batch)
    return batch


def tensors_of(batch: ModelInput) -> list[Tensor]:
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(batch, keep)
    return found


def batch_size_of(batch: ModelInput) -> int | None:
    """How many examples there are, if all tensors of a batch agree on it in their first dimension."""
    sizes = {len(tensor) if tensor.dim() else 0 for tensor in tensors_of(batch)}
    return sizes.pop() if len(sizes) == 1 else None


def to_device(batch: ModelInput, device: torch.device) -> Any:
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def padding_mask(batch: ModelInput) -> Tensor | None:
    """(N, R), false where there is only padding: what tokenizers call `attention_mask`, if a batch has one."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None


@contextmanager
def eval_mode(model: nn.Module, wanted: Mapping[str, Tensor]) -> Iterator[None]:
    """In evaluation mode, with gradients for the wanted parameters alone; afterwards all flags are as before."""
    training = [(module, module.training) for module in model.modules()]
    required = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    chosen = {id(parameter) for parameter in wanted.values()}
    for name, parameter in wanted.items():
        if is_lazy(parameter) or parameter.is_meta:
            raise KfacpackError(f"parameter {name!r} has no numbers yet; load or initialise the model first")
        if parameter.is_inference():
            problem = "was made in torch.inference_mode and cannot be differentiated"
            raise KfacpackError(f"parameter {name!r} {problem}; load the model outside of it")
    try:
        model.eval()
        for parameter, _ in required:
            parameter.requires_grad_(id(parameter) in chosen)
        with torch.enable_grad():
            yield
    finally:
        for module, flag in training:
            module.training = flag
        for parameter, flag in required:
            parameter.requires_grad_(flag)


def zeros_like_parameters(wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """τ = 0 for these parameters, in float32 at least: where training starts."""
    return {
        name: torch.zeros_like(each, dtype=torch.promote_types(each.dtype, torch.float32), requires_grad=False)
        for name, each in wanted.items()
    }


def select_parameters(
    model: nn.Module, params: Iterable[str] | str | None, frozen: Iterable[str] = ()
) -> dict[str, Tensor]:
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


def at_least_float32(tensor: Tensor) -> Tensor:
    """In float32 at least: in bfloat16, a small change would vanish beside f."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
