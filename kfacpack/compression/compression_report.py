"""Exact compression errors, computed without forming Kronecker products, and reports on sizes and errors.

A block is G = Σ_t w_t ⊗_k M_kt, where t runs over its terms and k over the sides of the product. The sides are B and A,
or G alone if the block is a single matrix. Let N be the compressed matrices, D = M − N, and G' the compressed block.
The difference of the products in one term is the telescoping sum

    ⊗_k M_k − ⊗_k N_k  =  Σ_k  N_1 ⊗ … ⊗ N_{k−1} ⊗ D_k ⊗ M_{k+1} ⊗ …

The inner product of two Kronecker products is the product of the inner products of their factors. Therefore,
‖G − G'‖² follows from the inner products of M, N and D on each side. None of the terms is a small difference of large
numbers, so rounding errors are small.
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
    from collections.abc import Callable, Mapping

    from kfacpack.compression.codecs import CodecChain
    from kfacpack.curvature.blocks import CurvatureBlock
    from kfacpack.curvature.matrices.matrix import Matrix

    EncodedMatrices = Mapping[int, tuple[CodecChain, Matrix]]
    """The applied steps and the compressed matrix, by the id of each original matrix."""
    QuadraticPair = tuple[float, float]
    """Values of `quadratic` on a task vector, before and after compression."""
    Measure = Callable[[CurvatureBlock, CurvatureBlock], QuadraticPair]
    """A function that computes `quadratic` of a block on a task vector, before and after compression."""
    FactorPairs = Mapping[tuple[int, ...], "FactorPair"]
    """The inner products on each side of a block, by the ids of the original matrices on that side."""


_PANEL = 2**18
"""Number of values of each matrix that are converted to float64 at a time, to save memory."""


@dataclass(frozen=True)
class Moments:
    """Squared norms and traces of a curvature or block G and of its error G − G', where G' is the compressed G.

    The moments of a curvature are the sums of the moments of its blocks.
    """

    size: float = 0.0
    """‖G‖²."""
    trace: float = 0.0
    """tr(G)."""
    lost: float = 0.0
    """‖G − G'‖²."""
    lost_trace: float = 0.0
    """tr(G − G')."""
    lost_along: float = 0.0
    """|<G − G', G>|."""

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
        """Relative error in the Frobenius norm, ‖G − G'‖ / ‖G‖, where G' is the compressed G."""
        return _ratio(self.lost, self.size)

    @property
    def quadratic(self) -> float:
        """Relative error of `quadratic` on random τ ~ N(0, I).

        This is the root mean square of τᵀ (G − G') τ, divided by the root mean square of τᵀ G τ. Both follow from
        E[(τᵀ M τ)²] = 2 ‖M‖² + (tr M)², which holds for every symmetric matrix M, so no random τ is drawn.
        """
        return _ratio(2 * self.lost + self.lost_trace**2, 2 * self.size + self.trace**2)

    @property
    def along(self) -> float:
        """Relative error of the mean of `quadratic` over τ ~ N(0, G), |<G − G', G>| / ‖G‖².

        Training moves a model mostly in directions of large curvature, so such τ resemble real task vectors more than
        isotropic noise does. The absolute errors of the blocks are added, so errors of different blocks do not cancel.
        """
        return self.lost_along / self.size if self.size > 0 else 0.0


def _ratio(lost: float, total: float) -> float:
    return sqrt(max(lost, 0.0) / total) if total > 0 else 0.0


@dataclass(frozen=True)
class FactorPair:
    """Inner products and traces of the matrices on one side of a block with T terms, such as the factors B.

    M_t are the original matrices, N_t are the compressed matrices, and D_t = M_t − N_t. Leading dimensions of the
    tensors index alternative choices of the N_t.
    """

    gram: Tensor
    """Inner products of M_1 … M_T and D_1 … D_T, of shape (..., 2T, 2T), in float64."""
    traces: Tensor
    """Traces of M_1 … M_T and D_1 … D_T, of shape (..., 2T), in float64."""

    @classmethod
    def stack(cls, sides: Sequence[FactorPair]) -> FactorPair:
        """Stacks alternative choices of the compressed matrices along a new first dimension."""
        return cls(torch.stack([side.gram for side in sides]), torch.stack([side.traces for side in sides]))

    def inner(self) -> Tensor:
        """Returns the inner products of M_1 … M_T, D_1 … D_T and N_1 … N_T, of shape (..., 3, T, 3, T)."""
        basis = self._basis()
        inner: Tensor = (basis @ self.gram @ basis.T).unflatten(-1, (3, -1)).unflatten(-3, (3, -1))
        return inner

    def trace(self) -> Tensor:
        """Returns the traces of M_1 … M_T, D_1 … D_T and N_1 … N_T, of shape (..., 3, T)."""
        traces: Tensor = (self.traces @ self._basis().T).unflatten(-1, (3, -1))
        return traces

    def _basis(self) -> Tensor:
        """Returns the coefficients (3T, 2T) that express M, D and N = M − D in terms of M and D."""
        identity = torch.eye(self.traces.shape[-1], dtype=torch.float64)
        before, lost = identity.chunk(2)
        return torch.cat([identity, before - lost])


M, D, N = range(3)
"""Indices of the original matrices M, the differences D and the compressed matrices N in `FactorPair.inner`."""


def compare(before: Sequence[Matrix], after: Sequence[Matrix]) -> FactorPair:
    """Computes the inner products and traces of the original matrices and of the errors of their compression.

    Args:
        before: The original matrices on one side of a block, one per term. All of them are unpacked at once.
        after: The compressed matrices, one per term.

    Returns:
        The inner products and traces.
    """
    only_diagonals = all(matrix.structure == "diagonal" for matrix in (*before, *after))

    def unpacked(matrix: Matrix, dtype: torch.dtype) -> Tensor:
        return matrix.float_values(dtype)[:, None] if only_diagonals else matrix.dense(dtype)

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
    """Computes norms and traces of a block G = Σ_t weights[t] · B_t ⊗ A_t, or of a single matrix G, and of the error.

    Args:
        weights: Weight of each term, or (1.0,) if G is a single matrix.
        sides: Inner products of the matrices B and of the matrices A, or of the single matrix.

    Returns:
        The norms and traces of the original block and of its compression error.
    """
    return Moments(*(float(moment) for moment in moment_table(weights, sides)))


def moment_table(
    weights: Sequence[float], sides: Sequence[FactorPair]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes the moments of a block for every combination of alternative compressed matrices; see `moments`.

    Args:
        weights: Weight of each term, or (1.0,) if G is a single matrix.
        sides: Inner products of the matrices B and of the matrices A, or of the single matrix. The leading dimensions,
            which index the alternatives, are broadcast.

    Returns:
        The fields of `Moments` in order, each as a tensor with the broadcast leading dimensions.
    """
    w = torch.tensor(weights, dtype=torch.float64)
    inner, traces = [side.inner() for side in sides], [side.trace() for side in sides]
    # Term k of the telescoping sum has N on the sides before k, D on side k, and M on the sides after it.
    steps = [[N] * k + [D] + [M] * (len(sides) - k - 1) for k in range(len(sides))]
    whole = [M] * len(sides)

    def norm(left: list[int], right: list[int]) -> Tensor:
        grams = [gram[..., i, :, j, :] for gram, i, j in zip(inner, left, right, strict=True)]
        return prod(grams[1:], start=grams[0]) @ w @ w

    def trace(step: list[int]) -> Tensor:
        factors = [side_traces[..., i, :] for side_traces, i in zip(traces, step, strict=True)]
        return prod(factors[1:], start=factors[0]) @ w

    lost = reduce(add, (norm(left, right) for left, right in product(steps, steps)))
    along = reduce(add, (norm(step, whole) for step in steps))
    return norm(whole, whole), trace(whole), lost.clamp(min=0), reduce(add, map(trace, steps)), along.abs()


@dataclass(frozen=True)
class BlockCompressionReport:
    """Sizes and errors of one compressed block."""

    name: str
    """Name of the block."""
    step: str | None
    """The codec of the matrices, or their codecs separated by commas; None if the block is unchanged."""
    kept: tuple[str, ...]
    """Roles, such as "B", of the matrices that are unchanged because no step made them smaller."""
    bytes: int
    """Size of the block's matrices in a file, in bytes. Matrices shared with an earlier block are not included."""
    dense_bytes: int
    """Size of the same matrices in dense float32, in bytes. Diagonal matrices count as vectors."""
    moments: Moments
    """Norms, traces and errors of the block."""
    on_vector: QuadraticPair | None = None
    """Values of `quadratic` on a task vector before and after compression, or None if no vector was passed."""


@dataclass(frozen=True)
class CompressionReport:
    """Sizes and errors of a compressed curvature."""

    blocks: tuple[BlockCompressionReport, ...]
    """One report per block."""

    @property
    def bytes(self) -> int:
        """Size of all matrices in a file, in bytes."""
        return sum(block.bytes for block in self.blocks)

    @property
    def dense_bytes(self) -> int:
        """Size of all matrices in dense float32, in bytes. Diagonal matrices count as vectors."""
        return sum(block.dense_bytes for block in self.blocks)

    @property
    def moments(self) -> Moments:
        """Norms, traces and errors of the whole curvature."""
        return sum((block.moments for block in self.blocks), Moments())

    @property
    def on_vector(self) -> QuadraticPair | None:
        """Values of `quadratic` on a task vector before and after compression, or None if no vector was passed."""
        values = [block.on_vector for block in self.blocks if block.on_vector is not None]
        return (sum(before for before, _ in values), sum(after for _, after in values)) if values else None


def relative_error(pair: QuadraticPair | None) -> float | None:
    """Returns |q' − q| / |q| for a pair (q, q') of values before and after compression.

    Returns None if `pair` is None or q is zero.
    """
    return abs(pair[1] - pair[0]) / abs(pair[0]) if pair and pair[0] else None


def assemble_report(
    block: CurvatureBlock, encoded: EncodedMatrices, sides: FactorPairs, counted: set[int], measure: Measure | None
) -> tuple[CurvatureBlock, BlockCompressionReport]:
    """Builds a compressed block, which records its approximation errors, and a report on it.

    Args:
        block: The original block.
        encoded: The compressed matrices, by the ids of the original matrices.
        sides: The inner products on each side, by the ids of the original matrices on that side.
        counted: Ids of the compressed matrices in earlier blocks. The function adds the ids of those in this block.
        measure: Function that computes `quadratic` on a task vector for the block before and after compression. If it
            is None, `quadratic` is not measured.

    Returns:
        The compressed block and the report on it.
    """
    structure = block.structure.map_matrices(lambda matrix: encoded[id(matrix)][1])
    on_vector = measure(block, replace(block, structure=structure)) if measure else None
    errors = moments(block.structure.weights, [sides[tuple(map(id, side))] for side in block.structure.sides])
    chains = {role: encoded[id(matrix)][0] for role, matrix in block.structure.matrices()}
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
        moments=errors,
        on_vector=on_vector,
    )
    losses = (*block.losses, _loss(step, errors, on_vector)) if step else block.losses
    return replace(block, structure=structure, losses=losses), report


def finish_report(
    before: Curvature, blocks: Sequence[CurvatureBlock], reports: Sequence[BlockCompressionReport], name: str
) -> tuple[Curvature, CompressionReport]:
    """Builds the compressed curvature, which records its total approximation errors, and a report on it.

    Args:
        before: The original curvature.
        blocks: The compressed blocks.
        reports: One report per block.
        name: Name under which the errors are recorded, such as the codec.

    Returns:
        The compressed curvature and the report on it.
    """
    report, about = CompressionReport(tuple(reports)), before.about
    if any(block.step for block in reports):
        losses = (*about.losses, _loss(name, report.moments, report.on_vector))
        about = about.model_copy(update={"losses": losses})
    return Curvature(blocks, about), report


def _loss(step: str, errors: Moments, on_vector: QuadraticPair | None) -> Loss:
    return Loss.measured(step, frobenius=errors.frobenius, quadratic=errors.quadratic, vector=relative_error(on_vector))


def dense_bytes(matrix: Matrix) -> int:
    """Returns the size of a matrix in dense float32, in bytes. A diagonal matrix counts as a vector."""
    return 4 * LAYOUTS[matrix.form].full(matrix.side)
