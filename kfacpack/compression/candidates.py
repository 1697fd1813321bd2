"""The codecs that come into question for each matrix, and what each of them costs and loses.

Matrices that stand on one side of a block with several terms get one codec together, a *family*: what they lose depends
on all of them at once. In a curvature of one task every matrix is a family of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from kfacpack.compression.chain import CodecChain
from kfacpack.compression.codecs import float_type
from kfacpack.compression.compression_report import FactorPair, compare, moment_table
from kfacpack.curvature.matrices.components import InMemoryTensors, MatrixTensors
from kfacpack.curvature.matrices.dense import Dense

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from kfacpack.curvature.blocks import CurvatureBlock
    from kfacpack.curvature.curvature import Curvature
    from kfacpack.curvature.matrices.matrix import Matrix
    from kfacpack.format.container import Spec


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
"""Beside leaving a matrix as it is. Codecs of structure in float32 are left out: for the same bytes, one that keeps
twice as much in two bytes a number loses less."""


class ShapeOnly(MatrixTensors):
    """What a matrix's tensors would look like. There are none."""

    def __init__(self, specs: Mapping[str, Spec]):
        self.specs = specs

    def __getitem__(self, name: str) -> Tensor:
        raise TypeError(f"{name!r} of an outline has no numbers")


@dataclass(frozen=True)
class Option:
    """One codec for a family."""

    asked: CodecChain
    made: Mapping[int, tuple[CodecChain, Matrix]]
    """For the id of each matrix, the steps taken and the outline of what they make."""
    sides: Mapping[tuple[int, ...], FactorPair]
    nbytes: int


@dataclass(frozen=True)
class MatrixGroup:
    options: tuple[Option, ...]
    answers: Mapping[CodecChain, int]
    """Which option each candidate comes to: several may do the same to these matrices."""


@dataclass(frozen=True)
class ErrorTable:
    """What a block loses, by the options of the family on each of its sides."""

    families: tuple[int, ...]
    moments: tuple[Tensor, ...]
    """See `moment_table`."""


@dataclass(frozen=True)
class Candidates:
    families: tuple[MatrixGroup, ...]
    tables: tuple[ErrorTable, ...]

    @classmethod
    def of(cls, curvature: Curvature, progress: Callable[[int, int], None]) -> Candidates:
        """Every candidate, tried on every matrix. What they make is not kept."""
        groups = _groups(curvature)
        families = []
        for number, (matrices, sides) in enumerate(groups):
            progress(number, len(groups))
            families.append(_family(matrices, sides))
        progress(len(groups), len(groups))
        home = {id(matrix): number for number, (matrices, _) in enumerate(groups) for matrix in matrices}
        return cls(tuple(families), tuple(_table(block, families, home) for block in curvature.blocks))


def _groups(curvature: Curvature) -> list[tuple[list[Matrix], list[tuple[Matrix, ...]]]]:
    """The matrices of each family, and the sides of blocks that they stand on."""
    sides = {tuple(map(id, side)): side for block in curvature.blocks for side in block.structure.sides}
    home: dict[int, int] = {}
    for number, key in enumerate(sides):
        joined = {home[each] for each in key if each in home}
        home |= dict.fromkeys(key, number)
        home = {each: number if place in joined else place for each, place in home.items()}
    found: dict[int, tuple[dict[int, Matrix], list[tuple[Matrix, ...]]]] = {}
    for side in sides.values():
        matrices, places = found.setdefault(home[id(side[0])], ({}, []))
        matrices |= {id(matrix): matrix for matrix in side}
        places.append(side)
    return [(list(matrices.values()), places) for matrices, places in found.values()]


def _family(matrices: list[Matrix], sides: list[tuple[Matrix, ...]]) -> MatrixGroup:
    found: dict[tuple[CodecChain, ...], Option] = {}
    answers: dict[CodecChain, int] = {}
    opened = {id(matrix): _cached_dense(matrix) for matrix in matrices}
    for chain in (CodecChain(), *CANDIDATES):
        made = {key: chain.encode(matrix) for key, matrix in opened.items()}
        taken = tuple(steps for steps, _ in made.values())
        if taken not in found:
            keys = [tuple(map(id, side)) for side in sides]
            measured = {key: compare([opened[k] for k in key], [made[k][1] for k in key]) for key in keys}
            outlines = {key: (steps, _outline(matrix.for_storage())) for key, (steps, matrix) in made.items()}
            size = sum(outline.nbytes for _, outline in outlines.values())
            found[taken] = Option(chain, outlines, measured, size)
        answers[chain] = list(found).index(taken)
    return MatrixGroup(tuple(found.values()), answers)


class CachedDense(Dense):
    """A matrix that many candidates are tried on: unpacked and decomposed once, and not for each of them."""

    @cached_property
    def _found(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {}

    def leading(self, width: int) -> tuple[Tensor, Tensor]:
        if width not in self._found:
            self._found[width] = super().leading(width)
        return self._found[width]


def _cached_dense(matrix: Matrix) -> Matrix:
    if matrix.form not in ("packed", "dense"):
        return matrix  # which is small already, and quick to unpack
    full = InMemoryTensors(data=matrix.dense(float_type(matrix)))
    return CachedDense(matrix.side, full, psd=matrix.psd, examples=matrix.examples, positions=matrix.positions)


def _outline(matrix: Matrix) -> Matrix:
    components = ShapeOnly(dict(matrix.components.specs))
    return type(matrix)(matrix.side, components, psd=matrix.psd, examples=matrix.examples, positions=matrix.positions)


def _table(block: CurvatureBlock, found: list[MatrixGroup], home: Mapping[int, int]) -> ErrorTable:
    keys = [tuple(map(id, side)) for side in block.structure.sides]
    families = tuple(home[key[0]] for key in keys)
    sides = [
        _spread_options(FactorPair.stack([option.sides[key] for option in found[family].options]), place, len(keys))
        for place, (key, family) in enumerate(zip(keys, families, strict=True))
    ]
    return ErrorTable(families, moment_table(block.structure.weights, sides))


def _spread_options(side: FactorPair, place: int, count: int) -> FactorPair:
    """Its options along dimension `place` of `count`."""
    shape = [1] * count
    shape[place] = -1
    return FactorPair(
        side.gram.reshape(*shape, *side.gram.shape[1:]), side.traces.reshape(*shape, *side.traces.shape[1:])
    )
