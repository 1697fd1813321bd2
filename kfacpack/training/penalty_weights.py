"""Strength of the penalty (λ), weights for groups of blocks, and the published "tak" weighting.

For a layer with R positions per example, the published code computes both factors as means over examples and positions:

    A' = 1/(N R) Σ a aᵀ = A        B' = 1/(N R) Σ g gᵀ = B / R

where N is the number of examples, a is an input of the layer, and g is a gradient with respect to its output. In
kfacpack, B is a mean over examples and a sum over positions, which is required for B ⊗ A to be a block of the GGN. The
published penalty for such a layer is therefore 1/R of the penalty in kfacpack. For the output projection, which has one
position per example, the two penalties are equal. In addition, the published code multiplies the penalties for norms
and tokens by 10, and the penalty for the output projection by 0.1. The published values of λ refer to that scaling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Literal

from kfacpack.errors import KfacpackError

if TYPE_CHECKING:
    from kfacpack.curvature.blocks import CurvatureBlock
    from kfacpack.curvature.curvature import Curvature
    from kfacpack.format.manifest import Base, Metric


Preset = Literal["tak"]
PenaltyPrecision = Literal["tf32", "bf16"]
MAX_RATE = 1e18
"""Upper limit for the learning rate, the weight decay, λ and group weights.

τ is float32. The product of two of these values, and the quotient of one of them and Adam's denominator, must stay in
the range of float32.
"""
STRENGTH = 80.0
"""Default λ of a curvature penalty.

Around this value, the accuracy of sums of vectors hardly depends on λ. For eight tasks, the mean accuracy of `tiny`
with the sum of their vectors is 0.49 without a penalty and 0.69, 0.72 and 0.71 at λ = 25, 80 and 250. The mean accuracy
with single vectors is 0.75 without a penalty and 0.75, 0.73 and 0.71 at the same values of λ
(examples/eight_tasks.yaml, three seeds). In the scaling of kfacpack, the published accuracies are best at λ = 20
(ViT-B/32) and λ = 25 (ViT-B/16). They are 2 percentage points lower at ten times these values.
"""
STRENGTH_KL = 3.0
"""Default λ of a curvature penalty with the metric `kl`. The unit of this penalty is nats.

With two completion tasks (examples/completions.yaml), the mean perplexity of the sum of the vectors on the test split
is 2.85 without a penalty and 1.32, 1.27, 1.26, 1.26 and 1.28 at λ = 0.3, 1, 3, 10 and 80. The default was chosen on the
validation split, where the token accuracy at the best α is 0.942, 0.944, 0.952, 0.947 and 0.944 at these values of λ.
It has not been tuned on a large model.
"""
STRENGTH_ON_DATA = 1.0
"""Default λ of the data penalty.

It is smaller than `STRENGTH`, because the change in f that a bundle predicts is only a tenth to a hundredth of the
measured change.
"""
PUBLISHED_WEIGHTS = {"norm": 10.0, "token": 10.0, "projection": 0.1}
"""Group weights of the preset "tak"."""
PUBLISHED_STRENGTH = {
    ("open_clip", "ViT-B-32"): 100.0,
    ("open_clip", "ViT-B-16"): 500.0,
    ("open_clip", "ViT-L-14"): 2000.0,
    ("t5", ""): 20.0,
}
"""λ of the preset "tak", by model family and prefix of the model name."""
_NORM_OPERATIONS = frozenset(
    (
        "layernorm",
        "nativelayernorm",
        "multiply",  # the scale of an RMSNorm
        "batchnorm",
        "nativebatchnorm",
        "cudnnbatchnorm",
        "miopenbatchnorm",
        "groupnorm",
        "nativegroupnorm",
        "rmsnorm",
        "fusedrmsnorm",
    )
)
"""Names of the operations that belong to the group "norm", without underscores.

If kfacpack has no rule for an operation, an estimate records the name of its autograd node, such as `nativebatchnorm`.
This name depends on the device. Manifests that other programs write may contain `native_batch_norm`.
"""


def groups_of(curvature: Curvature) -> dict[str, str]:
    """Returns the group of each block, by block name: "projection", "norm", or the operation in the manifest."""
    projection = _projection(curvature)
    return {
        block.name: "projection" if block.name == projection else "norm" if _is_norm(block) else block.operation
        for block in curvature.blocks
    }


def _is_norm(block: CurvatureBlock) -> bool:
    return block.operation.replace("_", "") in _NORM_OPERATIONS


def _projection(curvature: Curvature) -> str | None:
    """Returns the name of the block of the output projection, the layer that computes f up to normalisation.

    Candidates are layers that are as wide as f and have one position per example, or do not record the number of
    positions. The last candidate that is a plain product `x @ W`, as in CLIP's vision towers, takes precedence. If
    there is no such product and f is an embedding, the last candidate that records one position per example is used.
    """
    width, output = curvature.about.function.width, curvature.about.function.output
    candidates = [
        block
        for block in curvature.blocks
        if block.operation in ("linear", "matmul") and block.join.rows == width and (_positions(block) or 1) == 1
    ]
    bare = [block.name for block in candidates if block.operation == "matmul"]
    if bare:
        return bare[-1]
    single_position = [block.name for block in candidates if _positions(block) == 1]
    return single_position[-1] if single_position and output == "embedding" else None


def block_factors(curvature: Curvature, weights: Mapping[str, float] | None, preset: Preset | None) -> dict[str, float]:
    """Returns the factor by which each block's penalty is multiplied, by block name.

    Args:
        curvature: The curvature from which the penalty is computed.
        weights: Factors by group, which take precedence over the weights of the preset.
        preset: "tak" for the published weighting and scaling, or None.

    Raises:
        KfacpackError: If the preset does not apply to the curvature.
    """
    groups = groups_of(curvature)
    group_weights = {**(PUBLISHED_WEIGHTS if preset else {}), **(weights or {})}
    factors = {block.name: group_weights.get(groups[block.name], 1.0) for block in curvature.blocks}
    if preset is None:
        return factors
    if curvature.about.scaling.sharing != "expand":
        raise KfacpackError(
            f"preset 'tak' requires factors with the scaling 'expand', got {curvature.about.scaling.sharing!r}"
        )
    return {block.name: factors[block.name] / _published_divisor(block) for block in curvature.blocks}


def check_weights(weights: Mapping[str, float] | None, curvatures: Sequence[Curvature]) -> None:
    """Checks that weights are in range and that their groups occur in the curvatures.

    Raises:
        KfacpackError: If a group is unknown or a weight is out of range.
    """
    groups = sorted({group for curvature in curvatures for group in groups_of(curvature).values()})
    for group, weight in (weights or {}).items():
        if group not in groups:
            raise KfacpackError(f"unknown group {group!r}; groups of the bundles: {', '.join(groups)}")
        if not 0 <= weight <= MAX_RATE:
            raise KfacpackError(f"the weight of {group!r} is {weight}, expected a number from 0 to {MAX_RATE:g}")


def resolve_strength(strength: float | None, *, on_data: bool = False, metric: Metric | None = None) -> float:
    """Returns λ after checking its range, or the default λ of the penalty if `strength` is None.

    Args:
        strength: λ, or None for the default.
        on_data: Whether the penalty is the data penalty.
        metric: Metric of the bundles of a curvature penalty.

    Raises:
        KfacpackError: If λ is negative, too large or NaN.
    """
    if strength is None:
        return STRENGTH_ON_DATA if on_data else STRENGTH_KL if metric == "kl" else STRENGTH
    if isinstance(strength, bool) or not isinstance(strength, Real) or not 0 <= strength <= MAX_RATE:
        raise KfacpackError(f"strength {strength}: expected a number from 0 to {MAX_RATE:g}")
    return float(strength)


def published_strength(base: Base) -> float:
    """Returns the published λ of the preset "tak" for a base model.

    Raises:
        KfacpackError: If no λ was published for the model.
    """
    for (family, start), strength in PUBLISHED_STRENGTH.items():
        if base.family == family and base.name.startswith(start):
            return strength
    raise KfacpackError(f"preset 'tak' has no published strength for {base.name}; set --strength (strength)")


def _published_divisor(block: CurvatureBlock) -> float:
    """Returns the number by which the preset "tak" divides a block's penalty.

    For Kronecker factors, this is the number of positions per example. For all other blocks, it is 1, because the
    published code scales them in the same way as kfacpack.
    """
    if len(block.structure.sides) == 1:
        return 1.0
    if (positions := _positions(block)) is None:
        problem = "does not record the number of positions per example, which the preset 'tak' requires"
        raise KfacpackError(f"block {block.name!r} {problem}. Estimate the bundle again, or omit the preset")
    return positions


def _positions(block: CurvatureBlock) -> float | None:
    """Returns the number of positions per example, or None if the block does not record this number."""
    matrix = block.structure.sides[-1][0]
    if len(block.structure.sides) == 1 or not matrix.positions or not matrix.examples:
        return None
    return matrix.positions / matrix.examples
