"""What a codec loses, exactly, without ever building a Kronecker product.

A block is G = Σ_t w_t ⊗_k M_kt, k over the sides of the product (B and A; a dense G has one side), t over its terms.
With N the matrices that a codec made of the M, and D = M − N, the difference telescopes,

    ⊗_k M_k − ⊗_k N_k  =  Σ_k  N_1 ⊗ … ⊗ N_{k−1} ⊗ D_k ⊗ M_{k+1} ⊗ …

and inner products of Kronecker products are products of inner products. So ‖G − G'‖² follows from the inner products of
M, N and D on each side, and none of its terms is a small difference of large numbers.

What compression made of a curvature, block by block and as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from math import prod, sqrt
from operator import add
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfacpack.curvature.curvature import Curvature
from kfacpack.format.manifest import Loss
from kfacpack.format.schema import LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kfacpack.compression.chain import CodecChain
    from kfacpack.curvature.blocks import CurvatureBlock
    from kfacpack.curvature.matrices.matrix import Matrix

    EncodedMatrices = Mapping[int, tuple[CodecChain, Matrix]]

    """For the id of a matrix as it was, the steps that were taken and what they made of it."""

    VectorError = tuple[float, float]

    """`quadratic` on a task vector, before and after."""

    Measure = Callable[[CurvatureBlock, CurvatureBlock], VectorError]

    FactorPairs = Mapping[tuple[int, ...], "FactorPair"]

    """For the ids of the matrices on one side of a block as they were, what is known of them."""


_PANEL = 2**18
"""How many numbers of each matrix are looked at in one go, in float64."""


@dataclass(frozen=True)
class Moments:
    """Of G and of what was lost of it. Those of several blocks add up to those of the whole."""

    size: float = 0.0
    """‖G‖²"""
    trace: float = 0.0
    lost: float = 0.0
    """‖G − G'‖²"""
    lost_trace: float = 0.0
    """tr(G − G')"""
    lost_along: float = 0.0
    """|<G − G', G>|"""

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.size + other.size,
            self.trace + other.trace,
            self.lost + other.lost,
            self.lost_trace + other.lost_trace,
            self.lost_along + other.lost_along,
        )

    @property
    def frobenius(self) -> float:
        """‖G − G'‖ / ‖G‖."""
        return _ratio(self.lost, self.size)

    @property
    def quadratic(self) -> float:
        """The relative error of `quadratic` on random τ: the root mean square of q(τ) − q'(τ) over that of q(τ).

        For τ ~ N(0, I), E[(τᵀ M τ)²] = 2 ‖M‖² + (tr M)²: what any number of random τ would tell, without drawing one.
        """
        return _ratio(2 * self.lost + self.lost_trace**2, 2 * self.size + self.trace**2)

    @property
    def along(self) -> float:
        """The relative error of the mean of `quadratic` on τ ~ N(0, G), where E[τᵀ M τ] = <M, G>.

        Training moves a model mostly in directions of large curvature, so this is nearer to real task vectors than
        random ones are. No block makes up for another.
        """
        return self.lost_along / self.size if self.size > 0 else 0.0


def _ratio(lost: float, of: float) -> float:
    return sqrt(max(lost, 0.0) / of) if of > 0 else 0.0


@dataclass(frozen=True)
class FactorPair:
    """One side of a block with T terms: the M_t as they were, the N_t that they became, and D_t = M_t − N_t.

    Several ways to make the N_t may stand beside each other, as leading dimensions.
    """

    gram: Tensor
    """Inner products of M_1 … M_T, D_1 … D_T, (..., 2T, 2T), float64."""
    traces: Tensor
    """(..., 2T), float64."""

    @classmethod
    def stack(cls, sides: Sequence[FactorPair]) -> FactorPair:
        return cls(torch.stack([side.gram for side in sides]), torch.stack([side.traces for side in sides]))

    def inner(self) -> Tensor:
        """Inner products of M_1 … M_T, D_1 … D_T, N_1 … N_T, (..., 3, T, 3, T)."""
        rows = self._changes()
        found: Tensor = (rows @ self.gram @ rows.T).unflatten(-1, (3, -1)).unflatten(-3, (3, -1))
        return found

    def trace(self) -> Tensor:
        """(..., 3, T)"""
        found: Tensor = (self.traces @ self._changes().T).unflatten(-1, (3, -1))
        return found

    def _changes(self) -> Tensor:
        """How M, D and N are made of M and D, (3T, 2T)."""
        basis = torch.eye(self.traces.shape[-1], dtype=torch.float64)
        before, lost = basis.chunk(2)
        return torch.cat([basis, before - lost])


M, D, N = range(3)


def compare(before: Sequence[Matrix], after: Sequence[Matrix]) -> FactorPair:
    """One side of a block before and after. All of its matrices are unpacked at once; diagonals stay vectors."""
    only_diagonals = all(matrix.structure == "diagonal" for matrix in (*before, *after))

    def unpacked(matrix: Matrix, dtype: torch.dtype) -> Tensor:
        return matrix.numbers(dtype)[:, None] if only_diagonals else matrix.dense(dtype)

    full = [unpacked(matrix, torch.promote_types(torch.float32, matrix.dtype)) for matrix in before]
    lost = [
        torch.zeros_like(values) if old is new else values - unpacked(new, values.dtype)
        for values, old, new in zip(full, before, after, strict=True)
    ]
    vectors = [*full, *lost]
    gram = torch.zeros((len(vectors), len(vectors)), dtype=torch.float64)
    rows = max(1, _PANEL // vectors[0].shape[1])
    for start in range(0, vectors[0].shape[0], rows):
        panel = torch.stack([values[start : start + rows].reshape(-1).double() for values in vectors])
        gram += panel @ panel.T
    on_diagonal = (values if only_diagonals else values.diagonal() for values in vectors)
    return FactorPair(gram, torch.stack([values.double().sum() for values in on_diagonal]))


def moments(weights: Sequence[float], sides: Sequence[FactorPair]) -> Moments:
    """Of a block: G = Σ_t weights[t] ⊗ over the sides."""
    return Moments(*(float(each) for each in moment_table(weights, sides)))


def moment_table(
    weights: Sequence[float], sides: Sequence[FactorPair]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The numbers of `Moments` in their order, in the shape that the sides' leading dimensions broadcast to."""
    w = torch.tensor(weights, dtype=torch.float64)
    inner, traces = [side.inner() for side in sides], [side.trace() for side in sides]
    # Step k of the telescope has N on the sides before k, D on side k, M behind it.
    steps = [[N] * k + [D] + [M] * (len(sides) - k - 1) for k in range(len(sides))]
    whole = [M] * len(sides)

    def norm(left: list[int], right: list[int]) -> Tensor:
        grams = [gram[..., i, :, j, :] for gram, i, j in zip(inner, left, right, strict=True)]
        return prod(grams[1:], start=grams[0]) @ w @ w

    def trace(step: list[int]) -> Tensor:
        found = [each[..., i, :] for each, i in zip(traces, step, strict=True)]
        return prod(found[1:], start=found[0]) @ w

    lost = reduce(add, (norm(left, right) for left, right in product(steps, steps)))
    along = reduce(add, (norm(step, whole) for step in steps))
    return norm(whole, whole), trace(whole), lost.clamp(min=0), reduce(add, map(trace, steps)), along.abs()


@dataclass(frozen=True)
class BlockCompressionReport:
    name: str
    step: str | None
    """The codec, or those of its matrices in turn; None if the block is as it was."""
    kept: tuple[str, ...]
    """The roles of its matrices that are as they were: no step made them smaller."""
    bytes: int
    """Of its matrices in a file, without those that a block before it brings along."""
    dense_bytes: int
    """The same as full float32; diagonals as they are."""
    moments: Moments
    real: VectorError | None = None


@dataclass(frozen=True)
class CompressionReport:
    blocks: tuple[BlockCompressionReport, ...]

    @property
    def bytes(self) -> int:
        return sum(block.bytes for block in self.blocks)

    @property
    def dense_bytes(self) -> int:
        return sum(block.dense_bytes for block in self.blocks)

    @property
    def moments(self) -> Moments:
        return sum((block.moments for block in self.blocks), Moments())

    @property
    def real(self) -> VectorError | None:
        values = [block.real for block in self.blocks if block.real is not None]
        return (sum(before for before, _ in values), sum(after for _, after in values)) if values else None


def relative_error(real: VectorError | None) -> float | None:
    """|q' − q| / |q|; None where q is not known, or zero."""
    return abs(real[1] - real[0]) / abs(real[0]) if real and real[0] else None


def assemble_report(
    block: CurvatureBlock, made: EncodedMatrices, sides: FactorPairs, counted: set[int], measure: Measure | None
) -> tuple[CurvatureBlock, BlockCompressionReport]:
    """A block of the matrices that were made for it, its loss written into it; `counted` are those others brought."""
    structure = block.structure.replaced(lambda matrix: made[id(matrix)][1])
    real = measure(block, replace(block, structure=structure)) if measure else None
    found = moments(block.structure.weights, [sides[tuple(map(id, side))] for side in block.structure.sides])
    chains = {role: made[id(matrix)][0] for role, matrix in block.structure.matrices()}
    changed = any(chain.steps for chain in chains.values())
    step = ", ".join(dict.fromkeys(map(str, chains.values()))) if changed else None
    own = {id(matrix): matrix for _, matrix in structure.matrices() if id(matrix) not in counted}
    counted.update(own)
    report = BlockCompressionReport(
        name=block.name,
        step=step,
        kept=tuple(role for role, chain in chains.items() if not chain.steps),
        bytes=sum(matrix.for_storage().nbytes for matrix in own.values()),
        dense_bytes=sum(dense_bytes(matrix) for matrix in own.values()),
        moments=found,
        real=real,
    )
    losses = (*block.losses, _loss(step, found, real)) if step else block.losses
    return replace(block, structure=structure, losses=losses), report


def finish_report(
    before: Curvature, blocks: Sequence[CurvatureBlock], reports: Sequence[BlockCompressionReport], name: str
) -> tuple[Curvature, CompressionReport]:
    """The whole of what was assembled, with the loss of the whole."""
    report, about = CompressionReport(tuple(reports)), before.about
    if any(block.step for block in reports):
        losses = (*about.losses, _loss(name, report.moments, report.real))
        about = about.model_copy(update={"losses": losses})
    return Curvature(blocks, about), report


def _loss(step: str, found: Moments, real: VectorError | None) -> Loss:
    return Loss.measured(step, frobenius=found.frobenius, quadratic=found.quadratic, vector=relative_error(real))


def dense_bytes(matrix: Matrix) -> int:
    """What a matrix would take as full float32; a diagonal as it is."""
    return 4 * LAYOUTS[matrix.form].full(matrix.side)
