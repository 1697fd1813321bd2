"""What is in mammoth's files (see `mammoth.py`): which block of ours each factor is, whether it can be that, and the
block made of it.
"""

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
"""open_clip's name of a weight, theirs, and the last part of its bias's name: layers that see every token."""
WHOLE = (
    (r"((transformer\.resblocks\.\d+\.ln_[12]|ln_pre|ln_post)\.(weight|bias))", r"\1", "layer_norm"),
    (r"class_embedding", "cls_token_layer.class_embedding", "token"),
)
PROJECTION, THEIR_PROJECTION = "proj", "lin_proj.weight"
ROUNDING = 1e-3
"""How far numbers may be off that were added up in float32 over a whole data set."""


@dataclass(frozen=True)
class MammothLayer:
    """A block of ours, and what is to be known of it there."""

    name: str
    operation: str
    join: Join
    theirs: str
    positions: int
    """R, or 1 where nothing is divided by it."""
    kronecker: bool

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(piece.parameter for piece in self.join.pieces)


def layers_of(model: Model) -> list[MammothLayer]:
    """Every block that is published of such a model, in the order of its state dict."""
    shapes = {name: tuple(each.shape) for name, each in model.module.state_dict().items() if name.startswith(TOWER)}
    places = shapes.get(f"{TOWER}positional_embedding")
    if places is None or len(places) != 2 or f"{TOWER}class_embedding" not in shapes:
        problem = f"{model.name} has no vision tower like those that the factors are published of"
        raise KfacpackError(f"{problem}. They are of CLIP's ViT: ViT-B-32/openai, ViT-B-16/openai, ViT-L-14/openai")
    found = [_layer(name, shape, shapes, places[0]) for name, shape in shapes.items()]
    return [layer for layer in found if layer is not None]


def _layer(
    name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]], positions: int
) -> MammothLayer | None:
    inner = name.removeprefix(TOWER)
    if inner == PROJECTION:
        join = Join(rows=shape[1], columns=shape[0], pieces=(Piece(parameter=name, view="transposed"),))
        return MammothLayer(name, "matmul", join, THEIR_PROJECTION, 1, kronecker=True)
    for pattern, theirs, bias in KRONECKER:
        if match := re.fullmatch(pattern, inner):
            beside = f"{name.rpartition('.')[0]}.{bias}"
            pieces: tuple[Piece, ...] = (Piece(parameter=name),)
            if beside in shapes:
                pieces += (Piece(parameter=beside, at=(0, shape[1])),)
            join = Join(rows=shape[0], columns=shape[1] + len(pieces) - 1, pieces=pieces)
            return MammothLayer(name, "linear", join, match.expand(theirs), positions, kronecker=True)
    for pattern, theirs, operation in WHOLE:
        if match := re.fullmatch(pattern, inner):
            join = Join(rows=shape[0], columns=1, pieces=(Piece(parameter=name, view="column"),))
            return MammothLayer(name, operation, join, match.expand(theirs), 1, kronecker=False)
    return None


def examples_of(found: Mapping[str, UnpickledTensors]) -> int:
    """N."""
    counts = {}
    for part in ("num_aaT", "num_ggT"):
        tensors = found[part]
        spec = tensors.specs.get(SINGLE_TENSOR)
        if spec is None or spec.shape not in ((), (1,)):
            raise KfacpackError(f"{tensors.origin}: expected one number, how many examples were added up")
        value = float(tensors[SINGLE_TENSOR].reshape(()).double())
        if not isfinite(value) or value != int(value) or not 0 < value <= 2**53:
            raise KfacpackError(f"{tensors.origin}: says {value:g} examples, expected a positive whole number")
        counts[part] = int(value)
    if counts["num_aaT"] != counts["num_ggT"]:
        said = f"aaT is of {counts['num_aaT']} examples and ggT of {counts['num_ggT']}"
        raise KfacpackError(f"{found['num_ggT'].origin}: {said}; the files are not of one run. {DOWNLOAD_AGAIN}")
    return counts["num_aaT"]


def check(found: Mapping[str, UnpickledTensors], layers: Sequence[MammothLayer], model: Model, examples: int) -> bool:
    """Refuse factors that are not of such a model; whether they are of its weights, if they show it."""
    _check_names(found, layers, model)
    for layer in layers:
        _check_shapes(found, layer, model)
    _check_ones(found, layers, examples)
    return _compare_weights(found, model)


def _check_names(found: Mapping[str, UnpickledTensors], layers: Sequence[MammothLayer], model: Model) -> None:
    """Every layer's factors are there, and no others."""
    for part in ("aaT", "ggT", "ffT"):
        expected = {layer.theirs for layer in layers if layer.kronecker == (part != "ffT")}
        tensors = found[part]
        if unknown := sorted(set(tensors.specs) - expected):
            problem = f"has factors of {unknown[0]!r}, which {model.name} has not"
            raise KfacpackError(f"{tensors.origin}: {problem}. Are they of another model? Give it with --model")
        if missing := sorted(expected - set(tensors.specs)):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            problem = f"has no factor of {missing[0]!r}{more}, which {model.name} has"
            raise KfacpackError(f"{tensors.origin}: {problem}. Are they of another model? Give it with --model")


def _check_shapes(found: Mapping[str, UnpickledTensors], layer: MammothLayer, model: Model) -> None:
    rows, columns = layer.join.rows, layer.join.columns
    for part, side in (("aaT", columns), ("ggT", rows)) if layer.kronecker else (("ffT", rows),):
        spec = found[part].specs[layer.theirs]
        if spec.shape != (side, side) or not spec.dtype.endswith(("F16", "F32", "F64")):
            problem = f"{layer.theirs!r} is {spec.dtype} of shape {list(spec.shape)}"
            expected = f"{model.name} needs numbers of shape {[side, side]} for {layer.name!r}"
            raise KfacpackError(f"{found[part].origin}: {problem}, {expected}. Are they of another model?")


def _check_ones(found: Mapping[str, UnpickledTensors], layers: Sequence[MammothLayer], examples: int) -> None:
    """A bias's input is one: Σ_n 1/R Σ_r 1 is N, or the sums were not divided as they should be."""
    for layer in layers:
        if layer.kronecker and len(layer.parameters) > 1:
            corner = float(found["aaT"][layer.theirs][-1, -1])
            if not abs(corner - examples) <= ROUNDING * examples:
                problem = (
                    f"the last number of {layer.theirs!r} is {corner:g}, expected {examples}, that of the examples"
                )
                cause = "The sums were divided by something else than the number of positions, or are of other examples"
                raise KfacpackError(f"{found['aaT'].origin}: {problem}. {cause}")


def _compare_weights(found: Mapping[str, UnpickledTensors], model: Model) -> bool:
    """Whether the factors are of these weights, from what they say themselves.

    The gradient h at the last norm's output is P g, with g that at the projection's and P the projection: Σ h hᵀ, which
    is what ffT has for the norm's bias, is P (Σ g gᵀ) Pᵀ. Towers of one width have the same shapes, but not the same P.
    """
    theirs = found["ffT"].specs.get("ln_post.bias")
    weight = model.module.state_dict().get(f"{TOWER}{PROJECTION}")
    if theirs is None or weight is None or THEIR_PROJECTION not in found["ggT"].specs:
        return False
    projection = weight.detach().double().cpu()
    expected = projection @ found["ggT"][THEIR_PROJECTION].double() @ projection.T
    gap = float((found["ffT"]["ln_post.bias"].double() - expected).norm() / expected.norm())
    if not gap <= 10 * ROUNDING:
        problem = f"the factors were not computed at the weights of {model.name}: they differ from what its output "
        problem += f"projection makes of them by {gap:.2g} of their size"
        raise KfacpackError(f"{found['ffT'].origin}: {problem}. Give the model and tag that they are of")
    return True


class ScaledTensors(MatrixTensors):
    """A factor times a number, float32; made each time it is read, so that no more than one is in memory."""

    def __init__(self, tensors: UnpickledTensors, name: str, factor: float):
        self.specs = {"data": ("F32", tensors.specs[name].shape)}
        self._tensors, self._name, self._factor = tensors, name, factor

    def __getitem__(self, name: str) -> Tensor:
        full = self._tensors[self._name].double()
        gap, largest = asymmetry(full), float(full.abs().amax())
        where = f"{self._tensors.origin}: {self._name!r}"
        if not isfinite(gap) or not isfinite(largest):
            raise KfacpackError(f"{where}: has numbers that are not finite. {DOWNLOAD_AGAIN}")
        if gap > ROUNDING * largest or bool((full.diagonal() < 0).any()):
            raise KfacpackError(f"{where}: is no sum of squares: not symmetric, or negative on its diagonal")
        return (full + full.T).mul_(self._factor / 2).float()


def block_of(found: Mapping[str, UnpickledTensors], layer: MammothLayer, examples: int, share: float) -> CurvatureBlock:
    """`share` is w / N."""

    def matrix(part: str, factor: float, positions: int | None) -> Dense:
        components = ScaledTensors(found[part], layer.theirs, factor)
        made = Dense(components.specs["data"][1][0], components, examples=examples, positions=positions)
        made.take_for_sound()
        return made

    if not layer.kronecker:
        return CurvatureBlock(layer.name, layer.operation, layer.join, Whole(matrix("ffT", share, None)))
    places = examples * layer.positions
    B, A = matrix("ggT", share * layer.positions, places), matrix("aaT", 1 / examples, places)
    return CurvatureBlock(layer.name, layer.operation, layer.join, Kronecker.of(B, A))
