"""Merges task vectors block by block in the metric that the curvatures of their tasks define.

Only one block of each vector is in memory at a time. Blocks that every vector stores as low-rank factors are merged in
the span of these factors, without forming a dense matrix. For such a block, the matrix of vector t is W_t = U_t V_t,
with U_t (rows, r_t) and V_t (r_t, columns). Let Q_U (rows, k) be an orthonormal basis of the span of the columns of all
U_t, and let Q_V (k', columns) be an orthonormal basis of the span of the rows of all V_t. Then every W_t is Q_U S_t Q_V
with a core S_t (k, k'). If the merged matrix W is restricted to the form Q_U S Q_V, the objective in `merging/solve.py`
has the same form as a function of the cores, with the Kronecker factors B' = Q_Uᵀ B Q_U and A' = Q_V A Q_Vᵀ. The
minimiser of this function gives the best merge within the span. The minimiser over all matrices would in general have
full rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfacpack.curvature.blocks import Kronecker, gather, scatter
from kfacpack.curvature.matrices.dense import Dense, OperatorCache
from kfacpack.format.vector_manifest import SolvedBlock
from kfacpack.merging.inputs import merge_ordered
from kfacpack.merging.solve import WIDE_SIDE, Solution, SolveTerm, solve_block
from kfacpack.vectors.methods.method import SolvedParameters
from kfacpack.vectors.parameter_change import concatenated

if TYPE_CHECKING:
    from kfacpack.curvature.blocks import BlockStructure, ParameterShapes
    from kfacpack.curvature.matrices.matrix import Matrix
    from kfacpack.format.manifest import Join, Piece
    from kfacpack.format.units import OnProgress
    from kfacpack.merging.solve import SolveSettings
    from kfacpack.vectors.bundle_matching import MatchedBundle
    from kfacpack.vectors.methods.method import MethodInput
    from kfacpack.vectors.parameter_change import Factors

    StructureMap = Callable[[BlockStructure], BlockStructure | None]
    """Function that maps the structure of G to the one that a method uses, or to None if the method cannot use G."""


@dataclass(frozen=True)
class FactoredBlock:
    """The matrices W_t = Q_U S_t Q_V of all vectors for one block, with bases that all vectors share."""

    join: Join
    shapes: ParameterShapes
    present: frozenset[str]
    """Names of the block's parameters that the vectors contain."""
    left: Tensor
    """Orthonormal basis Q_U, (rows, k)."""
    right: Tensor
    """Orthonormal basis Q_V, (k', columns)."""
    cores: tuple[Tensor, ...]
    """Core S_t of each vector, (k, k')."""

    @classmethod
    def of(
        cls, inputs: Sequence[MethodInput], join: Join, present: ParameterShapes, shapes: ParameterShapes
    ) -> FactoredBlock | None:
        """Joins the factors of a block's parameters, and expresses the matrices of all vectors in common bases.

        Args:
            inputs: The vectors.
            join: Position of each parameter in the matrix of the block.
            present: Shapes of the parameters that the vectors contain.
            shapes: Shapes of all parameters of the block.

        Returns:
            The block, or None if a parameter is dense in one of the vectors, or if the factors of all vectors together
            take at least as much space as the matrix. The bases are empty (k = 0) if no vector changes the block.
        """
        joined: list[Factors] = []
        for vector in inputs:
            pieces = []
            for piece in join.pieces:
                if piece.parameter in present:
                    pair = vector.factors(piece.parameter)
                    if pair is None:
                        return None
                    pieces.append(_place_factors(pair, piece, join, shapes))
            joined.append(concatenated(pieces))
        U, V = concatenated(joined)
        if U.shape[1] * (join.rows + join.columns) >= join.rows * join.columns:
            return None
        left, right = torch.linalg.qr(U).Q, torch.linalg.qr(V.T).Q.T
        cores = tuple((left.T @ u) @ (v @ right.T) for u, v in joined)
        names = frozenset(piece.parameter for piece in join.pieces if piece.parameter in present)
        return cls(join, shapes, names, left, right, cores)

    def solve(
        self, name: str, terms: Sequence[tuple[float, BlockStructure, Tensor]], settings: SolveSettings
    ) -> Solution:
        """Finds the core S that minimises the objective, and returns its difference from the core S_0 of the prior.

        Args:
            name: Name of the block.
            terms: Weight w_t, Kronecker structure of G_t, and S_t − S_0, for each summand of the objective.
            settings: Settings of the solver.

        Returns:
            S − S_0, (k, k'), and a report on the block.
        """
        if not self.left.shape[1]:  # no vector changes the block
            return Solution(self.cores[0], SolvedBlock(name=name, curvature=True))
        mean, reduced = 0.0, []
        for weight, structure, target in terms:
            products = []
            for own, B, A in zip(structure.weights, *structure.sides, strict=True):
                small_B, trace_B = _project(B, self.left)
                small_A, trace_A = _project(A, self.right.T)
                products.append((small_B, small_A, own))
                mean += weight * own * trace_B * trace_A / (self.join.rows * self.join.columns)
            reduced.append(SolveTerm(weight, Kronecker(tuple(products)), target))
        return solve_block(name, reduced, settings, mean=mean)

    def split(self, core: Tensor) -> Iterator[tuple[str, Factors]]:
        """Splits Q_U S Q_V into the parameters of the block, and yields the name and the factors U, V of each.

        Args:
            core: The core S, (k, k').
        """
        left, right = (
            (self.left @ core, self.right) if core.shape[0] > core.shape[1] else (self.left, core @ self.right)
        )
        for piece in self.join.pieces:
            if piece.parameter in self.present:
                yield piece.parameter, _extract_factors((left, right), piece, self.shapes)


def _place_factors(pair: Factors, piece: Piece, join: Join, shapes: ParameterShapes) -> Factors:
    """Returns the factors of a block's matrix, (rows, columns), in which only one parameter's entries are nonzero."""
    U, V = pair
    if piece.rows is not None:
        U = U[piece.rows[0] : piece.rows[1]]
    if piece.view == "transposed":
        U, V = V.T, U.T
    elif piece.view == "column" and V.shape[1] != 1:
        U, V = (U @ V).reshape(-1, 1), V.new_ones((1, 1))
    top, left = piece.at
    placed_U, placed_V = U.new_zeros((join.rows, U.shape[1])), V.new_zeros((len(V), join.columns))
    placed_U[top : top + len(U)] = U
    placed_V[:, left : left + V.shape[1]] = V
    return placed_U, placed_V


def _extract_factors(pair: Factors, piece: Piece, shapes: ParameterShapes) -> Factors:
    """Returns the factors of one parameter, given those of a block. Rows that the piece does not cover are zero."""
    shape = shapes[piece.parameter]
    height, width = piece.matrix_shape(shape)
    top, left = piece.at
    U, V = pair[0][top : top + height], pair[1][:, left : left + width]
    rows = shape[0] if shape else 1
    if piece.view == "transposed":
        U, V = V.T, U.T
    elif piece.view == "column":
        U = (U @ V).reshape(rows if piece.rows is None else piece.rows[1] - piece.rows[0], -1)
        V = torch.eye(U.shape[1], dtype=U.dtype)
    if piece.rows is not None:
        padded = U.new_zeros((rows, U.shape[1]))
        padded[piece.rows[0] : piece.rows[1]] = U
        U = padded
    return U, V


def _project(matrix: Matrix, basis: Tensor) -> tuple[Matrix, float]:
    """Returns Qᵀ M Q for an orthonormal basis Q (n, k), and the trace of M."""
    dtype = torch.float32 if matrix.side > WIDE_SIDE else torch.float64
    operator = matrix.operator(dtype, torch.device("cpu"))
    small = (basis.T @ operator(basis.to(dtype)).double()).double()
    trace = float(operator.diagonal(matrix.side).double().sum())
    return Dense.of((small + small.T) / 2, psd=matrix.psd), trace


@dataclass(frozen=True)
class BlockTask:
    """A block to be merged: its parameters, and the curvature for each vector."""

    name: str
    join: Join
    curvatures: Sequence[tuple[float, BlockStructure, int]]
    """Weight, G and index of the vector for each summand of the objective. Empty if there is no curvature."""


def block_tasks(
    bundles: Sequence[MatchedBundle], parameters: ParameterShapes, structure_of: StructureMap
) -> tuple[Iterator[BlockTask], int]:
    """Lists the bundles' blocks that contain at least one parameter of the vectors.

    Args:
        bundles: The bundles.
        parameters: Shapes of the vectors' parameters by name.
        structure_of: Function that maps the structure of a block's G to the structure that the method uses.

    Returns:
        An iterator over the blocks, and the number of blocks.
    """
    names = merge_ordered([list(bundle.input.blocks) for bundle in bundles])
    first = {name: block for bundle in reversed(bundles) for name, block in bundle.input.blocks.items()}
    used = [name for name in names if any(parameter in parameters for parameter in first[name].parameters)]

    def tasks() -> Iterator[BlockTask]:
        for name in used:
            curvatures = []
            for bundle in bundles:
                if name in bundle.input.blocks:
                    structure = structure_of(bundle.input.blocks[name].structure)
                    if structure is not None:
                        curvatures += [(bundle.weight, structure, index) for index in bundle.vectors]
            yield BlockTask(name, first[name].join, curvatures)

    return tasks(), len(used)


class BlockMerger:
    """Merges blocks one after another and collects the merged parameters.

    Args:
        inputs: The vectors.
        shapes: Shapes of the vectors' parameters by name.
        prior: The result in directions without curvature: the "sum" or the "mean" of the vectors, or "zero".
        settings: Settings of the solver.
        bundles: The bundles. Their blocks may also cover parameters that the vectors do not contain.
    """

    def __init__(
        self,
        inputs: Sequence[MethodInput],
        shapes: ParameterShapes,
        prior: str,
        settings: SolveSettings,
        bundles: Sequence[MatchedBundle] = (),
    ):
        self._inputs, self._shapes, self._prior, self._settings = inputs, shapes, prior, settings
        covered = (bundle.input.curvature.about.base.parameters for bundle in bundles)
        self._all_shapes = {parameter.name: parameter.shape for base in covered for parameter in base} | dict(shapes)
        self._tensors: dict[str, Tensor] = {}
        self._factors: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._reports: list[SolvedBlock] = []
        self._cache = OperatorCache()

    @torch.no_grad()
    def run(self, blocks: Iterable[BlockTask], count: int, on_progress: OnProgress) -> SolvedParameters:
        """Merges all blocks. Parameters that no block covers take the value of the prior.

        Args:
            blocks: The blocks.
            count: Number of blocks.
            on_progress: Called with the number of blocks done and the total number.

        Returns:
            The merged parameters and a report on each block.
        """
        covered: set[str] = set()
        for number, block in enumerate(blocks):
            on_progress(number, count)
            covered.update(piece.parameter for piece in block.join.pieces)
            factored = FactoredBlock.of(self._inputs, block.join, self._shapes, self._all_shapes)
            if factored is not None and all(len(structure.sides) == 2 for _, structure, _ in block.curvatures):
                self._add_factored(block, factored)
            else:
                self._add_dense(block)
        for name in self._shapes:
            if name not in covered:
                self._add_prior(name)
        on_progress(count, count)
        return self._result()

    def _add_dense(self, block: BlockTask) -> None:
        matrices = [self._matrix(vector, block.join) for vector in self._inputs]
        merged = self._prior_of(matrices)
        report = SolvedBlock(name=block.name, curvature=False)
        if block.curvatures:
            differences = [matrix - merged for matrix in matrices]
            del matrices
            terms = [SolveTerm(weight, structure, differences[index]) for weight, structure, index in block.curvatures]
            del differences
            solution = solve_block(block.name, terms, self._settings, cache=self._cache, mask=self._mask(block.join))
            report = solution.report
            if bool(solution.change.any()):  # adding zero would change the sign of negative zeros
                merged = merged + solution.change
        self._reports.append(report)
        self._store(merged.float(), block.join)

    def _add_factored(self, block: BlockTask, factored: FactoredBlock) -> None:
        prior = self._prior_of(factored.cores)
        core, report = prior, SolvedBlock(name=block.name, curvature=False)
        if block.curvatures:
            terms = [
                (weight, structure, factored.cores[index] - prior) for weight, structure, index in block.curvatures
            ]
            solution = factored.solve(block.name, terms, self._settings)
            core, report = prior + solution.change, solution.report
        self._reports.append(report)
        unchanged = len(self._inputs) == 1 and torch.equal(core, factored.cores[0])
        for name, pair in factored.split(core):
            own = self._inputs[0].factors(name) if unchanged else None
            if own is not None:
                self._factors[name] = [own]
            else:
                self._factors.setdefault(name, []).append(pair)

    def _add_prior(self, name: str) -> None:
        self._reports.append(SolvedBlock(name=name, curvature=False))
        pairs = [pair for vector in self._inputs if (pair := vector.factors(name)) is not None]
        if len(pairs) < len(self._inputs):
            self._tensors[name] = self._prior_of([vector.read(name) for vector in self._inputs]).float()
            return
        scale = {"sum": 1.0, "mean": 1 / len(pairs), "zero": 0.0}[self._prior]
        self._factors[name] = [(U if scale == 1 else scale * U, V) for U, V in pairs if scale] or [
            (pairs[0][0][:, :0], pairs[0][1][:0])
        ]

    def _matrix(self, vector: MethodInput, join: Join) -> Tensor:
        """Returns a vector's matrix W for a block, multiplied by the vector's α, in float64."""
        names = dict.fromkeys(piece.parameter for piece in join.pieces if piece.parameter in self._shapes)
        return gather({name: vector.read(name) for name in names}, join, self._all_shapes)

    def _mask(self, join: Join) -> Tensor | None:
        """Returns a mask of the entries of a block that belong to the vectors' parameters.

        Returns None if all entries belong to these parameters.
        """
        present = {piece.parameter for piece in join.pieces if piece.parameter in self._shapes}
        if all(piece.parameter in present for piece in join.pieces):
            return None
        return gather({name: torch.ones(self._shapes[name]) for name in present}, join, self._all_shapes)

    def _prior_of(self, matrices: Sequence[Tensor]) -> Tensor:
        if self._prior == "zero":
            return torch.zeros_like(matrices[0])
        total = matrices[0].clone()
        for matrix in matrices[1:]:
            total += matrix
        return total / len(matrices) if self._prior == "mean" else total

    def _store(self, matrix: Tensor, join: Join) -> None:
        """Splits the merged matrix of a block into parameters and stores them."""
        values = scatter(matrix, join, self._all_shapes)
        for piece in join.pieces:
            name = piece.parameter
            if name not in self._shapes:
                continue
            if piece.rows is None:
                self._tensors[name] = values[name].contiguous()
            else:
                start, stop = piece.rows
                stored = self._tensors.setdefault(name, torch.zeros(self._shapes[name]))
                stored[start:stop] = values[name][start:stop]

    def _result(self) -> SolvedParameters:
        factors = {}
        for name, pairs in self._factors.items():
            U, V = concatenated(pairs)
            if name in self._tensors or U.shape[1] * (len(U) + V.shape[1]) >= len(U) * V.shape[1]:
                # Some rows of the parameter are dense, or its factors are larger than the matrix.
                product = (U @ V).reshape(self._shapes[name])
                self._tensors[name] = (self._tensors.get(name, 0.0) + product).float()
            else:
                factors[name] = U.float(), V.float()
        tensors = {name: self._tensors[name] for name in self._shapes if name in self._tensors}
        return SolvedParameters(tensors, factors, tuple(self._reports))
