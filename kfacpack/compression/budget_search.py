"""Chooses one codec per matrix so that the total error is small and the size is at most a given number of bytes.

The matrices B of all terms of a block are one *side* of the block, and the matrices A are the other. The matrices of a
side share one codec, because their error depends on all of them jointly. They form a *group*, together with all other
sides that contain one of these matrices. In the curvature of a single task, every matrix is a group of its own. An
*option* is the result of one codec for a group. `Candidates` contains the sizes and errors of all options, and
`BudgetSearch` chooses one option for each group.

Let G be the curvature and G' the compressed curvature. The error of `quadratic` depends on the distribution of task
vectors:

- Random task vectors, τ ~ N(0, I): E[(τᵀ (G − G') τ)²] = 2 ‖G − G'‖² + (tr(G − G'))². Low-rank codecs have large
  errors here: the eigenvalues that they drop are not negative, so the lost traces of the blocks add up.
- Task vectors that lie mostly in directions of large curvature, as training produces them, τ ~ N(0, G):
  E[τᵀ (G − G') τ] = <G − G', G>. Its absolute value is called the error *along the curvature*. Block codecs have large
  errors here, because they drop the large part of G that is outside the diagonal blocks.

A *single-codec choice* uses the same codec for all matrices. The search compares each choice with all single-codec
choices, and prefers choices that satisfy two conditions. The error on random τ must be smaller, by a margin, than that
of every single-codec choice. The error along the curvature must not exceed that of any single-codec choice. Among the
choices that satisfy both conditions, the choice with the smallest product of the two errors is taken.

To find choices, the search minimises, for several relative weights κ,

    2 ‖G − G'‖²  +  (tr(G − G'))²  +  κ |<G − G', G>|,

where the first two terms are divided by E[(τᵀ G τ)²] for random τ, and the third by ‖G‖². The quantities ‖G − G'‖²,
tr(G − G') and |<G − G', G>| are sums over the blocks, but the square of the trace is not. It is therefore linearised at
the current value μ of the trace. With a price λ per byte, the contribution of a block is

    2 ‖G − G'‖²  +  2 μ tr(G − G')  +  κ |<G − G', G>|  +  λ · bytes.

The options for B and A of a block are chosen jointly, because the error of a block depends on both. The smallest λ for
which the result fits into the budget is found by bisection. After each bisection, μ is updated. Then the options of
individual blocks are changed to use the remaining bytes. The conditions above decide between the results for all κ and
the single-codec choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from kfacpack.compression.codecs import CodecChain, float_type
from kfacpack.compression.compression_report import FactorPair, compare, moment_table
from kfacpack.curvature.matrices.components import InMemoryTensors, MatrixTensors
from kfacpack.curvature.matrices.dense import Dense

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kfacpack.curvature.blocks import CurvatureBlock
    from kfacpack.curvature.curvature import Curvature
    from kfacpack.curvature.matrices.matrix import Matrix
    from kfacpack.format.container import Spec
    from kfacpack.format.units import OnProgress


CANDIDATES = tuple(
    map(
        CodecChain.parse,
        (
            *("fp16", "int8"),
            *(f"block:{count}+{numbers}" for count in (2, 4, 8, 16, 32, 64, 256, 1024) for numbers in ("fp16", "int8")),
            *(f"svd:{rank}%+int8" for rank in (1, 2, 4, 6, 8, 12, 18, 25)),
            *(f"prune:{share}%+int8" for share in (2, 8)),
        ),
    )
)
"""Codecs that are tried, besides leaving the matrices unchanged. Structural codecs in float32 are not included, because
keeping twice as many values in two bytes each takes the same space and has a smaller error."""


class ShapeOnly(MatrixTensors):
    """Components of which only the dtypes and shapes are kept."""

    def __init__(self, specs: Mapping[str, Spec]):
        self.specs = specs

    def __getitem__(self, name: str) -> Tensor:
        raise TypeError(f"the values of component {name!r} were not kept, only its dtype and shape")


@dataclass(frozen=True)
class Option:
    """The result of one codec for a group of matrices."""

    chain: CodecChain
    """The candidate codec that was tried."""
    encoded: Mapping[int, tuple[CodecChain, Matrix]]
    """The applied steps and a placeholder for the compressed matrix, by the id of each original matrix."""
    sides: Mapping[tuple[int, ...], FactorPair]
    """Inner products of the matrices on each side of a block, by the ids of the original matrices on that side."""
    nbytes: int
    """Size of the group's compressed matrices in a file, in bytes."""


@dataclass(frozen=True)
class MatrixGroup:
    """The distinct options for a group of matrices."""

    options: tuple[Option, ...]
    """The options. The first option leaves the matrices unchanged."""
    option_of: Mapping[CodecChain, int]
    """Index of the option for each candidate codec. Several codecs may lead to the same option."""


@dataclass(frozen=True)
class ErrorTable:
    """The errors of a block for every combination of options for its B and A, or for every option for its G."""

    groups: tuple[int, ...]
    """Indices of the groups that contain B and A, or the index of the group that contains G."""
    moments: tuple[Tensor, ...]
    """The result of `moment_table`. Each tensor has one dimension per group, which indexes the options of the group."""


@dataclass(frozen=True)
class Candidates:
    """All groups of matrices in a curvature, the options of each group, and the errors of all blocks."""

    groups: tuple[MatrixGroup, ...]
    """One entry per group of matrices."""
    tables: tuple[ErrorTable, ...]
    """One entry per block."""

    @classmethod
    def of(cls, curvature: Curvature, on_progress: OnProgress) -> Candidates:
        """Tries every candidate codec on every matrix, without keeping the compressed matrices.

        Args:
            curvature: The curvature to compress.
            on_progress: Called with the number of groups processed and the total number of groups.

        Returns:
            The sizes and errors of all options.
        """
        members = _group_members(curvature)
        groups = []
        for number, (matrices, sides) in enumerate(members):
            on_progress(number, len(members))
            groups.append(_try_candidates(matrices, sides))
        on_progress(len(members), len(members))
        group_of = {id(matrix): number for number, (matrices, _) in enumerate(members) for matrix in matrices}
        return cls(tuple(groups), tuple(_error_table(block, groups, group_of) for block in curvature.blocks))


def _group_members(curvature: Curvature) -> list[tuple[list[Matrix], list[tuple[Matrix, ...]]]]:
    """Returns, for each group, its matrices and the sides of blocks in which they occur.

    A side of a block is the tuple of the matrices B of all its terms, or of the matrices A. Sides that have a matrix in
    common belong to the same group.
    """
    sides = {tuple(map(id, side)): side for block in curvature.blocks for side in block.structure.sides}
    group_of: dict[int, int] = {}
    for number, key in enumerate(sides):
        joined = {group_of[matrix_id] for matrix_id in key if matrix_id in group_of}
        group_of |= dict.fromkeys(key, number)
        group_of = {matrix_id: number if group in joined else group for matrix_id, group in group_of.items()}
    members: dict[int, tuple[dict[int, Matrix], list[tuple[Matrix, ...]]]] = {}
    for side in sides.values():
        matrices, group_sides = members.setdefault(group_of[id(side[0])], ({}, []))
        matrices |= {id(matrix): matrix for matrix in side}
        group_sides.append(side)
    return [(list(matrices.values()), group_sides) for matrices, group_sides in members.values()]


def _try_candidates(matrices: list[Matrix], sides: list[tuple[Matrix, ...]]) -> MatrixGroup:
    options: dict[tuple[CodecChain, ...], Option] = {}
    option_of: dict[CodecChain, int] = {}
    unpacked = {id(matrix): _cached_dense(matrix) for matrix in matrices}
    for chain in (CodecChain(), *CANDIDATES):
        encoded = {key: chain.encode(matrix) for key, matrix in unpacked.items()}
        applied = tuple(steps for steps, _ in encoded.values())
        if applied not in options:
            keys = [tuple(map(id, side)) for side in sides]
            pairs = {key: compare([unpacked[k] for k in key], [encoded[k][1] for k in key]) for key in keys}
            stored = {key: (steps, _shapes_only(matrix.for_storage())) for key, (steps, matrix) in encoded.items()}
            size = sum(matrix.nbytes for _, matrix in stored.values())
            options[applied] = Option(chain, stored, pairs, size)
        option_of[chain] = list(options).index(applied)
    return MatrixGroup(tuple(options.values()), option_of)


class CachedDense(Dense):
    """A dense matrix that caches its eigenvalues and eigenvectors, because many candidate codecs need them."""

    @cached_property
    def _eigenpairs(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {}

    def leading_eigenpairs(self, width: int) -> tuple[Tensor, Tensor]:
        """Returns the `width` eigenvalues of largest magnitude and their eigenvectors, computed once per `width`."""
        if width not in self._eigenpairs:
            self._eigenpairs[width] = super().leading_eigenpairs(width)
        return self._eigenpairs[width]


def _cached_dense(matrix: Matrix) -> Matrix:
    if matrix.form not in ("packed", "dense"):
        return matrix  # other forms are small and quick to unpack
    full = InMemoryTensors(data=matrix.dense(float_type(matrix)))
    return CachedDense(matrix.side, full, psd=matrix.psd, examples=matrix.examples, positions=matrix.positions)


def _shapes_only(matrix: Matrix) -> Matrix:
    """Returns a placeholder with the form of a matrix and the dtypes and shapes of its components, but no values."""
    components = ShapeOnly(dict(matrix.components.specs))
    return type(matrix)(matrix.side, components, psd=matrix.psd, examples=matrix.examples, positions=matrix.positions)


def _error_table(block: CurvatureBlock, groups: list[MatrixGroup], group_of: Mapping[int, int]) -> ErrorTable:
    keys = [tuple(map(id, side)) for side in block.structure.sides]
    block_groups = tuple(group_of[key[0]] for key in keys)
    sides = [
        _spread_options(FactorPair.stack([option.sides[key] for option in groups[group].options]), dim, len(keys))
        for dim, (key, group) in enumerate(zip(keys, block_groups, strict=True))
    ]
    return ErrorTable(block_groups, moment_table(block.structure.weights, sides))


def _spread_options(side: FactorPair, dim: int, count: int) -> FactorPair:
    """Reshapes the tensors of one side of a block so that they can be broadcast with the tensors of the other side.

    The first dimension, which indexes the options, becomes dimension `dim` of `count` leading dimensions. The other
    leading dimensions have length 1.
    """
    shape = [1] * count
    shape[dim] = -1
    return FactorPair(
        side.gram.reshape(*shape, *side.gram.shape[1:]), side.traces.reshape(*shape, *side.traces.shape[1:])
    )


OptionIndices = tuple[int, ...]
"""Index of the chosen option for each group."""

MARGIN = 0.8
"""If possible, the error of a choice on random τ is at most this fraction of that of every single-codec choice."""
_RATES = tuple(float(rate) for rate in np.logspace(-9, 3, 13))
"""Values of κ that are tried."""
_ROUNDS, _PRICES, _SWEEPS = 4, 24, 6
"""Numbers of values of μ and λ that are tried, and maximum number of passes over all blocks."""


@dataclass(frozen=True)
class TotalError:
    """The size of the matrices for a choice of options, and the relative errors of the compressed curvature."""

    nbytes: int
    """Size of the compressed matrices in bytes."""
    lost: float
    """‖G − G'‖², relative to E[(τᵀ G τ)²] for random τ."""
    trace: float
    """tr(G − G'), relative to the square root of E[(τᵀ G τ)²] for random τ."""
    along: float
    """|<G − G', G>|, relative to ‖G‖²."""

    @property
    def random(self) -> float:
        """Mean squared error of `quadratic` on random τ, relative to E[(τᵀ G τ)²]."""
        return 2 * self.lost + self.trace**2

    @property
    def product(self) -> float:
        """Product of the errors on random τ and along the curvature."""
        return float(self.random**0.5 * self.along)


class BudgetSearch:
    """Searches for the best choice of one option per group, given a maximum size.

    Args:
        candidates: The options of each group, with their sizes and errors.
    """

    def __init__(self, candidates: Candidates):
        self._bytes = [np.array([option.nbytes for option in group.options]) for group in candidates.groups]
        self._option_of = [group.option_of for group in candidates.groups]
        size, trace = (sum(float(table.moments[k].flatten()[0]) for table in candidates.tables) for k in (0, 1))
        squared = 2 * size + trace**2
        units = [squared or 1.0, squared**0.5 or 1.0, size or 1.0]
        self._tables: list[tuple[tuple[int, ...], NDArray[np.float64]]] = [
            (table.groups, np.stack([m.numpy() / unit for m, unit in zip(table.moments[2:], units, strict=True)]))
            for table in candidates.tables
        ]
        self._changes = [self._option_change(groups) for groups in dict.fromkeys(groups for groups, _ in self._tables)]

    def best(self, limit: int, single: Sequence[OptionIndices]) -> OptionIndices | None:
        """Returns the best choice of options within a size limit.

        Args:
            limit: Maximum size of the matrices in bytes.
            single: Choices that use one codec for all matrices. They are candidates even if they exceed the limit.

        Returns:
            The best choice, or None if the limit is exceeded even with the smallest option of every group.
        """
        if self.total(self.smallest()).nbytes > limit:
            return None
        threshold = MARGIN**2 * min((self.total(picks).random for picks in single), default=inf)
        within = [picks for picks in single if self.total(picks).nbytes <= limit]
        choices = set(single)
        for rate in _RATES:
            start = min((*self._choices_within(limit, rate), *within), key=lambda picks: self._error(picks, rate))
            choices.add(self._use_remaining_bytes(start, limit, rate))
        totals = {picks: self.total(picks) for picks in sorted(choices)}
        allowed = max(threshold, min(total.random for total in totals.values()))
        along = min((self.total(picks).along for picks in single), default=inf)

        def rank(picks: OptionIndices) -> tuple[bool, float]:
            return totals[picks].along > along, totals[picks].product

        return min((picks for picks in totals if totals[picks].random <= allowed), key=rank)

    def single(self) -> dict[OptionIndices, CodecChain]:
        """Returns the choices that use one codec for all matrices, and the codec of each choice."""
        choices: dict[OptionIndices, CodecChain] = {}
        for chain in self._option_of[0]:
            choices.setdefault(tuple(option_of[chain] for option_of in self._option_of), chain)
        return choices

    def smallest(self) -> OptionIndices:
        """Returns the choice that takes the smallest option of every group."""
        return tuple(int(sizes.argmin()) for sizes in self._bytes)

    def unchanged(self) -> OptionIndices:
        """Returns the choice that leaves all matrices unchanged."""
        return (0,) * len(self._bytes)

    def total(self, picks: OptionIndices) -> TotalError:
        """Returns the total size of the matrices and the total errors for a choice of options."""
        size = sum(int(sizes[pick]) for sizes, pick in zip(self._bytes, picks, strict=True))
        losses = [table[_at_index(tuple(picks[group] for group in groups))] for groups, table in self._tables]
        return TotalError(size, *np.sum(losses, axis=0).tolist())

    def _error(self, picks: OptionIndices, rate: float) -> float:
        total = self.total(picks)
        return float(_objective(total.lost, total.trace, total.along, rate))

    def _choices_within(self, limit: int, rate: float) -> Iterator[OptionIndices]:
        """Yields one choice within the limit for each of several values of μ.

        After each choice, μ is moved towards the trace of the error of this choice.
        """
        mu = 0.0
        for _ in range(_ROUNDS):
            picks = self._minimize_within(limit, mu, rate)
            yield picks
            # The update is damped, because otherwise μ would alternate between two values.
            mu = (mu + self.total(picks).trace) / 2

    def _minimize_within(self, limit: int, mu: float, rate: float) -> OptionIndices:
        """Returns a choice within the limit that minimises the sum of the contributions of all blocks.

        The contributions include a price per byte. The smallest price at which the choice is within the limit is used.
        """
        picks = self.smallest()
        low, high = 1e-24, 1.0
        for _ in range(_PRICES):
            price = (low * high) ** 0.5
            candidate = self._minimize_at_price(picks, price, mu, rate)
            if self.total(candidate).nbytes <= limit:
                picks, high = candidate, price
            else:
                low = price
        return picks

    def _minimize_at_price(self, start: OptionIndices, price: float, mu: float, rate: float) -> OptionIndices:
        """Minimises the sum of the contributions of all blocks at a given price per byte.

        Improves the options of one block at a time until no option is better or a maximum number of passes is reached.
        """
        picks = list(start)
        for _ in range(_SWEEPS):
            before = tuple(picks)
            for change in self._changes:
                lost, trace, along = self._losses(change, picks)
                cost = 2 * lost + 2 * mu * trace + rate * along + price * change.nbytes
                change.apply(int(cost.argmin()), picks)
            if tuple(picks) == before:
                break
        return tuple(picks)

    def _use_remaining_bytes(self, start: OptionIndices, limit: int, rate: float) -> OptionIndices:
        """Changes the options of one block at a time, as long as the error decreases and the size is within the limit.

        The block whose change reduces the error most per added byte is changed first.
        """
        picks = list(start)
        while True:
            total = self.total(tuple(picks))
            current = _objective(total.lost, total.trace, total.along, rate)
            best_gain, best = 0.0, None
            for change in self._changes:
                losses, index = self._losses(change, picks), change.index(picks)
                others = np.array([total.lost, total.trace, total.along]) - losses[_at_index(index)]
                lost, trace, along = losses + others[:, None, None]
                error = _objective(lost, trace, along, rate)
                added = change.nbytes - change.nbytes[index]
                gain = np.where(total.nbytes + added <= limit, (current - error) / np.maximum(added, 1), -inf)
                option = int(gain.argmax())
                # The tolerance prevents an endless loop due to rounding errors.
                if gain.flat[option] > best_gain and error.flat[option] < current * (1 - 1e-9):
                    best_gain, best = float(gain.flat[option]), (change, option)
            if best is None:
                return tuple(picks)
            change, option = best
            change.apply(option, picks)

    def _option_change(self, groups: tuple[int, ...]) -> OptionChange:
        first, second = groups[0], groups[-1]
        tables = [table for table in self._tables if {first, second} & set(table[0])]
        if first == second:
            return OptionChange(first, None, self._bytes[first][:, None], tables)
        return OptionChange(first, second, self._bytes[first][:, None] + self._bytes[second], tables)

    def _losses(self, change: OptionChange, picks: list[int]) -> NDArray[np.float64]:
        """Returns the total errors of all blocks that a change affects, for each combination of its options.

        The groups that the change does not affect have the options in `picks`. The shape of the result is (3, options
        of the first group, options of the second group or 1).
        """
        rows, columns = change.nbytes.shape
        free = {change.first: np.arange(rows)[:, None], change.second: np.arange(columns)}
        total = np.zeros((3, rows, columns))
        for groups, losses in change.tables:
            shape = (3, rows if change.first in groups else 1, columns if change.second in groups else 1)
            total += losses[_at_index(tuple(free.get(group, picks[group]) for group in groups))].reshape(shape)
        return total


@dataclass(frozen=True)
class OptionChange:
    """A change of the options for both groups of a block, or for the only group of a block."""

    first: int
    """Index of the first group."""
    second: int | None
    """Index of the second group, or None if the block has only one group."""
    nbytes: NDArray[np.float64]
    """Size in bytes of each combination: one row per option of the first group, one column per option of the second."""
    tables: Sequence[tuple[tuple[int, ...], NDArray[np.float64]]]
    """For each affected block, the indices of its groups and the table of its errors."""

    def index(self, picks: Sequence[int]) -> tuple[int, int]:
        """Returns the index in `nbytes` of the options in `picks`."""
        return picks[self.first], 0 if self.second is None else picks[self.second]

    def apply(self, option: int, picks: list[int]) -> None:
        """Sets the options in `picks` to the combination with index `option` in the flattened `nbytes`."""
        row, column = divmod(option, self.nbytes.shape[1])
        picks[self.first] = row
        if self.second is not None:
            picks[self.second] = column


def _objective(lost: Any, trace: Any, along: Any, rate: float) -> Any:
    """Computes the objective, 2 ‖G − G'‖² + (tr(G − G'))² + κ |<G − G', G>|. The errors may be numbers or arrays."""
    return 2 * lost + trace**2 + rate * along


def _at_index(index: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns an index into a table of errors that selects all three errors for the given options."""
    return (slice(None), *index)
