"""By what each block's penalty is multiplied: weights for groups of parameters, and the published weighting.

The published code takes, for a layer with R positions an example, A and B both as means over examples and positions:

    A' = 1/(N R) Σ a aᵀ = A        B' = 1/(N R) Σ g gᵀ = B / R

where B here is a mean over examples and a sum over positions, as it has to be for B ⊗ A to be a block of the GGN. So
its penalty of such a layer is ours divided by R; of the output projection, which sees one position, it is the same. On
top of that it weighs norms and tokens by 10 and the output projection by 0.1. Its λ belong to that scaling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from kfacpack.errors import KfacpackError
from kfacpack.training.settings import MAX_RATE

if TYPE_CHECKING:
    from kfacpack.curvature.blocks import CurvatureBlock
    from kfacpack.curvature.curvature import Curvature
    from kfacpack.format.manifest import Base


Preset = Literal["tak"]
STRENGTH = 80.0
"""λ where none is given: the middle of the decade over which sums change little. Of eight tasks, the mean accuracy of
`tiny` with the sum of their vectors is 0.49 without a penalty and 0.69, 0.72, 0.71 at λ = 25, 80, 250, and that of
single vectors 0.75 without and 0.75, 0.73, 0.71 (examples/eight_tasks.yaml, three seeds). In this scaling, the
published accuracies are best at 20 (ViT-B/32) and 25 (ViT-B/16), and 2 points lower at ten times as much."""
STRENGTH_ON_DATA = 1.0
"""λ of the penalty that needs data, where none is given. Its drift is the true one, of which a bundle foretells a tenth
to a hundredth, so that λ is less by as much."""
PUBLISHED_WEIGHTS = {"norm": 10.0, "token": 10.0, "projection": 0.1}
PUBLISHED_STRENGTH = {
    ("open_clip", "ViT-B-32"): 100.0,
    ("open_clip", "ViT-B-16"): 500.0,
    ("open_clip", "ViT-L-14"): 2000.0,
    ("t5", ""): 20.0,
}
_NORMS = ("layer_norm", "multiply", "batch_norm", "native_batch_norm", "group_norm", "native_group_norm", "rms_norm")


def groups_of(curvature: Curvature) -> dict[str, str]:
    """Block name -> its group: "projection", "norm", or else the operation, as the manifest calls it."""
    projection = _projection(curvature)
    return {
        block.name: "projection"
        if block.name == projection
        else ("norm" if block.operation in _NORMS else block.operation)
        for block in curvature.blocks
    }


def _projection(curvature: Curvature) -> str | None:
    """The layer whose output is f, up to its norm: as wide as f, and with one position an example.

    A bare `x @ W`, as in CLIP's vision towers, or else, for an embedding, the last layer.
    """
    width, output = curvature.about.function.width, curvature.about.function.output
    fitting = [
        block
        for block in curvature.blocks
        if block.operation in ("linear", "matmul") and block.join.rows == width and (_positions(block) or 1) == 1
    ]
    bare = [block.name for block in fitting if block.operation == "matmul"]
    if bare:
        return bare[-1]
    told = [block.name for block in fitting if _positions(block) == 1]
    return told[-1] if told and output == "embedding" else None


def block_factors(curvature: Curvature, weights: Mapping[str, float] | None, preset: Preset | None) -> dict[str, float]:
    """Block name -> the factor of its penalty."""
    groups = groups_of(curvature)
    chosen = {**(PUBLISHED_WEIGHTS if preset else {}), **(weights or {})}
    found = {block.name: chosen.get(groups[block.name], 1.0) for block in curvature.blocks}
    if preset is None:
        return found
    if curvature.about.scaling.sharing != "expand":
        raise KfacpackError(
            f"preset 'tak' needs factors of the scaling 'expand', found {curvature.about.scaling.sharing!r}"
        )
    return {block.name: found[block.name] / _published_divisor(block) for block in curvature.blocks}


def check_weights(weights: Mapping[str, float] | None, curvatures: Sequence[Curvature]) -> None:
    there = sorted({group for curvature in curvatures for group in groups_of(curvature).values()})
    for group, weight in (weights or {}).items():
        if group not in there:
            raise KfacpackError(f"there is no group {group!r} to weigh; there are {', '.join(there)}")
        if not 0 <= weight <= MAX_RATE:
            problem = f"expected a number that is not negative, and {MAX_RATE:g} at most"
            raise KfacpackError(f"the weight of {group!r} is {weight}, {problem}")


def resolve_strength(given: float | None, *, on_data: bool = False) -> float:
    """λ as it was given, or the one for all models: of bundles, or of a penalty that needs data."""
    if given is None:
        return STRENGTH_ON_DATA if on_data else STRENGTH
    if not 0 <= given <= MAX_RATE:
        raise KfacpackError(f"strength {given}: expected a number that is not negative, and {MAX_RATE:g} at most")
    return float(given)


def published_strength(base: Base) -> float:
    for (family, start), strength in PUBLISHED_STRENGTH.items():
        if base.family == family and base.name.startswith(start):
            return strength
    raise KfacpackError(f"preset 'tak' was published for no model like {base.name}; give the strength")


def _published_divisor(block: CurvatureBlock) -> float:
    """R for Kronecker factors; whole blocks of G are means over examples there, too."""
    if len(block.structure.sides) == 1:
        return 1.0
    if (positions := _positions(block)) is None:
        problem = "does not say over how many positions its means ran, which preset 'tak' divides by"
        raise KfacpackError(f"block {block.name!r} {problem}. Estimate it anew, or choose no preset")
    return positions


def _positions(block: CurvatureBlock) -> float | None:
    """How many positions an example has there."""
    matrix = block.structure.sides[-1][0]
    if len(block.structure.sides) == 1 or not matrix.positions or not matrix.examples:
        return None
    return matrix.positions / matrix.examples
