"""Factors that lie ready to multiply with: all of them on the device, or one block's at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kfacpack.curvature.blocks import CurvatureBlock
    from kfacpack.curvature.matrices.matrix import Matrix, Operator

    Multiply = Callable[[Matrix, Tensor], Tensor]

    Operators = dict[int, Operator]


class FactorPlacement:
    """Each matrix is read and unpacked once, when a block that has it is first used. Blocks that share one still do.

    With `offload` they stay on the CPU, in pinned memory where there is a GPU, and while one block is at work the next
    one's are on their way.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, *, offload: bool):
        self.dtype = dtype
        self.device = device
        self._home = torch.device("cpu") if offload else device
        self._ready: Operators = {}

    def along(self, blocks: Sequence[CurvatureBlock]) -> Iterator[tuple[CurvatureBlock, Multiply]]:
        """Each block, and how its matrices multiply."""
        travel = self._home != self.device
        stream = torch.cuda.Stream(self.device) if travel and self.device.type == "cuda" else None
        upcoming = self._brought(blocks[0], stream) if blocks else None
        for number, block in enumerate(blocks):
            assert upcoming is not None
            operators, arrived = upcoming
            # Asked for before this block is at work, so that both go on at the same time.
            upcoming = self._brought(blocks[number + 1], stream) if number + 1 < len(blocks) else None
            if arrived is not None:
                _to_device_async(operators, arrived, self.device)
            yield block, _multiply(operators)

    def _brought(
        self, block: CurvatureBlock, stream: torch.cuda.Stream | None
    ) -> tuple[Operators, torch.cuda.Event | None]:
        """A block's operators on the device, and what tells that they have arrived."""
        operators = self._at_home(block)
        if self._home == self.device:
            return operators, None
        with torch.cuda.stream(stream):
            moved = {key: operator.to(self.device) for key, operator in operators.items()}
        return moved, None if stream is None else stream.record_event()

    def _at_home(self, block: CurvatureBlock) -> Operators:
        for _, matrix in block.structure.matrices():
            if id(matrix) not in self._ready:
                operator = matrix.operator(self.dtype, self._home)
                pin = self._home != self.device and self.device.type == "cuda"
                self._ready[id(matrix)] = operator.pinned() if pin else operator
        return {id(matrix): self._ready[id(matrix)] for _, matrix in block.structure.matrices()}


def _multiply(operators: Operators) -> Multiply:
    return lambda matrix, x: operators[id(matrix)](x)


def _to_device_async(operators: Operators, arrived: torch.cuda.Event, device: torch.device) -> None:
    """From the stream that copies to the one that computes: it waits, and says that it uses the memory."""
    current = torch.cuda.current_stream(device)
    current.wait_event(arrived)
    for operator in operators.values():
        for tensor in operator.tensors:
            tensor.record_stream(current)
