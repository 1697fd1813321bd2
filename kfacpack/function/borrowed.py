"""A model lent for a call: changed for the time of it, and given back as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kfacpack.errors import KfacpackError


@contextmanager
def borrowed(model: nn.Module, wanted: Mapping[str, Tensor]) -> Iterator[None]:
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
