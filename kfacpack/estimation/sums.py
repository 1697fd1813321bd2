"""Running sums that become matrices: in float32 at least, in place, and never larger than they have to be.

Shapes: rows are (P, n). A sum knows its `tensors`, to be stored, restored and added up between processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kfacpack.bundle.layout import triangle, widest_block
from kfacpack.curvature.matrices import BlockDiagonal, Diagonal, Matrix, Packed
from kfacpack.curvature.matrices.block_diagonal import spans
from kfacpack.curvature.matrices.components import InMemory
from kfacpack.curvature.matrices.triangle import pack_rows
from kfacpack.errors import KfacpackError

PANEL = 192
"""Rows of a triangle that are updated by one product: fewer waste less above the diagonal, more keep it efficient."""


class Sum(ABC):
    side: int

    @abstractmethod
    def add(self, rows: Tensor) -> None: ...

    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """Everything summed so far, to be changed in place."""

    @abstractmethod
    def finish(self, divisor: float, *, examples: int, positions: int | None) -> Matrix:
        """The sum divided by `divisor`, as a matrix on the CPU. The sum is used up."""

    @property
    @abstractmethod
    def stored_bytes(self) -> int:
        """What the finished matrix will take in a bundle."""


@dataclass
class Panel:
    """Rows `start` to `stop` of one diagonal block's lower triangle, from the block's first column `left` on."""

    left: int
    start: int
    stop: int
    values: Tensor


class Gram(Sum):
    """Σ x xᵀ over rows x, of which only diagonal blocks are kept, and of those one triangle, in panels of rows.

    With `ones`, a one is joined to every row. It never enters a product: what it adds to the matrix is the sum of the
    rows, and their number.
    """

    def __init__(
        self, width: int, dtype: torch.dtype, device: torch.device, ones: bool = False, blocks: int = 1
    ) -> None:
        self.side = width + ones
        self.blocks = blocks
        if not 1 <= blocks <= self.side:
            raise KfacpackError(f"a matrix of side {self.side} has 1 to {self.side} diagonal blocks, not {blocks}")
        self._panels: list[Panel] = []
        for left, right in spans(self.side, blocks):
            right = min(right, width)
            count = max(1, round((right - left) / PANEL))
            for start, stop in spans(right - left, count) if right > left else []:
                values = torch.zeros((stop - start, stop), dtype=dtype, device=device)
                self._panels.append(Panel(left, left + start, left + stop, values))
        self._last_left = spans(self.side, blocks)[-1][0]
        self._sums = torch.zeros(width - self._last_left, dtype=dtype, device=device) if ones else None
        self._count = torch.zeros((), dtype=torch.float64) if ones else None

    def add(self, rows: Tensor) -> None:
        values = self._panels[0].values if self._panels else self._sums
        assert values is not None
        rows = rows.to(values.dtype)
        for panel in self._panels:
            ours, all_before = rows[:, panel.start : panel.stop], rows[:, panel.left : panel.stop]
            if panel.values.device == rows.device:
                panel.values.addmm_(ours.T, all_before)
            else:
                panel.values.add_((ours.T @ all_before).to(panel.values.device))
        if self._sums is not None and self._count is not None:
            self._sums.add_(rows[:, self._last_left :].sum(0).to(self._sums.device))
            self._count.add_(len(rows))

    def tensors(self) -> Iterator[Tensor]:
        yield from (panel.values for panel in self._panels)
        if self._sums is not None and self._count is not None:
            yield from (self._sums, self._count)

    @property
    def stored_bytes(self) -> int:
        item = next(self.tensors()).itemsize
        return self.blocks * triangle(widest_block(self.side, self.blocks)) * item

    def finish(self, divisor: float, *, examples: int, positions: int | None) -> Matrix:
        width = widest_block(self.side, self.blocks)
        dtype = next(self.tensors()).dtype
        packed = torch.zeros((self.blocks, triangle(width)), dtype=dtype)
        lefts = {left: number for number, (left, _) in enumerate(spans(self.side, self.blocks))}
        while self._panels:
            panel = self._panels.pop(0)
            pack_rows(panel.values.cpu(), panel.start - panel.left, packed[lefts[panel.left]])
        if self._sums is not None and self._count is not None:
            last = len(self._sums)
            packed[-1, triangle(last) : triangle(last) + last] = self._sums.cpu()
            packed[-1, triangle(last) + last] = self._count
        packed /= divisor
        if self.blocks == 1:
            return Packed(self.side, InMemory(data=packed[0]), examples=examples, positions=positions)
        return BlockDiagonal(self.side, InMemory(data=packed), examples=examples, positions=positions)


class OnDiagonal(Sum):
    """A sum that is a diagonal matrix, or only the diagonal of one."""

    def __init__(self, side: int, dtype: torch.dtype, device: torch.device) -> None:
        self.side = side
        self._values = torch.zeros(side, dtype=dtype, device=device)

    def _add(self, values: Tensor) -> None:
        self._values.add_(values.to(device=self._values.device, dtype=self._values.dtype))

    def tensors(self) -> Iterator[Tensor]:
        yield self._values

    @property
    def stored_bytes(self) -> int:
        return self._values.nbytes

    def finish(self, divisor: float, *, examples: int, positions: int | None) -> Matrix:
        return Diagonal.of(self._values.cpu().div_(divisor), examples=examples, positions=positions)


class Squares(OnDiagonal):
    """Σ x² over rows x, number by number."""

    def add(self, rows: Tensor) -> None:
        self._add(rows.to(self._values.dtype).square().sum(0))


class Frequencies(OnDiagonal):
    """How often each index occurred: Σ x xᵀ of one-hot rows, given as (P,) indices; negative ones are nobody."""

    def add(self, rows: Tensor) -> None:
        self._add(torch.bincount(rows[rows >= 0], minlength=self.side))
