"""Tiny models and the stock loop that fine-tunes them, without any code of kfacpack."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import kfacpack as kp


def batch_of(model: kp.Model) -> Callable[[nn.Module], Tensor]:
    """Returns a function that computes outputs of the library's own module on a fixed batch."""
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(4, 3, 32, 32, generator=generator)
    ids = torch.randint(4, 12, (4, 6), generator=generator)
    if model.family == "open_clip":
        return lambda module: module.encode_image(images)
    if model.family == "timm":
        images = torch.randn(4, 3, 160, 160, generator=generator)
        return lambda module: module(images)
    if model.family == "t5":
        return lambda module: module(input_ids=ids, decoder_input_ids=ids[:, :2]).logits
    return lambda module: module(input_ids=ids).last_hidden_state


def train(module: nn.Module, outputs: Callable[[nn.Module], Tensor], *, steps: int = 4, lr: float = 3e-3) -> nn.Module:
    """Trains all parameters that require a gradient, in place."""
    torch.manual_seed(7)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1)
    with torch.no_grad():
        target = torch.randn_like(outputs(module))
    module.train()
    for _ in range(steps):
        optimizer.zero_grad()
        (outputs(module) - target).float().square().mean().backward()
        optimizer.step()
    return module.eval()


def finetuned(model: kp.Model, **options: float) -> nn.Module:
    """A trained copy of a model's module."""
    return train(copy.deepcopy(model.module), batch_of(model), **options)


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are equal bit for bit, including the signs of zeros."""
    first, second = first.detach().contiguous(), second.detach().contiguous()
    return first.dtype == second.dtype and torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def same_weights(edited: nn.Module, tuned: nn.Module) -> bool:
    """Whether two modules have the same weights bit for bit."""
    first, second = edited.state_dict(), tuned.state_dict()
    assert set(first) == set(second)
    return all(same_bits(first[name].flatten(), second[name].flatten()) for name in first)
