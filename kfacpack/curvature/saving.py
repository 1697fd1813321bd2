"""Saves a curvature as a bundle in one or several files, or as a plain safetensors file for use without kfacpack.

The matrices of a bundle are packed, checked, hashed and written in chunks. The metadata of a plain file explains how to
use its tensors.
"""

from __future__ import annotations

import json
import os
from hashlib import sha256
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from kfacpack.curvature.matrices.components import FILE_TYPES, raw_bytes
from kfacpack.errors import BundleError, KfacpackError
from kfacpack.format.bundle_index import is_index, write_index
from kfacpack.format.container import UNSEALED, Spec
from kfacpack.format.manifest import (
    VERSION,
    About,
    FloatType,
    Manifest,
    MatrixEntry,
    TensorEntry,
    base_digest,
    first_problem,
)
from kfacpack.format.reader import Bundle
from kfacpack.format.schema import LAYOUTS
from kfacpack.format.units import parse_size
from kfacpack.format.writer import bundle_digest, bundle_size, sealed_header, write_bundle, write_plain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from typing_extensions import Self

    from kfacpack.curvature.blocks import CurvatureBlock
    from kfacpack.curvature.curvature import Curvature
    from kfacpack.curvature.matrices.matrix import Matrix
    from kfacpack.format.units import OnProgress


MAX_SHARD_BYTES = 5_000_000_000
"""Default maximum size of a shard in bytes."""


def save(
    curvature: Curvature,
    path: str | os.PathLike[str],
    *,
    pack: bool,
    max_shard_size: int | str | None,
    on_progress: OnProgress,
) -> None:
    """Atomically writes a curvature to a single file, or to several files with an index; see `Curvature.save`.

    Raises:
        BundleError: If a value is not finite, the metadata is invalid, or a file cannot be written.
    """
    if not is_index(path):
        _save_file(curvature, path, pack=pack, on_progress=on_progress)
        return
    limit = MAX_SHARD_BYTES if max_shard_size is None else parse_shard_size(max_shard_size)
    groups, done, target = _shard_groups(curvature, limit, pack=pack), 0, Path(path)
    total = sum(len(_named_matrices(group)[0]) for group in groups)
    try:
        with TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
            parts = []
            for number, group in enumerate(groups):
                part = Path(folder) / f"{number}.kfac"
                _save_file(group, part, pack=pack, on_progress=_shifted(on_progress, done, total))
                done += len(_named_matrices(group)[0])
                parts.append(part)
            save_index(curvature, target, parts, pack=pack)
    except OSError as error:
        raise BundleError(path, f"could not be written: {error.strerror or error}") from error


def _shifted(on_progress: OnProgress, done: int, total: int) -> OnProgress:
    """Returns a progress callback for work that begins when `done` of `total` items are already finished."""
    return lambda number, _: on_progress(done + number, total)


def parse_shard_size(size: int | str) -> int:
    """Parses a maximum shard size such as `"2GB"` and returns it as a number of bytes.

    Raises:
        KfacpackError: If `size` is not a valid size.
    """
    try:
        return parse_size(size, 0) or parse_size("", 0)
    except KfacpackError as error:
        raise KfacpackError(f"invalid maximum shard size {size!r}; expected a size such as 500MB or 2GB") from error


def save_index(curvature: Curvature, path: Path, parts: Sequence[Path], *, pack: bool = True) -> None:
    """Combines bundles, which together contain all blocks of a curvature, into one bundle with several shards.

    Args:
        curvature: The curvature.
        path: The index to write.
        parts: The bundles, which become the shards. They are linked or copied into the folder of the index.
        pack: See `Curvature.save`.

    Raises:
        BundleError: If the bundles do not contain the blocks of the curvature, or a file cannot be written.
    """
    matrices, identifiers = _named_matrices(curvature)
    stored = {name: matrix.for_storage() if pack else matrix for name, matrix in matrices.items()}
    manifest, specs = _manifest_and_specs(curvature, path, stored, identifiers)
    bundles = [Bundle(part) for part in parts]
    digests = {
        tensor.name: tensor.sha256
        for bundle in bundles
        for matrix in bundle.manifest.matrices
        for tensor in matrix.tensors
    }
    if digests.keys() != specs.keys():
        raise BundleError(path, "the tensors in the shards are not the same as the tensors of the curvature")
    header = sealed_header(path, manifest, specs, digests)
    write_index(path, header, [(part, bundle.digest) for part, bundle in zip(parts, bundles, strict=True)])


def _shard_groups(curvature: Curvature, limit: int, *, pack: bool) -> list[Curvature]:
    """Divides a curvature into several curvatures of at most `limit` bytes.

    Blocks that share a matrix or a parameter are put into the same curvature, even if it exceeds the limit. A curvature
    with a single block may also exceed the limit.
    """
    groups: list[list[CurvatureBlock]] = []
    sizes: list[int] = []
    owners: dict[object, int] = {}  # index of the group that contains a matrix (by id) or a parameter (by name)
    for block in curvature.blocks:
        matrices = [matrix for _, matrix in block.structure.matrices()]
        keys = {*map(id, matrices), *block.parameters}
        shared = {owners[key] for key in keys if key in owners}
        size = sum((m.for_storage() if pack else m).nbytes for m in matrices if id(m) not in owners)
        if shared:
            group = min(shared)
            for other in shared - {group}:  # merge all groups that share tensors with this block
                groups[group] += groups[other]
                sizes[group] += sizes[other]
                groups[other], sizes[other] = [], 0
                owners.update({key: group for key, owner in owners.items() if owner == other})
        elif groups and groups[-1] and sizes[-1] + size <= limit:
            group = len(groups) - 1
        else:
            groups.append([])
            sizes.append(0)
            group = len(groups) - 1
        groups[group].append(block)
        sizes[group] += size
        owners.update(dict.fromkeys(keys, group))
    return [part_of(curvature, group) for group in groups if group]


def part_of(curvature: Curvature, blocks: Sequence[CurvatureBlock]) -> Curvature:
    """Returns a curvature that contains only the given blocks of a curvature.

    Args:
        curvature: The original curvature.
        blocks: The blocks to keep.
    """
    covered = {name for block in blocks for name in block.parameters}
    base = curvature.about.base
    parameters = tuple(parameter for parameter in base.parameters if parameter.name in covered)
    own = base.model_copy(update={"parameters": parameters, "sha256": base_digest(parameters)})
    return type(curvature)(blocks, curvature.about.model_copy(update={"base": own}))


def _save_file(curvature: Curvature, path: str | os.PathLike[str], *, pack: bool, on_progress: OnProgress) -> None:
    """Writes a curvature to one file atomically."""
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
    """Returns the size in bytes of the file that `Curvature.save` would write, without reading any values."""
    _, manifest, specs = _packed(curvature)
    return bundle_size(manifest, specs)


def digest_of(curvature: Curvature) -> str:
    """Returns the digest of the file that `Curvature.save` would write. All values are computed and hashed."""
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
    """Returns the content of the file that `Curvature.save` would write.

    Returns:
        The matrices in their stored form, by name; the manifest; and the dtype and shape of every tensor, by name.
    """
    matrices, identifiers = _named_matrices(curvature)
    stored = {name: matrix.for_storage() for name, matrix in matrices.items()}
    return stored, *_manifest_and_specs(curvature, "bundle", stored, identifiers)


def _manifest_and_specs(
    curvature: Curvature,
    path: str | os.PathLike[str],
    stored: Mapping[str, Matrix],
    identifiers: Mapping[int, str],
) -> tuple[Manifest, dict[str, Spec]]:
    """Returns the manifest of a bundle, and the dtype and shape of every tensor, by name."""
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
    """Returns a mapping of names to the matrices of a curvature, and a mapping of matrix ids to these names.

    A matrix is named `BLOCK/ROLE` after the first block that uses it.
    """
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
    requires = ("metric",) if curvature.about.metric else ()
    return Manifest(version=VERSION, requires=requires, producer=producer, matrices=entries, blocks=blocks, **about)


def _tensor_name(matrix: str, component: str) -> str:
    return matrix if component == "data" else f"{matrix}.{component}"


def _require_finite(path: str | os.PathLike[str], name: str, tensor: Tensor) -> None:
    # aminmax propagates NaN, so this check needs neither a copy nor a mask.
    if tensor.is_floating_point() and tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
        raise BundleError(path, "contains NaN or Inf", where=f"tensor {name!r}", remedy="Nothing was written")


FORMAT = "kfacpack.factors/1"
"""Value of the metadata key "format" in an exported file."""
INSTRUCTIONS = (
    "For each block, join the changes to its parameters into a matrix dW (rows, columns). Each piece of the join is a "
    "parameter or, if the piece has 'rows', the rows [start, stop) of a parameter. The 'view' of a piece is 'matrix' "
    "(first dimension, product of all others), 'transposed' (the transpose of this matrix) or 'column' (one column). "
    "The upper left corner of the piece is at [row, column] = 'at' in dW.\n"
    "G dW is the sum of weight * B @ dW @ A over the terms, or (G @ dW.reshape(-1)).reshape(rows, columns) if the "
    "block has G. A one-dimensional tensor is the diagonal of a diagonal matrix: multiply each row by its entry.\n"
    "The penalty is the sum of (dW * G dW).sum() over the blocks. Its gradient with respect to dW is 2 G dW."
)
"""Value of the metadata key "how" in an exported file."""
_WIDER = {
    "float16": "Use bfloat16 or float32. ",
    "bfloat16": "Use float32. ",
    "float32": "Use float64. ",
}
"""Remedies for values that are out of range, by the dtype for which they are out of range."""


def export(
    curvature: Curvature | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    dtype: FloatType = "float32",
    on_progress: OnProgress = lambda done, total: None,
) -> None:
    """Atomically writes every matrix as a dense tensor to a plain safetensors file.

    A block with Kronecker factors is written as the tensors BLOCK/A and BLOCK/B or, if it has several terms, as
    BLOCK/A.0, BLOCK/B.0, BLOCK/A.1 and so on. Any other block is written as one tensor BLOCK/G. BLOCK is the name of
    the block's first parameter, or NAME[start:stop] if the block covers only these rows of a fused parameter. Diagonal
    matrices are written as vectors. The metadata key "factors" describes in JSON how the parameters of each block are
    joined. The key "how" contains instructions for using the file. Matrices are unpacked one at a time. A matrix that
    several blocks share is written once for each block.

    Args:
        curvature: A curvature, or the path of a bundle.
        path: File to write.
        dtype: Dtype of the tensors, such as "float32" or "bfloat16".
        on_progress: Called with the number of matrices written and the total number.

    Raises:
        KfacpackError: If a value is out of range for `dtype`, or the file cannot be written.

    Example:
        >>> import kfacpack as kp
        >>> kp.export("mnist.kfac", "factors.safetensors", dtype="bfloat16")  # doctest: +SKIP
    """
    if isinstance(curvature, str | os.PathLike):
        # Imported here to avoid a circular import.
        from kfacpack.curvature.curvature import load

        curvature = load(curvature)
    number_type: torch.dtype = getattr(torch, dtype)
    # Round last: scale int8 values and compute low-rank products in at least float32.
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
                    problem = f"contains NaN, Inf or values out of range for {dtype}"
                    raise KfacpackError(f"matrix {name!r} {problem}. {_WIDER.get(dtype, '')}Nothing was written")
                write(name, raw_bytes(part))
        on_progress(len(matrices), len(matrices))


def _description(curvature: Curvature) -> dict[str, Any]:
    about = curvature.about
    base = about.base
    return {
        "scaling": about.scaling.model_dump(mode="json"),
        "function": about.function.model_dump(mode="json", exclude_none=True),
        "metric": about.metric or "l2",
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


class PretrainedMixin:
    """Methods that save a curvature or task vector to a directory or to the Hugging Face Hub, and load it from there.

    They follow the conventions of huggingface_hub. The default file name is `curvature.kfac` for a curvature and
    `vector.safetensors` for a task vector.
    """

    def save_pretrained(self, directory: str | os.PathLike[str], *, filename: str | None = None) -> Path:
        """Saves the object to a directory, which is created if it does not exist.

        Args:
            directory: Target directory.
            filename: Name of the file. Defaults to `curvature.kfac` or `vector.safetensors`.

        Returns:
            The path of the file.

        Raises:
            KfacpackError: If `directory` is a file, or `filename` contains a path separator.
        """
        path: Path = _pretrained().save_pretrained(self, directory, filename=filename)
        return path

    def push_to_hub(self, repo_id: str, **settings: Any) -> Any:
        """Uploads the object and a model card to the Hugging Face Hub.

        Args:
            repo_id: Repository, `owner/repo`. It is created if it does not exist.
            **settings: `filename` (defaults to `curvature.kfac` or `vector.safetensors`), `revision`, `private`,
                `commit_message`, `license` and `base_model`; see `kfacpack.hub.push.push_to_hub`.

        Returns:
            A description of the upload, including the commit id.

        Raises:
            HubError: If the repository cannot be written.
        """
        return _pretrained().push_to_hub(self, repo_id, **settings)

    @classmethod
    def from_pretrained(
        cls, repo_or_path: str | os.PathLike[str], *, revision: str | None = None, filename: str | None = None
    ) -> Self:
        """Loads a curvature or task vector from a local file or directory, or from the Hugging Face Hub.

        Args:
            repo_or_path: A directory or file, `owner/repo`, `owner/repo@revision`, or `hf://owner/repo/file`.
            revision: Branch, tag or commit of the repository. Defaults to the main branch.
            filename: Name of the file. Defaults to `curvature.kfac` or `vector.safetensors`. If this default file does
                not exist, the only curvature or the only task vector in the directory or repository is loaded.

        Returns:
            An instance of this class. Its tensors are read when they are used.

        Raises:
            KfacpackError: If the source does not exist, or the file to load is missing or ambiguous.
            HubError: If the repository cannot be read.
        """
        instance: Self = _pretrained().from_pretrained(cls, repo_or_path, revision, filename)
        return instance


def _pretrained() -> Any:
    # Imported on first use, because kfacpack.hub imports the classes that use this mixin.
    return import_module("kfacpack.hub.push")
