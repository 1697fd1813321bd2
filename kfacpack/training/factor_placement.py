"""Batches of blocks that the penalty processes together, and the operators of their matrices on the compute device.

Blocks with the same shapes, whose matrices are also stored in the same format, are stacked: ΔW has shape (blocks, rows,
columns), and one batched product multiplies all blocks at once. The size of a stack is limited, because for large
blocks the overhead of separate calls is negligible, and a stack would only use more memory.

Floating-point matrices are unpacked once and kept on the device. int8 matrices stay in their stored form and are
unpacked when they are used. With `offload`, all matrices stay on the CPU in their stored form. The matrices of a batch
of blocks are copied in one transfer to one of two buffers on the device, while the batch in the other buffer is
processed.

Batches that share a matrix are processed one after another, so that the matrix is copied and unpacked only once. For
example, the projections of an attention layer share a matrix, as do the keys and values that all layers of a decoder
compute from the output of the encoder. Otherwise, batches are processed in the order of their blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from kfacpack.curvature.blocks import join_layout
from kfacpack.curvature.matrices.matrix import StoredOperator
from kfacpack.models.functional import TensorPack

if TYPE_CHECKING:
    from kfacpack.curvature.blocks import CurvatureBlock, Multiply, ParameterShapes
    from kfacpack.curvature.matrices.matrix import Matrix, Operator
    from kfacpack.format.manifest import Join

STACK_ELEMENTS = 2**16
"""Maximum number of elements of ΔW in a stack of more than one block."""

StackKey: TypeAlias = "tuple[int, ...]"
"""Key of a stack: the `id` of each of its matrices, in order."""


@dataclass(frozen=True)
class BlockBatch:
    """A batch of blocks with the same shapes and the same weight, whose matrices are stored in the same format."""

    blocks: tuple[CurvatureBlock, ...]
    weight: float
    """Factor by which the penalty of each block is multiplied."""

    @cached_property
    def joins(self) -> list[Join]:
        """The join of each block, which describes how parameters are arranged in ΔW."""
        return [block.join for block in self.blocks]

    @cached_property
    def parameters(self) -> frozenset[str]:
        """Names of all parameters that the blocks cover."""
        return frozenset(name for block in self.blocks for name in block.parameters)

    @cached_property
    def stacks(self) -> dict[int, tuple[Matrix, ...]]:
        """Matrices to stack. The key of a stack is the `id` of the first block's matrix.

        If groups of s consecutive blocks share a matrix, as the projections of an attention layer do, the stack
        contains each shared matrix once.
        """
        columns = zip(*(_matrices(block) for block in self.blocks), strict=True)
        return {id(column[0]): column[:: _shared_run(column)] for column in columns}

    @cached_property
    def stack_keys(self) -> dict[int, StackKey]:
        """The `StackKey` of each stack, with the same keys as `stacks`."""
        return {key: tuple(map(id, stack)) for key, stack in self.stacks.items()}

    def apply(self, delta: Tensor, operators: Mapping[int, Operator]) -> Tensor:
        """Multiplies ΔW by the curvature G of each block.

        Args:
            delta: ΔW of the blocks, (blocks, rows, columns).
            operators: Operators that multiply by the stacked matrices, with the same keys as `stacks`.

        Returns:
            G ΔW of each block, (blocks, rows, columns).
        """
        return self.blocks[0].structure.apply(delta, self._multiply(operators))

    def _multiply(self, operators: Mapping[int, Operator]) -> Multiply:
        def multiply(matrix: Matrix, x: Tensor) -> Tensor:
            operator, count = operators[id(matrix)], len(self.stacks[id(matrix)])
            if not matrix.stackable:
                return operator(x[0])[None]
            if count == len(x):
                return operator(x)
            # Combine blocks that share a matrix into one product with more columns: (blocks, n, k) -> (count, n, s k).
            _, side, width = x.shape
            product = operator(x.mT.reshape(count, -1, side).mT)
            return product.mT.reshape(len(x), width, side).mT

        return multiply


def plan_batches(
    blocks: Sequence[CurvatureBlock], weights: Sequence[float], shapes: ParameterShapes
) -> list[BlockBatch]:
    """Groups blocks that can be processed together into batches.

    Args:
        blocks: The blocks.
        weights: Factor by which the penalty of each block is multiplied.
        shapes: Shapes of the parameters, by name.

    Returns:
        The batches in the order of their first blocks, except that batches that share a matrix are adjacent.
    """
    groups: dict[Hashable, list[CurvatureBlock]] = {}
    covered: dict[Hashable, set[Hashable]] = {}
    uses = Counter(id(matrix) for block in blocks for matrix in _matrices(block))
    for block, weight in zip(blocks, weights, strict=True):
        # Blocks that share matrices are stacked separately from others, so that a stack contains each matrix once.
        sharing = tuple(uses[id(matrix)] for matrix in _matrices(block))
        key: Hashable = (weight, join_layout(block.join, shapes), _form(block), sharing)
        pieces = {(piece.parameter, piece.rows) for piece in block.join.pieces}
        # The gradients of a batch are added at once, so no two of its blocks may cover the same element.
        while pieces & covered.setdefault(key, set()):
            key = (key, "next")
        covered[key] |= pieces
        groups.setdefault(key, []).append(block)
    order = {id(block): number for number, block in enumerate(blocks)}
    first_use = {id(matrix): order[id(block)] for block in reversed(blocks) for matrix in _matrices(block)}

    def place(part: Sequence[CurvatureBlock]) -> tuple[int, int]:
        return min(first_use[id(matrix)] for matrix in _matrices(part[0])), order[id(part[0])]

    parts = sorted((part for group in groups.values() for part in _limited_parts(group)), key=place)
    return [BlockBatch(tuple(part), weights[order[id(part[0])]]) for part in parts]


def _limited_parts(group: Sequence[CurvatureBlock]) -> Iterator[Sequence[CurvatureBlock]]:
    """Divides blocks of the same shape into parts of limited size.

    Blocks that share a matrix are put into the same part if they fit. Otherwise, they are divided into equal parts.
    """
    run = max(_shared_run(column) for column in zip(*map(_matrices, group), strict=True))
    limit = STACK_ELEMENTS // (group[0].join.rows * group[0].join.columns)
    size = limit // run * run or next((size for size in range(limit, 1, -1) if run % size == 0), 1)
    return (group[start : start + size] for start in range(0, len(group), size))


def _matrices(block: CurvatureBlock) -> list[Matrix]:
    return [matrix for _, matrix in block.structure.matrices()]


def _form(block: CurvatureBlock) -> Hashable:
    """Returns a key that is equal for blocks whose operators can be stacked."""
    matrices = tuple(
        (type(matrix), matrix.side, tuple(matrix.components.specs.items())) if matrix.stackable else id(matrix)
        for matrix in _matrices(block)
    )
    return type(block.structure), block.structure.weights, matrices


def _shared_run(matrices: Sequence[Matrix]) -> int:
    """Returns how many entries at the start of a sequence are the same matrix.

    Returns 1 if the sequence does not consist of groups of this size that contain only one matrix each.
    """
    ids = [id(matrix) for matrix in matrices]
    run = next((index for index, key in enumerate(ids) if key != ids[0]), len(ids))
    uniform = len(ids) % run == 0 and all(len(set(ids[k : k + run])) == 1 for k in range(0, len(ids), run))
    return run if uniform else 1


class FactorPlacement:
    """Creates the operators that multiply by the matrices of blocks, and places them on the compute device.

    Args:
        dtype: Dtype of the products.
        device: Compute device.
        offload: Whether to keep matrices on the CPU between uses. This has no effect if the compute device is the CPU.
        keep: Whether to keep the operators on the device after their first use.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, *, offload: bool = False, keep: bool = True):
        self.dtype = dtype
        self.device = device
        self._offload = offload and device.type != "cpu"
        self._keep = keep
        self._operators: dict[Hashable, Operator] = {}
        self._stream: FactorStream | None = None

    def place(self, batches: Sequence[BlockBatch]) -> Iterator[tuple[BlockBatch, Mapping[int, Operator]]]:
        """Yields each batch with its operators, which have the same keys as `BlockBatch.stacks`."""
        repeated = _repeated_stacks(batches)
        unpacked: dict[StackKey, Operator] = {}
        for number, (batch, placed) in enumerate(self._placed(batches, repeated)):
            keys = batch.stack_keys
            operators = {key: unpacked[keys[key]] if keys[key] in unpacked else placed[key] for key in keys}
            unpacked = {
                keys[key]: operator.unpacked(self.dtype)
                for key, operator in operators.items()
                if keys[key] in repeated[number + 1]
            }
            yield batch, {key: unpacked.get(keys[key], operator) for key, operator in operators.items()}

    def _placed(
        self, batches: Sequence[BlockBatch], repeated: Sequence[frozenset[StackKey]]
    ) -> Iterator[tuple[BlockBatch, Mapping[int, Operator]]]:
        """Yields each batch with its operators. The operators of the stacks in `repeated` may be missing."""
        if self._offload:
            self._stream = self._stream or FactorStream(self.dtype, self.device)
            yield from self._stream.place(batches, repeated)
            return
        for batch in batches:
            yield batch, {key: self._operator(stack) for key, stack in batch.stacks.items()}
            if not self._keep:
                self._operators.clear()

    def _operator(self, stack: tuple[Matrix, ...]) -> Operator:
        key = tuple(map(id, stack))
        if key not in self._operators:
            parts = [self._single_operator(matrix) for matrix in stack]
            self._operators[key] = parts[0].stack(parts) if stack[0].stackable else parts[0]
        return self._operators[key]

    def _single_operator(self, matrix: Matrix) -> Operator:
        if matrix.is_int8:
            return StoredOperator(matrix, self.dtype, self.device)
        return matrix.operator(self.dtype, self.device)


def _repeated_stacks(batches: Sequence[BlockBatch]) -> list[frozenset[StackKey]]:
    """Returns, for each batch, the set of stacks that it shares with the previous batch.

    The set of the first batch is empty, and the list ends with an additional empty set.
    """
    stacks = [frozenset(batch.stack_keys.values()) for batch in batches]
    return [frozenset(), *(first & second for first, second in pairwise(stacks)), frozenset()]


@dataclass(frozen=True)
class _HostFactors:
    """The stored matrices of a batch of blocks in one buffer on the CPU."""

    pack: TensorPack
    assemble: Callable[[Sequence[Tensor]], dict[int, Operator]]
    """Function that returns the operators of the batch, given the tensors of `pack` on the device."""


class FactorStream:
    """Copies the matrices of blocks from the CPU to two alternating buffers on a device, one batch of blocks at a time.

    On CUDA devices, the copies run on a separate CUDA stream and read from pinned memory. A copy waits until the
    previous batch in its buffer has been processed, and the processing of a batch waits until its copy is complete. The
    buffers are freed with this object. CUDA events order all uses, so that the memory is never reused too early.

    Args:
        dtype: Dtype of the products.
        device: Compute device.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self._dtype = dtype
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._host: dict[tuple[int, frozenset[StackKey]], tuple[BlockBatch, _HostFactors]] = {}
        self._buffers: list[Tensor] = []
        self._released: list[torch.cuda.Event | None] = [None, None]

    def place(
        self, batches: Sequence[BlockBatch], repeated: Sequence[frozenset[StackKey]]
    ) -> Iterator[tuple[BlockBatch, Mapping[int, Operator]]]:
        """Yields each batch with its operators, which are valid until the next batch is requested.

        Args:
            batches: The batches.
            repeated: For each batch, the stacks that the previous batch also uses. These stacks are not copied again,
                and their operators are omitted.
        """
        factors = [self._host_factors(batch, skipped) for batch, skipped in zip(batches, repeated, strict=False)]
        self._reserve(max((host.pack.nbytes for host in factors), default=0))
        copied = [self._start_copy(host, slot) for slot, host in enumerate(factors[:2])]
        for number, (batch, host) in enumerate(zip(batches, factors, strict=True)):
            slot = number % 2
            if self._stream is not None:
                torch.cuda.current_stream(self._device).wait_event(copied[slot])  # type: ignore[arg-type]
            try:
                yield batch, host.assemble(host.pack.views(self._buffers[slot]))
            finally:
                if self._stream is not None:
                    self._released[slot] = torch.cuda.current_stream(self._device).record_event()
            if number + 2 < len(factors):
                copied[slot] = self._start_copy(factors[number + 2], slot)

    def _reserve(self, size: int) -> None:
        """Allocates the two buffers, or replaces them if they are too small."""
        if self._buffers and self._buffers[0].numel() >= size:
            return
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)]
        if self._stream is not None:
            # Earlier work of the stream on which the memory was allocated may still use it.
            self._released = [torch.cuda.current_stream(self._device).record_event()] * 2

    def _start_copy(self, host: _HostFactors, slot: int) -> torch.cuda.Event | None:
        stream, released = self._stream, self._released[slot]
        if stream is not None and released is not None:
            stream.wait_event(released)
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            if host.pack.nbytes:
                self._buffers[slot][: host.pack.nbytes].copy_(host.pack.buffer, non_blocking=True)
        return None if stream is None else stream.record_event()

    def _host_factors(self, batch: BlockBatch, skipped: frozenset[StackKey]) -> _HostFactors:
        key = id(batch), skipped
        if key not in self._host:
            self._host[key] = batch, self._pack(batch, skipped)
        return self._host[key][1]

    def _pack(self, batch: BlockBatch, skipped: frozenset[StackKey]) -> _HostFactors:
        stored = {
            key: [StoredOperator(matrix.for_storage(), self._dtype, torch.device("cpu")) for matrix in stack]
            for key, stack in batch.stacks.items()
            if batch.stack_keys[key] not in skipped
        }
        stacked = {
            key: parts[0].stack(parts) if batch.stacks[key][0].stackable else parts[0] for key, parts in stored.items()
        }
        pack = TensorPack([t for operator in stacked.values() for t in operator.tensors], pin=self._stream is not None)
        templates = {key: operator.with_tensors(()) for key, operator in stacked.items()}
        counts = {key: len(operator.tensors) for key, operator in stacked.items()}

        def assemble(tensors: Sequence[Tensor]) -> dict[int, Operator]:
            remaining = iter(tensors)
            return {
                key: template.with_tensors(next(remaining) for _ in range(counts[key]))
                for key, template in templates.items()
            }

        return _HostFactors(pack, assemble)
