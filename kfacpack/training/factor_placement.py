"""Placement of a penalty's factors: all of them on the compute device, or streamed to it block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kfacpack.curvature.blocks import CurvatureBlock, Multiply
    from kfacpack.curvature.matrices.matrix import Operator

    Operators = dict[int, Operator]
    """Operators by the `id` of their matrix."""


class FactorPlacement:
    """Unpacks matrices on first use and keeps them ready for multiplication.

    A matrix that several blocks share is unpacked once. With `offload`, matrices stay on the CPU, in pinned memory if
    the compute device is a GPU, and those of the next block are copied while the current block is computed.

    Args:
        dtype: Dtype of the unpacked matrices.
        device: Compute device.
        offload: Whether to keep matrices on the CPU between uses.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, *, offload: bool):
        self.dtype = dtype
        self.device = device
        self._storage_device = torch.device("cpu") if offload else device
        self._operators: Operators = {}

    def place_blocks(self, blocks: Sequence[CurvatureBlock]) -> Iterator[tuple[CurvatureBlock, Multiply]]:
        """Yields each block with a function that multiplies its matrices, `multiply(matrix, x)`."""
        streams = self._storage_device != self.device and self.device.type == "cuda"
        stream = torch.cuda.Stream(self.device) if streams else None
        next_operators = self._on_device(blocks[0], stream) if blocks else None
        for number, block in enumerate(blocks):
            assert next_operators is not None
            operators, copied = next_operators
            # Start the next copy before this block is computed, so that they overlap.
            next_operators = self._on_device(blocks[number + 1], stream) if number + 1 < len(blocks) else None
            if copied is not None:
                _wait_for_copy(operators, copied, self.device)
            yield block, _multiply(operators)

    def _on_device(
        self, block: CurvatureBlock, stream: torch.cuda.Stream | None
    ) -> tuple[Operators, torch.cuda.Event | None]:
        """Returns a block's operators on the device and, for a copy on a stream, the event that completes it."""
        operators = self._in_storage(block)
        if self._storage_device == self.device:
            return operators, None
        with torch.cuda.stream(stream):
            copies = {key: operator.to(self.device) for key, operator in operators.items()}
        return copies, None if stream is None else stream.record_event()

    def _in_storage(self, block: CurvatureBlock) -> Operators:
        for _, matrix in block.structure.matrices():
            if id(matrix) not in self._operators:
                operator = matrix.operator(self.dtype, self._storage_device)
                pin = self._storage_device != self.device and self.device.type == "cuda"
                self._operators[id(matrix)] = operator.pinned() if pin else operator
        return {id(matrix): self._operators[id(matrix)] for _, matrix in block.structure.matrices()}


def _multiply(operators: Operators) -> Multiply:
    return lambda matrix, x: operators[id(matrix)](x)


def _wait_for_copy(operators: Operators, copied: torch.cuda.Event, device: torch.device) -> None:
    """Makes the compute stream wait for the copy and marks the memory as used by it."""
    current = torch.cuda.current_stream(device)
    current.wait_event(copied)
    for operator in operators.values():
        for tensor in operator.tensors:
            tensor.record_stream(current)
