"""Merge methods that solve a least-squares problem in each block: `curvature`, `regmean`, `fisher` and `actmat`.

In each block, let G_t be the curvature for task t and W_t the matrix of α_t τ_t. The merged matrix is

    argmin over W of  Σ_t w_t <W − W_t, G_t (W − W_t)> + ε ‖W − W_0‖²,

which `merging/solve.py` computes. The methods differ in the choice of G_t:

- `curvature`: the G_t in the bundle for task t, which has the form Σ B ⊗ A or is one matrix for the whole block.
- `regmean` (Jin et al., 2023): I ⊗ A_t, where A_t is computed only from the inputs of the layer. As in the paper, the
  off-diagonal entries of A_t are reduced. Blocks without A take the value of the prior.
- `fisher` (Matena and Raffel, 2022): the diagonal of G_t.
- `actmat`: I ⊗ DᵀD, where D is the matrix of τ_t, not multiplied by α_t, for parameters with two dimensions. No bundle
  is used. All other parameters take the value of the prior.

The prior W_0 determines the result in directions without curvature. With the prior `sum`, the result in these
directions is the same as in task arithmetic. In all methods, the result is linear in the α_t.

For `curvature`, the term κ v / ‖τ‖² is added to ε, where ‖τ‖² is averaged over the vectors, v is the scale of f and κ
is the setting `negligible_drift`. The default κ is chosen so that a drift (mean squared change in f) of κ v hardly
affects predictions. If the vectors change f substantially, this term is small compared with the curvature. If they
change f only slightly, there is little interference to remove, and the term brings the result closer to the prior.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfacpack.errors import KfacpackError
from kfacpack.vectors.methods.method import MergeMethod, MethodInput, SolvedParameters, setting

if TYPE_CHECKING:
    from torch import Tensor

    from kfacpack.curvature.blocks import BlockStructure, ParameterShapes
    from kfacpack.curvature.matrices.matrix import Matrix
    from kfacpack.format.units import OnProgress
    from kfacpack.vectors.block_merge import BlockTask
    from kfacpack.vectors.bundle_matching import MatchedBundle


DAMPING = 0.1
"""Default damping of `refine` and of all methods in this module except `curvature`."""
DAMPING_HELP = "ε, the weight of the prior, relative to the mean eigenvalue of the summed curvature."
PRIORS = ("sum", "mean", "zero")
PRIOR_HELP = "Result in directions without curvature: the sum of the vectors, their mean, or zero."
CURVATURE_DAMPING, NEGLIGIBLE_DRIFT = 0.02, 0.004
"""Defaults of `curvature`. They were chosen on validation examples of six tasks with `tiny`, the small CLIP model in
the package, with seeds that no published result uses (docs/results)."""
NEGLIGIBLE_DRIFT_HELP = (
    "κ, a drift of f that hardly affects predictions, relative to the scale of f. ε has a term proportional to κ/‖τ‖², "
    "which keeps the result close to the prior if the vectors change f only slightly."
)
WEIGHTS = ("equal", "size")
WEIGHTS_HELP = "Weights of the tasks: equal, or in proportion to the sizes of their datasets, scaled to a mean of one."
TOLERANCE = 1e-2
"""Default tolerance. On six tasks with `tiny`, the small CLIP model in the package, a smaller tolerance would reduce
the objective further by less than 0.2 % of the total reduction (docs/results)."""
TOLERANCE_HELP = "Relative residual at which the iterative solver stops."
ITERATIONS, ITERATIONS_HELP = 200, "Maximum number of iterations per block."


@dataclass(frozen=True)
class BlockMethod(MergeMethod):
    """Base class of methods that merge one block of parameters at a time."""

    scale = "α multiplies the result; with α = 1, the result minimises the objective"

    damping: float = setting(DAMPING, DAMPING_HELP, interval="(0, ∞)")
    prior: str = setting("sum", PRIOR_HELP, choices=PRIORS)

    def parameter(self, inputs: Sequence[MethodInput], name: str) -> Tensor:
        """Raises an error, because `solve` merges parameters in blocks."""
        raise KfacpackError(f"{self.name}: merges parameters only in blocks, so {name!r} cannot be merged separately")

    def solve(
        self, inputs: Sequence[MethodInput], bundles: Sequence[MatchedBundle], on_progress: OnProgress
    ) -> SolvedParameters:
        """Merges all parameters, one block at a time."""
        from kfacpack.merging.solve import SolveSettings
        from kfacpack.vectors.block_merge import BlockMerger

        shapes = parameter_shapes(inputs[0])
        numeric = {name: getattr(self, name) for name in ("tolerance", "iterations") if hasattr(self, name)}
        settings = SolveSettings(self.damping, **numeric, absolute_damping=self._absolute_damping(inputs, bundles))
        merger = BlockMerger(inputs, shapes, self.prior, settings, bundles)
        return merger.run(*self._tasks(inputs, bundles, shapes), on_progress)

    def _absolute_damping(self, inputs: Sequence[MethodInput], bundles: Sequence[MatchedBundle]) -> float:
        """Returns the part of the damping ε that is the same in all blocks."""
        return 0.0

    def _tasks(
        self, inputs: Sequence[MethodInput], bundles: Sequence[MatchedBundle], shapes: ParameterShapes
    ) -> tuple[Iterator[BlockTask], int]:
        from kfacpack.vectors.block_merge import block_tasks

        return block_tasks(bundles, shapes, self.structure_of)

    def structure_of(self, structure: BlockStructure) -> BlockStructure | None:
        """Returns the matrix that the method uses in place of a block's G, or None if it cannot use this G."""
        return structure


@dataclass(frozen=True)
class CurvatureMethod(BlockMethod):
    """Curvature merging: keeps the outputs on each task close to those with the task's own vector.

    The squared differences between the outputs are predicted with the bundles, and their sum over tasks is minimised.
    """

    name = "curvature"
    help = "Keeps the outputs on each task close to those with the task's own vector, as predicted by the bundles."
    needs_bundles = True

    damping: float = setting(CURVATURE_DAMPING, DAMPING_HELP, interval="(0, ∞)")
    negligible_drift: float = setting(NEGLIGIBLE_DRIFT, NEGLIGIBLE_DRIFT_HELP, interval="[0, ∞)")
    task_weights: str = setting("equal", WEIGHTS_HELP, choices=WEIGHTS)
    tolerance: float = setting(TOLERANCE, TOLERANCE_HELP, interval="(0, 1)")
    iterations: int = setting(ITERATIONS, ITERATIONS_HELP, interval="[1, ∞)")

    def _absolute_damping(self, inputs: Sequence[MethodInput], bundles: Sequence[MatchedBundle]) -> float:
        """Returns κ v / ‖τ‖². κ is `negligible_drift`, v is the scale of f, and ‖τ‖² is averaged over the vectors.

        Raises:
            KfacpackError: If f is not normalised and no bundle records the scale of f.
        """
        from kfacpack.merging.inputs import scale_of_f

        norm = sum(vector.squared_norm() for vector in inputs) / len(inputs) if self.negligible_drift else 0.0
        if not norm:
            return 0.0
        scale = scale_of_f([bundle.input for bundle in bundles])
        if not scale:
            problem = "does not record the scale of f, which is needed because f is not normalised"
            remedy = "Estimate the bundle again, or pass --negligible-drift 0 (negligible_drift=0)"
            raise KfacpackError(f"{bundles[0].input.name}: {problem}. {remedy}")
        return self.negligible_drift * scale / norm


@dataclass(frozen=True)
class RegMeanMethod(BlockMethod):
    """RegMean: merging with the curvature I ⊗ A, where A is computed only from a layer's inputs."""

    name = "regmean"
    help = "Like curvature, but uses only the factors A, which are computed from layer inputs (RegMean)."
    needs_bundles = True

    task_weights: str = setting("equal", WEIGHTS_HELP, choices=WEIGHTS)
    shrink: float = setting(
        0.1, "Fraction by which the off-diagonal entries of A are reduced; 1 − α in the paper.", interval="[0, 1]"
    )

    def structure_of(self, structure: BlockStructure) -> BlockStructure | None:
        """Converts a G of the form Σ w B ⊗ A to Σ w I ⊗ A', where A' is A with reduced off-diagonal entries.

        Returns None if G is not a sum of Kronecker products.
        """
        import torch

        from kfacpack.curvature.blocks import Kronecker
        from kfacpack.curvature.matrices.structured import Diagonal

        if len(structure.sides) != 2:
            return None
        terms = []
        for weight, B, A in zip(structure.weights, *structure.sides, strict=True):
            identity = Diagonal.of(torch.ones(B.side, dtype=torch.float64))
            terms.append((identity, _shrink_off_diagonal(A, self.shrink) if self.shrink else A, weight))
        return Kronecker(tuple(terms))


@dataclass(frozen=True)
class FisherMethod(BlockMethod):
    """Fisher merging: merging with the diagonal of the curvature."""

    name = "fisher"
    help = "Like curvature, but uses only the diagonals of the curvatures (Fisher merging)."
    needs_bundles = True

    task_weights: str = setting("equal", WEIGHTS_HELP, choices=WEIGHTS)

    def structure_of(self, structure: BlockStructure) -> BlockStructure | None:
        """Returns the diagonal of G, as one diagonal matrix for the whole block."""
        import torch

        from kfacpack.curvature.blocks import Whole
        from kfacpack.curvature.matrices.structured import Diagonal

        total = torch.zeros(1, dtype=torch.float64)
        for weight, *matrices in zip(structure.weights, *structure.sides, strict=True):
            vectors = [matrix.operator(torch.float64).diagonal(matrix.side) for matrix in matrices]
            diagonal = vectors[0] if len(vectors) == 1 else torch.outer(*vectors).flatten()
            total = total + weight * diagonal
        return Whole(Diagonal.of(total, psd=all(matrix.psd for _, matrix in structure.matrices())))


@dataclass(frozen=True)
class ActMatMethod(BlockMethod):
    """ACTMat: like RegMean, but with WᵀW in place of A, where W is the change to a weight. It needs no bundles."""

    name = "actmat"
    help = "Like regmean, but uses WᵀW in place of A, where W is the change to a weight (ACTMat). Needs no bundles."

    def _tasks(
        self, inputs: Sequence[MethodInput], bundles: Sequence[MatchedBundle], shapes: ParameterShapes
    ) -> tuple[Iterator[BlockTask], int]:
        from kfacpack.format.manifest import Join, Piece
        from kfacpack.vectors.block_merge import BlockTask

        names = [name for name, shape in shapes.items() if len(shape) == 2]

        def tasks() -> Iterator[BlockTask]:
            for name in names:
                rows, columns = shapes[name]
                join = Join(rows=rows, columns=columns, pieces=(Piece(parameter=name),))
                curvatures = [(1.0, _own_curvature(vector, name), index) for index, vector in enumerate(inputs)]
                yield BlockTask(name, join, curvatures)

        return tasks(), len(names)


@dataclass(frozen=True)
class RefineMethod(MergeMethod):
    """The settings of `kp.refine`, which reduces the effect of one vector on other tasks.

    The result solves (G_own + λ Σ w_t G_t + ε) τ' = G_own τ + ε τ; see `kp.refine`. The prior and the curvature for the
    vector's own task pull the result towards τ; the curvature for the other tasks pulls it towards zero.
    """

    name = "refine"
    help = "Reduces the effect of a vector on other tasks."
    scale = "α multiplies the result; with α = 1, the result minimises the objective"
    needs_bundles = True

    strength: float = setting(
        1.0, "λ, the factor by which the curvature for the other tasks is multiplied.", interval="[0, ∞)"
    )
    damping: float = setting(DAMPING, DAMPING_HELP, interval="(0, ∞)")
    task_weights: str = setting("equal", WEIGHTS_HELP, choices=WEIGHTS)
    tolerance: float = setting(TOLERANCE, TOLERANCE_HELP, interval="(0, 1)")
    iterations: int = setting(ITERATIONS, ITERATIONS_HELP, interval="[1, ∞)")

    def parameter(self, inputs: Sequence[MethodInput], name: str) -> Tensor:
        """Raises an error, because `solve` refines parameters in blocks."""
        raise KfacpackError(f"{self.name}: refines parameters only in blocks, so {name!r} cannot be refined separately")

    def solve(
        self, inputs: Sequence[MethodInput], bundles: Sequence[MatchedBundle], on_progress: OnProgress
    ) -> SolvedParameters:
        """Refines all parameters, one block at a time.

        Args:
            inputs: The vector, and the same vector with α = 0, which is the target for the other tasks.
            bundles: Bundles for the vector's own tasks, which are assigned to index 0, and bundles for other tasks,
                which are assigned to index 1.
            on_progress: Called with the number of blocks done and the total number.
        """
        from kfacpack.merging.solve import SolveSettings
        from kfacpack.vectors.block_merge import BlockMerger, block_tasks

        shapes = parameter_shapes(inputs[0])
        settings = SolveSettings(self.damping, self.tolerance, self.iterations)
        merger = BlockMerger(inputs, shapes, "sum", settings, bundles)
        return merger.run(*block_tasks(bundles, shapes, lambda structure: structure), on_progress)


def parameter_shapes(vector: MethodInput) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a vector's parameters by name."""
    return {parameter.name: parameter.shape for parameter in vector.tensors.about.base.parameters}


def _shrink_off_diagonal(matrix: Matrix, share: float) -> Matrix:
    """Returns the matrix with its off-diagonal entries multiplied by 1 − share."""
    import torch

    from kfacpack.curvature.matrices.dense import Dense
    from kfacpack.merging.solve import WIDE_SIDE

    full = matrix.dense(torch.float32 if matrix.side > WIDE_SIDE else torch.float64)
    shrunk = (1 - share) * full
    shrunk.diagonal().copy_(full.diagonal())
    return Dense.of(shrunk, psd=matrix.psd)


def _own_curvature(vector: MethodInput, name: str) -> BlockStructure:
    """Returns I ⊗ WᵀW, where W is the vector's change to a parameter, not multiplied by α."""
    import torch

    from kfacpack.curvature.blocks import Kronecker
    from kfacpack.curvature.matrices.components import InMemoryTensors
    from kfacpack.curvature.matrices.structured import Diagonal, LowRank

    W = vector.tensors[name].double()
    gram = LowRank(
        W.shape[1], InMemoryTensors(data=W.T.contiguous(), weights=torch.ones(len(W), dtype=torch.float64)), psd=True
    )
    return Kronecker.of(Diagonal.of(torch.ones(len(W), dtype=torch.float64)), gram)
