"""Candidate codecs for each matrix of a curvature, with their sizes and errors.

Matrices on the same side of a block with several terms form a *group* and share one codec, because their error depends
on all of them jointly. In the curvature of a single task, every matrix is a group of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from kfacpack.compression.codecs import CodecChain, float_type
from kfacpack.compression.compression_report import FactorPair, compare, moment_table
from kfacpack.curvature.matrices.components import InMemoryTensors, MatrixTensors
from kfacpack.curvature.matrices.dense import Dense

if TYPE_CHECKING:
    from collections.abc import Mapping

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
"""Codecs that are tried in addition to no compression. Structural codecs in float32 are not included: for the same
size, keeping twice as many values in two bytes each has a smaller error."""


class ShapeOnly(MatrixTensors):
    """Components that have a dtype and a shape, but no values."""

    def __init__(self, specs: Mapping[str, Spec]):
        self.specs = specs

    def __getitem__(self, name: str) -> Tensor:
        raise TypeError(f"component {name!r} has a shape but no values")


@dataclass(frozen=True)
class Option:
    """One codec for a group of matrices."""

    chain: CodecChain
    """The codec that was requested."""
    encoded: Mapping[int, tuple[CodecChain, Matrix]]
    """By the id of each matrix, the steps that were applied and the result, of which only the shapes are kept."""
    sides: Mapping[tuple[int, ...], FactorPair]
    """By the ids of the matrices on one side of a block, the inner products before and after compression."""
    nbytes: int
    """Size of the group in a file."""


@dataclass(frozen=True)
class MatrixGroup:
    """The distinct options of a group of matrices."""

    options: tuple[Option, ...]
    """The first option leaves the matrices unchanged."""
    option_of: Mapping[CodecChain, int]
    """Index of the option that each candidate results in; several candidates may have the same result."""


@dataclass(frozen=True)
class ErrorTable:
    """The error of a block for every combination of options of the groups on its sides."""

    groups: tuple[int, ...]
    """Index of the group on each side."""
    moments: tuple[Tensor, ...]
    """See `moment_table`; each has one dimension per side."""


@dataclass(frozen=True)
class Candidates:
    """All groups of a curvature with their options, and the errors of all blocks."""

    groups: tuple[MatrixGroup, ...]
    """One entry per group of matrices."""
    tables: tuple[ErrorTable, ...]
    """One entry per block."""

    @classmethod
    def of(cls, curvature: Curvature, on_progress: OnProgress) -> Candidates:
        """Tries every candidate on every matrix, without keeping the compressed matrices.

        Args:
            curvature: The curvature to compress.
            on_progress: Called with the number of groups done and their total.

        Returns:
            Sizes and errors of all candidates.
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
    """Returns for each group its matrices and the sides of blocks that they are on."""
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
    """A dense matrix that caches its eigenpairs, which many candidates use."""

    @cached_property
    def _eigenpairs(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {}

    def leading_eigenpairs(self, width: int) -> tuple[Tensor, Tensor]:
        """Returns the eigenpairs of largest magnitude, computed once per width."""
        if width not in self._eigenpairs:
            self._eigenpairs[width] = super().leading_eigenpairs(width)
        return self._eigenpairs[width]


def _cached_dense(matrix: Matrix) -> Matrix:
    if matrix.form not in ("packed", "dense"):
        return matrix  # other forms are small and quick to unpack
    full = InMemoryTensors(data=matrix.dense(float_type(matrix)))
    return CachedDense(matrix.side, full, psd=matrix.psd, examples=matrix.examples, positions=matrix.positions)


def _shapes_only(matrix: Matrix) -> Matrix:
    """Returns the matrix with shapes only."""
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
    """Moves the options of a side to dimension `dim` of `count` leading dimensions, for broadcasting."""
    shape = [1] * count
    shape[dim] = -1
    return FactorPair(
        side.gram.reshape(*shape, *side.gram.shape[1:]), side.traces.reshape(*shape, *side.traces.shape[1:])
    )
