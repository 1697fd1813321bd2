"""Convolutions of any number of dimensions: a product with every patch the kernel covers."""

from __future__ import annotations

from collections.abc import Hashable
from math import prod
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.functional import pad

from kfacpack.estimation.operations.base import RowOperation, memory

if TYPE_CHECKING:
    from torch.autograd.graph import Node


class Convolution(RowOperation):
    """The operand is (out, in / groups, *kernel); a row is a patch in the order of the kernel's numbers."""

    kind = "convolution"
    bias_slot = 2

    def takes(self, node: Node) -> bool:
        saved: Any = node
        return not saved._saved_transposed and saved._saved_groups == 1

    def inputs(self, node: Node) -> Tensor:
        saved: Any = node
        kernel = saved._saved_weight.shape[2:]
        return patches(
            saved._saved_input, tuple(kernel), saved._saved_stride, saved._saved_padding, saved._saved_dilation
        )

    def gradients(self, node: Node, g: Tensor) -> Tensor:
        return g.movedim(1, -1).reshape(-1, g.shape[1])

    def identity(self, node: Node) -> Hashable:
        saved: Any = node
        kernel = tuple(saved._saved_weight.shape[2:])
        return memory(saved._saved_input), kernel, saved._saved_stride, saved._saved_padding, saved._saved_dilation


def patches(
    x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...]
) -> Tensor:
    """(N, in, *sizes) -> (N · positions, in · kernel numbers), positions in row-major order."""
    x = pad(x, [width for side in reversed(padding) for width in (side, side)])
    for dim, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(dim, gap * (size - 1) + 1, step)[..., ::gap]
    spatial = len(kernel)
    return x.movedim(1, 1 + spatial).reshape(-1, x.shape[1] * prod(kernel))
