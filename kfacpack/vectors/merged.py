"""A vector that a method makes of others, a parameter at a time, when it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from kfacpack.vectors.leaf import Leaf

if TYPE_CHECKING:
    from torch import Tensor

    from kfacpack.vectors.head import Head
    from kfacpack.vectors.manifest import AboutVector
    from kfacpack.vectors.methods import Input, Method
    from kfacpack.vectors.methods.base import Parameter


class Merged(Leaf):
    def __init__(self, method: Method, inputs: Sequence[Input], about: AboutVector, heads: Mapping[str, Head]):
        self.about = about
        self._method, self._inputs, self._heads = method, inputs, heads

    @cached_property
    def _parameter(self) -> Parameter:
        return self._method.begin(self._inputs)

    def read(self, name: str) -> Tensor:
        with torch.no_grad():
            return self._parameter(name).float()

    @property
    def heads(self) -> Mapping[str, Head]:
        return self._heads
