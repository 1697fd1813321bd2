"""Merges task vectors block by block in the metric of their curvatures.

One block of all vectors is in memory at a time. Blocks whose matrices are factored in every vector are merged in the
span of their factors, see `low_rank.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfacpack.curvature.blocks import gather, scatter
from kfacpack.format.vector_manifest import SolvedBlock
from kfacpack.merging.inputs import merge_ordered
from kfacpack.merging.solve import OperatorCache, SolveTerm, solve_block
from kfacpack.vectors.low_rank import FactoredBlock, concatenated
from kfacpack.vectors.methods.method import SolvedParameters

if TYPE_CHECKING:
    from kfacpack.curvature.blocks import BlockStructure, ParameterShapes
    from kfacpack.format.manifest import Join
    from kfacpack.format.units import OnProgress
    from kfacpack.merging.solve import SolveSettings
    from kfacpack.vectors.bundle_matching import MatchedBundle
    from kfacpack.vectors.methods.method import MethodInput

    StructureMap = Callable[[BlockStructure], BlockStructure | None]
    """Maps the structure of a block to the one that a method uses, or to None if it does not use the block."""


@dataclass(frozen=True)
class BlockTask:
    """A block to be solved: its place in the parameters, and the curvature of each vector."""

    name: str
    join: Join
    curvatures: Sequence[tuple[float, BlockStructure, int]]
    """Weight, G and index of the vector, for each summand of the objective; empty if there is no curvature."""


def block_tasks(
    bundles: Sequence[MatchedBundle], parameters: ParameterShapes, structure_of: StructureMap
) -> tuple[Iterator[BlockTask], int]:
    """Lists the blocks of all bundles that cover a parameter of the vectors.

    Args:
        bundles: The bundles.
        parameters: The parameters of the vectors.
        structure_of: Maps each structure to the one that the method uses. Called one block at a time.

    Returns:
        An iterator over the blocks, and their number.
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
    """Solves blocks one after the other and collects the merged parameters.

    Args:
        inputs: The vectors.
        shapes: Shapes of their parameters, by name.
        prior: Value in directions without curvature: the sum of the vectors, their mean, or zero.
        settings: Settings of the solver.
        bundles: The bundles, whose blocks may cover further parameters that the vectors do not change.
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
        """Solves all blocks; parameters that no block covers get the value of the prior.

        Args:
            blocks: The blocks.
            count: Number of the blocks.
            on_progress: Called with the number of blocks done and their total.

        Returns:
            The merged parameters and the report of each block.
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
        """Returns α W of a block in float64."""
        names = dict.fromkeys(piece.parameter for piece in join.pieces if piece.parameter in self._shapes)
        return gather({name: vector.read(name) for name in names}, join, self._all_shapes)

    def _mask(self, join: Join) -> Tensor | None:
        """Returns which entries of a block belong to parameters of the vectors; None if all do."""
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
        """Stores the parameters of a merged block."""
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
                # Some of its rows are dense, or the factors are larger than the matrix.
                product = (U @ V).reshape(self._shapes[name])
                self._tensors[name] = (self._tensors.get(name, 0.0) + product).float()
            else:
                factors[name] = U.float(), V.float()
        tensors = {name: self._tensors[name] for name in self._shapes if name in self._tensors}
        return SolvedParameters(tensors, factors, tuple(self._reports))
