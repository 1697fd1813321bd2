"""What a batch is to us: a tensor, a tuple or a dict; the arguments of one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kfacpack.errors import KfacpackError, NotFiniteError

Batch: TypeAlias = "Tensor | Sequence[Any] | Mapping[str, Any]"
Forward: TypeAlias = Callable[..., Any]


def run(forward: Forward, batch: Batch) -> Tensor:
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


def map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Any:
    """The same batch, each of its tensors changed."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, change) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return tuple(map_tensors(value, change) for value in batch)
    return batch


def tensors_of(batch: Batch) -> list[Tensor]:
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(batch, keep)
    return found


def length(batch: Batch) -> int | None:
    """How many examples there are, if all tensors of a batch agree on it in their first dimension."""
    sizes = {len(tensor) if tensor.dim() else 0 for tensor in tensors_of(batch)}
    return sizes.pop() if len(sizes) == 1 else None


def to_device(batch: Batch, device: torch.device) -> Any:
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def padding_mask(batch: Batch) -> Tensor | None:
    """(N, R), false where there is only padding: what tokenizers call `attention_mask`, if a batch has one."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
