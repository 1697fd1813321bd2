"""Conversion of mammoth's factors (see `mammoth.py`): the block of each factor, the checks, and the scaling."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

from torch import Tensor

from kfacpack.curvature.blocks import CurvatureBlock, Kronecker, Whole
from kfacpack.curvature.matrices.components import MatrixTensors, asymmetry
from kfacpack.curvature.matrices.dense import Dense
from kfacpack.errors import KfacpackError
from kfacpack.format.container import DOWNLOAD_AGAIN
from kfacpack.format.manifest import Join, Piece
from kfacpack.hub.importer import SINGLE_TENSOR, UnpickledTensors

if TYPE_CHECKING:
    from kfacpack.models.model import Model


TOWER = "visual."
KRONECKER = (
    (r"(transformer\.resblocks\.\d+)\.attn\.in_proj_weight", r"\1.attn.qkv.weight", "in_proj_bias"),
    (r"(transformer\.resblocks\.\d+)\.attn\.out_proj\.weight", r"\1.attn.proj.weight", "bias"),
    (r"(transformer\.resblocks\.\d+\.mlp\.c_(fc|proj))\.weight", r"\1.weight", "bias"),
)
"""Layers that process every token: open_clip's weight name, mammoth's name, last part of the bias name."""
WHOLE = (
    (r"((transformer\.resblocks\.\d+\.ln_[12]|ln_pre|ln_post)\.(weight|bias))", r"\1", "layer_norm"),
    (r"class_embedding", "cls_token_layer.class_embedding", "token"),
)
"""Parameters whose block is one whole matrix: open_clip's name, mammoth's name, operation."""
PROJECTION, MAMMOTH_PROJECTION = "proj", "lin_proj.weight"
ROUNDING = 1e-3
"""Relative rounding error of sums in float32 over a whole dataset."""
OTHER_MODEL = "Do they belong to another model? Pass the model they were computed with"


@dataclass(frozen=True)
class MammothLayer:
    """A block and the name of its factors in mammoth's files."""

    name: str
    operation: str
    join: Join
    mammoth_name: str
    """Name in mammoth's files."""
    positions: int
    """Number of positions R, or 1 if the sums are not divided by it."""
    kronecker: bool
    """Whether the block is a Kronecker product instead of one whole matrix."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters of the block."""
        return tuple(piece.parameter for piece in self.join.pieces)


def layers_of(model: Model) -> list[MammothLayer]:
    """Returns the blocks that are published for a model, in the order of its state dict.

    Raises:
        KfacpackError: If the model has no vision tower of CLIP.
    """
    state = model.module.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if name.startswith(TOWER)}
    embedding = shapes.get(f"{TOWER}positional_embedding")
    if embedding is None or len(embedding) != 2 or f"{TOWER}class_embedding" not in shapes:
        problem = f"{model.name} has no vision tower of the kind that factors are published for"
        raise KfacpackError(f"{problem}, which is CLIP's ViT: ViT-B-32/openai, ViT-B-16/openai, ViT-L-14/openai")
    layers = [_layer(name, shape, shapes, embedding[0]) for name, shape in shapes.items()]
    return [layer for layer in layers if layer is not None]


def _layer(
    name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]], positions: int
) -> MammothLayer | None:
    """Returns the block of a parameter, or None if it has none of its own, such as a bias joined to its weight."""
    inner = name.removeprefix(TOWER)
    if inner == PROJECTION:
        join = Join(rows=shape[1], columns=shape[0], pieces=(Piece(parameter=name, view="transposed"),))
        return MammothLayer(name, "matmul", join, MAMMOTH_PROJECTION, 1, kronecker=True)
    for pattern, template, bias in KRONECKER:
        if match := re.fullmatch(pattern, inner):
            bias_name = f"{name.rpartition('.')[0]}.{bias}"
            pieces: tuple[Piece, ...] = (Piece(parameter=name),)
            if bias_name in shapes:
                pieces += (Piece(parameter=bias_name, at=(0, shape[1])),)
            join = Join(rows=shape[0], columns=shape[1] + len(pieces) - 1, pieces=pieces)
            return MammothLayer(name, "linear", join, match.expand(template), positions, kronecker=True)
    for pattern, template, operation in WHOLE:
        if match := re.fullmatch(pattern, inner):
            join = Join(rows=shape[0], columns=1, pieces=(Piece(parameter=name, view="column"),))
            return MammothLayer(name, operation, join, match.expand(template), 1, kronecker=False)
    return None


def examples_of(files: Mapping[str, UnpickledTensors]) -> int:
    """Reads the number of examples N.

    Args:
        files: Tensors by part (aaT, ggT, ffT, num_aaT, num_ggT).

    Returns:
        The number of examples.

    Raises:
        KfacpackError: If a file does not contain a positive integer, or if the two numbers differ.
    """
    counts = {}
    for part in ("num_aaT", "num_ggT"):
        tensors = files[part]
        spec = tensors.specs.get(SINGLE_TENSOR)
        if spec is None or spec.shape not in ((), (1,)):
            raise KfacpackError(f"{tensors.origin}: expected one number, the number of examples")
        value = float(tensors[SINGLE_TENSOR].reshape(()).double())
        if not isfinite(value) or value != int(value) or not 0 < value <= 2**53:
            raise KfacpackError(f"{tensors.origin}: records {value:g} examples, expected a positive integer")
        counts[part] = int(value)
    if counts["num_aaT"] != counts["num_ggT"]:
        problem = f"aaT has {counts['num_aaT']} examples, but ggT has {counts['num_ggT']}"
        raise KfacpackError(f"{files['num_ggT'].origin}: {problem}; the files are not from one run. {DOWNLOAD_AGAIN}")
    return counts["num_aaT"]


def check(files: Mapping[str, UnpickledTensors], layers: Sequence[MammothLayer], model: Model, examples: int) -> bool:
    """Checks that factors match a model.

    Args:
        files: Tensors by part.
        layers: The model's blocks.
        model: The model.
        examples: The number of examples N.

    Returns:
        Whether the factors could be compared with the model's weights.

    Raises:
        KfacpackError: If names, shapes or scaling do not match, or if the factors belong to other weights.
    """
    _check_names(files, layers, model)
    for layer in layers:
        _check_shapes(files, layer, model)
    _check_ones(files, layers, examples)
    return _compare_weights(files, model)


def _check_names(files: Mapping[str, UnpickledTensors], layers: Sequence[MammothLayer], model: Model) -> None:
    """Checks that there are factors for every layer and no others."""
    for part in ("aaT", "ggT", "ffT"):
        expected = {layer.mammoth_name for layer in layers if layer.kronecker == (part != "ffT")}
        tensors = files[part]
        if unknown := sorted(set(tensors.specs) - expected):
            problem = f"has factors for {unknown[0]!r}, which is not in {model.name}"
            raise KfacpackError(f"{tensors.origin}: {problem}. {OTHER_MODEL}")
        if missing := sorted(expected - set(tensors.specs)):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            problem = f"has no factors for {missing[0]!r}{more}, which {model.name} needs"
            raise KfacpackError(f"{tensors.origin}: {problem}. {OTHER_MODEL}")


def _check_shapes(files: Mapping[str, UnpickledTensors], layer: MammothLayer, model: Model) -> None:
    rows, columns = layer.join.rows, layer.join.columns
    for part, side in (("aaT", columns), ("ggT", rows)) if layer.kronecker else (("ffT", rows),):
        spec = files[part].specs[layer.mammoth_name]
        if spec.shape != (side, side) or not spec.dtype.endswith(("F16", "F32", "F64")):
            problem = f"{layer.mammoth_name!r} is {spec.dtype} of shape {list(spec.shape)}"
            expected = f"expected floats of shape {[side, side]} for {layer.name!r} of {model.name}"
            raise KfacpackError(f"{files[part].origin}: {problem}, {expected}. {OTHER_MODEL}")


def _check_ones(files: Mapping[str, UnpickledTensors], layers: Sequence[MammothLayer], examples: int) -> None:
    """Checks the scaling of aaT: the input of a bias is 1, so its entry Σ_n 1/R Σ_r 1 must be N."""
    for layer in layers:
        if layer.kronecker and len(layer.parameters) > 1:
            corner = float(files["aaT"][layer.mammoth_name][-1, -1])
            if not abs(corner - examples) <= ROUNDING * examples:
                expected = f"expected {examples}, the number of examples"
                problem = f"the last entry of {layer.mammoth_name!r} is {corner:g}, {expected}"
                cause = "The sums were not divided by the number of positions, or are of other examples"
                raise KfacpackError(f"{files['aaT'].origin}: {problem}. {cause}")


def _compare_weights(files: Mapping[str, UnpickledTensors], model: Model) -> bool:
    """Checks that factors were computed at the model's weights; returns False if they do not contain what is needed.

    The gradient h at the output of the last norm is P g, where g is the gradient at the output of the projection P.
    Therefore Σ h hᵀ, which is ffT of the norm's bias, equals P (Σ g gᵀ) Pᵀ. Towers of the same width have the same
    shapes, but different P.
    """
    bias = files["ffT"].specs.get("ln_post.bias")
    weight = model.module.state_dict().get(f"{TOWER}{PROJECTION}")
    if bias is None or weight is None or MAMMOTH_PROJECTION not in files["ggT"].specs:
        return False
    projection = weight.detach().double().cpu()
    expected = projection @ files["ggT"][MAMMOTH_PROJECTION].double() @ projection.T
    gap = float((files["ffT"]["ln_post.bias"].double() - expected).norm() / expected.norm())
    if not gap <= 10 * ROUNDING:
        problem = f"the factors were not computed at the weights of {model.name}: they differ from those implied by "
        problem += f"its output projection by {gap:.2g} of their norm"
        raise KfacpackError(f"{files['ffT'].origin}: {problem}. Pass the model and tag they were computed with")
    return True


class ScaledTensors(MatrixTensors):
    """A factor multiplied by a number, in float32.

    It is computed every time it is read, so that only one is in memory at a time.
    """

    def __init__(self, tensors: UnpickledTensors, name: str, factor: float):
        self.specs = {"data": ("F32", tensors.specs[name].shape)}
        self._tensors, self._name, self._factor = tensors, name, factor

    def __getitem__(self, name: str) -> Tensor:
        full = self._tensors[self._name].double()
        gap, largest = asymmetry(full), float(full.abs().amax())
        where = f"{self._tensors.origin}: {self._name!r}"
        if not isfinite(gap) or not isfinite(largest):
            raise KfacpackError(f"{where}: contains NaN or Inf. {DOWNLOAD_AGAIN}")
        if gap > ROUNDING * largest or bool((full.diagonal() < 0).any()):
            raise KfacpackError(f"{where}: is not a sum of squares: not symmetric, or negative on its diagonal")
        return (full + full.T).mul_(self._factor / 2).float()


def block_of(files: Mapping[str, UnpickledTensors], layer: MammothLayer, examples: int, share: float) -> CurvatureBlock:
    """Converts the factors of a layer into a block.

    Args:
        files: Tensors by part.
        layer: The layer.
        examples: The number of examples N.
        share: w / N, see `mammoth.py`.
    """

    def matrix(part: str, factor: float, positions: int | None) -> Dense:
        components = ScaledTensors(files[part], layer.mammoth_name, factor)
        dense = Dense(components.specs["data"][1][0], components, examples=examples, positions=positions)
        dense.skip_validation()
        return dense

    if not layer.kronecker:
        return CurvatureBlock(layer.name, layer.operation, layer.join, Whole(matrix("ffT", share, None)))
    positions = examples * layer.positions
    B, A = matrix("ggT", share * layer.positions, positions), matrix("aaT", 1 / examples, positions)
    return CurvatureBlock(layer.name, layer.operation, layer.join, Kronecker.of(B, A))
