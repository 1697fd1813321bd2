"""Export of factors as a plain safetensors file of dense matrices, with instructions, for use without kfacpack."""

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
"""Value of the metadata key "format"."""
INSTRUCTIONS = (
    "For each block, join the changes of its parameters into a matrix dW (rows, columns). A piece of the join is a "
    "parameter, or its rows [start, stop) if the piece has 'rows', viewed by its 'view' as a matrix (d0, all other "
    "dimensions), as the transpose of that, or as one column; its upper left corner in dW is [row, column] = 'at'.\n"
    "G dW is the sum of weight * B @ dW @ A over the terms, or (G @ dW.reshape(-1)).reshape(rows, columns) if the "
    "block has G. A matrix with one dimension is a diagonal: multiply each row by its entry.\n"
    "The penalty is the sum of (dW * G dW).sum() over the blocks; its gradient is 2 G dW."
)
"""Value of the metadata key "how"."""


def export(
    curvature: Curvature | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    dtype: FloatType = "float32",
    on_progress: OnProgress = lambda done, total: None,
) -> None:
    """Writes every matrix as a dense tensor to a plain safetensors file, atomically.

    Tensors are named BLOCK/A and BLOCK/B, or BLOCK/G; with several terms, BLOCK/A.0, BLOCK/A.1, and so on. A block is
    named after its first parameter, or NAME[start:stop] for a part of a fused parameter. Diagonal matrices are vectors.
    The metadata has the joins of the parameters as JSON under "factors", and instructions under "how". Matrices are
    unpacked one at a time; a matrix that blocks share is written for each of them.

    Args:
        curvature: A curvature, or the path of a bundle.
        path: File to write.
        dtype: Dtype of the tensors, such as "float32" or "bfloat16".
        on_progress: Called with the number of matrices written and their total.

    Raises:
        KfacpackError: If a value is out of range for `dtype`, or the file cannot be written.

    Example:
        >>> import kfacpack as kp
        >>> kp.export("mnist.kfac", "factors.safetensors", dtype="bfloat16")  # doctest: +SKIP
    """
    if not isinstance(curvature, Curvature):
        curvature = load(curvature)
    number_type: torch.dtype = getattr(torch, dtype)
    # Round last: int8 values are scaled, and low-rank products computed, in at least float32.
    compute_type = torch.promote_types(number_type, torch.float32)
    matrices = {
        f"{block.name}/{role}": matrix for block in curvature.blocks for role, matrix in block.structure.matrices()
    }
    file_type = FILE_TYPES[number_type]
    specs: dict[str, Spec] = {name: (file_type, matrix.plain_shape) for name, matrix in matrices.items()}
    metadata = {
        "format": FORMAT,
        "how": INSTRUCTIONS,
        "factors": json.dumps(_description(curvature), separators=(",", ":")),
    }
    with write_plain(path, specs, metadata) as write:
        for number, (name, matrix) in enumerate(matrices.items()):
            on_progress(number, len(matrices))
            for part in matrix.plain(compute_type).to(number_type).reshape(-1).split(2**22):
                if not bool(torch.stack(part.aminmax()).isfinite().all()):
                    remedy = "Use bfloat16 or float32. Nothing was written"
                    raise KfacpackError(f"{name!r}: contains values out of range for {dtype}. {remedy}")
                write(name, raw_bytes(part))
        on_progress(len(matrices), len(matrices))


def _description(curvature: Curvature) -> dict[str, Any]:
    about = curvature.about
    base = about.base
    return {
        "scaling": about.scaling.model_dump(mode="json"),
        "function": about.function.model_dump(mode="json", exclude_none=True),
        "base": {"family": base.family, "name": base.name, "revision": base.revision, "sha256": base.sha256},
        "task": about.source.task if about.source else None,
        "bundle": curvature.digest,
        "parameters": {parameter.name: list(parameter.shape) for parameter in base.parameters},
        "blocks": [_block_description(block) for block in curvature.blocks],
    }


def _block_description(block: CurvatureBlock) -> dict[str, Any]:
    names = {role: f"{block.name}/{role}" for role, _ in block.structure.matrices()}
    join = block.join.model_dump(mode="json", exclude_none=True)
    return {"name": block.name, "join": join, **block.structure.plain(names)}
