"""What an estimate will consist of and cost, before it is made."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kfacpack.function.batch import Batch, Forward, length, map_tensors, run


@dataclass(frozen=True)
class BlockForecast:
    name: str
    parameters: tuple[str, ...]
    operation: str
    structure: str
    rows: int
    columns: int
    bytes: int
    """Of its matrices in the bundle, without those that a block before it brings along."""


@dataclass(frozen=True)
class Forecast:
    blocks: tuple[BlockForecast, ...]
    frozen: tuple[str, ...]
    """Parameters that are left out, by the model's family or because they were not asked for."""
    unused: tuple[str, ...]
    """Parameters that f does not depend on."""
    examples: int
    batches: int
    bytes: int
    """Of the bundle's tensors."""
    seconds: float
    """Measured on one batch, times the number of batches."""
    peak_memory: int
    """Bytes: weights, sums, and what a batch keeps between its forward and its backward pass."""


def kept_for_backward(model: nn.Module, forward: Forward, batch: Batch, batch_size: int) -> int:
    """Bytes that autograd keeps of a batch of that size, besides the weights; counted on two examples.

    The largest tensor counts three times: a gradient of its size comes in, and one goes out.
    """
    weights = {tensor.untyped_storage().data_ptr() for tensor in _tensors_of(model)}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    few = map_tensors(batch, lambda tensor: tensor[[0, 0]]) if length(batch) else batch
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        f = run(forward, few)
    return (sum(kept.values()) + 2 * max(kept.values(), default=0)) * batch_size // len(f)


def weight_bytes(model: nn.Module) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in _tensors_of(model)}.values())


def _tensors_of(model: nn.Module) -> Collection[Tensor]:
    return [*model.parameters(), *model.buffers()]
