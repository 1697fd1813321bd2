"""Saves a curvature as a bundle: matrices are packed, checked, hashed and written a few rows at a time."""

from __future__ import annotations

from hashlib import sha256
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch
from pydantic import ValidationError

from kfacpack.curvature.matrices.components import raw_bytes
from kfacpack.errors import BundleError
from kfacpack.format.container import UNSEALED
from kfacpack.format.manifest import VERSION, About, Manifest, MatrixEntry, TensorEntry, first_problem
from kfacpack.format.schema import LAYOUTS
from kfacpack.format.writer import bundle_digest, bundle_size, write_bundle

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from torch import Tensor

    from kfacpack.curvature.curvature import Curvature
    from kfacpack.curvature.matrices.matrix import Matrix
    from kfacpack.format.container import Spec
    from kfacpack.format.units import OnProgress


def save(curvature: Curvature, path: str | os.PathLike[str], *, pack: bool, on_progress: OnProgress) -> None:
    """Writes a curvature to a file atomically; see `Curvature.save`.

    Raises:
        BundleError: If a value is not finite, the metadata is invalid, or the file cannot be written.
    """
    matrices, identifiers = _named_matrices(curvature)
    stored = {name: matrix.for_storage() if pack else matrix for name, matrix in matrices.items()}
    manifest, specs = _manifest_and_specs(curvature, path, stored, identifiers)
    with write_bundle(path, manifest, specs) as write:
        for number, (name, matrix) in enumerate(matrices.items()):
            on_progress(number, len(matrices))
            matrix.require_valid()
            for component in stored[name].components.specs:
                tensor_name = _tensor_name(name, component)
                for part in stored[name].components.parts(component):
                    _require_finite(path, tensor_name, part)
                    write(tensor_name, raw_bytes(part))
        on_progress(len(matrices), len(matrices))


def file_size(curvature: Curvature) -> int:
    """Returns the size in bytes of the packed bundle, without reading any values."""
    _, manifest, specs = _packed(curvature)
    return bundle_size(manifest, specs)


def digest_of(curvature: Curvature) -> str:
    """Returns the digest of the packed bundle."""
    stored, manifest, specs = _packed(curvature)
    digests = {}
    for name, matrix in stored.items():
        for component in matrix.components.specs:
            content = sha256()
            for part in matrix.components.parts(component):
                content.update(raw_bytes(part))
            digests[_tensor_name(name, component)] = content.hexdigest()
    return bundle_digest(manifest, specs, digests)


def _packed(curvature: Curvature) -> tuple[dict[str, Matrix], Manifest, dict[str, Spec]]:
    """Returns the matrices as they are stored in a packed bundle, its manifest and its tensor specs."""
    matrices, identifiers = _named_matrices(curvature)
    stored = {name: matrix.for_storage() for name, matrix in matrices.items()}
    return stored, *_manifest_and_specs(curvature, "bundle", stored, identifiers)


def _manifest_and_specs(
    curvature: Curvature,
    path: str | os.PathLike[str],
    stored: Mapping[str, Matrix],
    identifiers: Mapping[int, str],
) -> tuple[Manifest, dict[str, Spec]]:
    """Returns the manifest, and the dtype and shape of every tensor."""
    specs = {
        _tensor_name(name, component): spec
        for name, matrix in stored.items()
        for component, spec in matrix.components.specs.items()
    }
    try:
        return _manifest(curvature, stored, identifiers), specs
    except ValidationError as error:
        keys, problem = first_problem(error)
        raise BundleError(path, problem, ".".join(map(str, keys))) from error


def _named_matrices(curvature: Curvature) -> tuple[dict[str, Matrix], dict[int, str]]:
    """Returns every matrix once, by the name `BLOCK/ROLE` of its first use, and the names by the id of the matrix."""
    matrices: dict[str, Matrix] = {}
    identifiers: dict[int, str] = {}
    for block in curvature.blocks:
        for role, matrix in block.structure.matrices():
            if id(matrix) not in identifiers:
                identifiers[id(matrix)] = f"{block.name}/{role}"
                matrices[f"{block.name}/{role}"] = matrix
    return matrices, identifiers


def _manifest(curvature: Curvature, stored: Mapping[str, Matrix], identifiers: Mapping[int, str]) -> Manifest:
    blocks = tuple(
        block.structure.entry(
            {role: identifiers[id(matrix)] for role, matrix in block.structure.matrices()},
            name=block.name,
            operation=block.operation,
            join=block.join,
            losses=block.losses,
        )
        for block in curvature.blocks
    )
    entries = tuple(
        MatrixEntry(
            name=name,
            form=matrix.form,
            version=LAYOUTS[matrix.form].version,
            side=matrix.side,
            psd=matrix.psd,
            examples=matrix.examples,
            positions=matrix.positions,
            tensors=tuple(
                TensorEntry(component=component, name=_tensor_name(name, component), sha256=UNSEALED)
                for component in matrix.components.specs
            ),
        )
        for name, matrix in stored.items()
    )
    about = {key: getattr(curvature.about, key) for key in About.model_fields}
    producer = f"kfacpack {version('kfacpack')}"
    return Manifest(version=VERSION, producer=producer, matrices=entries, blocks=blocks, **about)


def _tensor_name(matrix: str, component: str) -> str:
    return matrix if component == "data" else f"{matrix}.{component}"


def _require_finite(path: str | os.PathLike[str], name: str, tensor: Tensor) -> None:
    # aminmax propagates NaN, so this needs no copy and no mask.
    if tensor.is_floating_point() and tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
        raise BundleError(path, "contains NaN or Inf", where=f"tensor {name!r}", remedy="Nothing was written")
