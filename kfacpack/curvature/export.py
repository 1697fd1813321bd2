"""Factors for those who want no kfacpack: a plain safetensors file of dense matrices, and words on how to use them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from kfacpack.curvature.curvature import Curvature, load
from kfacpack.curvature.matrices.components import FILE_TYPES, raw_bytes
from kfacpack.errors import KfacpackError
from kfacpack.format.container import Spec
from kfacpack.format.manifest import FloatType
from kfacpack.format.writer import write_plain

if TYPE_CHECKING:
    import os
    from typing import Any

    from kfacpack.curvature.blocks import CurvatureBlock
    from kfacpack.format.units import OnProgress


FORMAT = "kfacpack.factors/1"
HOW = (
    "For each block, put the changes of its parameters together to dW (rows, columns), by its join: a piece is its "
    "parameter, of that only rows [start, stop) if it has 'rows'; as a matrix (d0, all other dimensions), its "
    "transpose or one column, by its 'view'; from [row, column] 'at' on.\n"
    "Then G dW is the sum of weight * B @ dW @ A over its terms, or (G @ dW.reshape(-1)).reshape(rows, columns) where "
    "it has G; a matrix with one dimension is a diagonal, times which is a product with each row.\n"
    "And (dW * G dW).sum(), added up over the blocks, is the penalty; its gradient is 2 G dW."
)


def export(
    curvature: Curvature | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    dtype: FloatType = "float32",
    progress: OnProgress = lambda done, total: None,
) -> None:
    """Write every matrix dense, as BLOCK/A and BLOCK/B, or BLOCK/G, to a file that is there whole or not at all.

    Diagonal matrices are vectors. A block is named after its first parameter, which is all of them but for parts of
    fused ones, NAME[start:stop]; where it has several terms, these are BLOCK/A.0, BLOCK/A.1, … The metadata says under
    "factors", in JSON, how parameters join, and under "how", in words, what to do with the matrices. One block is made
    at a time. A matrix that blocks share is written for each.
    """
    if not isinstance(curvature, Curvature):
        curvature = load(curvature)
    number_type: torch.dtype = getattr(torch, dtype)
    # Until the end: int8 is scaled, and low rank multiplied out, before anything is rounded.
    wide = torch.promote_types(number_type, torch.float32)
    matrices = {f"{block.name}/{role}": each for block in curvature.blocks for role, each in block.structure.matrices()}
    word = FILE_TYPES[number_type]
    specs: dict[str, Spec] = {name: (word, matrix.plain_shape) for name, matrix in matrices.items()}
    metadata = {"format": FORMAT, "how": HOW, "factors": json.dumps(_said(curvature), separators=(",", ":"))}
    with write_plain(path, specs, metadata) as put:
        for number, (name, matrix) in enumerate(matrices.items()):
            progress(number, len(matrices))
            for part in matrix.plain(wide).to(number_type).reshape(-1).split(2**22):
                if not bool(torch.stack(part.aminmax()).isfinite().all()):
                    remedy = "Use bfloat16 or float32; nothing was written"
                    raise KfacpackError(f"{name!r}: has numbers that {dtype} cannot hold. {remedy}")
                put(name, raw_bytes(part))
        progress(len(matrices), len(matrices))


def _said(curvature: Curvature) -> dict[str, Any]:
    about = curvature.about
    base = about.base
    return {
        "scaling": about.scaling.model_dump(mode="json"),
        "function": about.function.model_dump(mode="json", exclude_none=True),
        "base": {"family": base.family, "name": base.name, "revision": base.revision, "sha256": base.sha256},
        "task": about.source.task if about.source else None,
        "bundle": curvature.digest,
        "parameters": {each.name: list(each.shape) for each in base.parameters},
        "blocks": [_block(block) for block in curvature.blocks],
    }


def _block(block: CurvatureBlock) -> dict[str, Any]:
    names = {role: f"{block.name}/{role}" for role, _ in block.structure.matrices()}
    join = block.join.model_dump(mode="json", exclude_none=True)
    return {"name": block.name, "join": join, **block.structure.plain(names)}
