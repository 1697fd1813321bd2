"""Storage of the tensors of a task vector, in memory and in a file.

A `TaskVector` is a weighted sum of `VectorStorage` objects: vectors in memory, in a file, or computed by a merge
method. `parameter_change.py` describes the forms in which the change to a parameter is stored. `read_vector_tensors`
also reads vectors that were written by other programs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property
from hashlib import sha256
from importlib.metadata import version
from math import prod
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kfacpack.curvature.matrices.components import TORCH_TYPES, map_tensor, raw_bytes
from kfacpack.errors import BundleError
from kfacpack.format.container import UNSEALED, VECTOR, Container, download_again
from kfacpack.format.reader import SealedFile, validated
from kfacpack.format.vector_manifest import (
    AboutVector,
    ParameterStorage,
    StoredTensor,
    VectorManifest,
    factor_name,
    head_name,
    remainder_name,
    sparse_name,
    version_of,
)
from kfacpack.format.writer import bundle_digest, write_sealed
from kfacpack.models.heads import Head
from kfacpack.vectors.parameter_change import (
    Factors,
    Remainder,
    SparseChange,
    dense_change,
    from_sparse,
    no_change,
    pack_bitmap,
    unpack_bitmap,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from kfacpack.curvature.curvature import Curvature
    from kfacpack.format.units import OnProgress


class ParameterChanges(Protocol):
    """Interface for reading parameter changes in their stored form, from a storage or a sum of storages."""

    def read(self, name: str) -> Tensor:
        """Returns a parameter's change in float32."""

    def rank(self, name: str) -> int | None:
        """Returns the rank of a parameter's factors, or None if the change is not stored as factors."""

    def factors(self, name: str) -> Factors | None:
        """Returns the factors U and V of a parameter's change, or None if the change is not stored as factors."""

    def remainder(self, name: str) -> Remainder | None:
        """Returns the remainder of a parameter's change (corrections in float64), or None if there is no remainder."""

    def sparse(self, name: str) -> SparseChange | None:
        """Returns the indices and values of the stored elements of a change, or None if the change is not sparse."""


class VectorStorage(ABC):
    """The tensors, heads and provenance of one task vector."""

    about: AboutVector

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Returns a parameter's change in float32. It may share memory with the storage and must not be modified.

        Args:
            name: Name of the parameter.
        """

    def rank(self, name: str) -> int | None:
        """Returns the rank of a parameter's factors, or None if the change is not stored as factors.

        Subclasses override this method if the rank is known without reading the factors.

        Args:
            name: Name of the parameter.
        """
        factors = self.factors(name)
        return None if factors is None else factors[1].shape[0]

    def factors(self, name: str) -> Factors | None:
        """Returns the factors U (m, r) and V (r, n) of a parameter's change, in float32.

        The product U V is the change, reshaped to (shape[0], -1). The factors may share memory with the storage
        and must not be modified.

        Args:
            name: Name of the parameter.

        Returns:
            The factors, or None if the change is not stored as factors. Rank 0 means that the change is exactly zero.
        """
        return None

    def remainder(self, name: str) -> Remainder | None:
        """Returns the remainder of a parameter's dense change, which consists of float64 corrections to some elements.

        Args:
            name: Name of the parameter.

        Returns:
            Flat indices and corrections, or None if θ0 + τ reproduces the fine-tuned parameter θ exactly without them.
        """
        return None

    def sparse(self, name: str) -> SparseChange | None:
        """Returns the stored elements of a parameter's change if the change is sparse.

        Args:
            name: Name of the parameter.

        Returns:
            Flat indices and float32 values, or None if the change is not sparse. All other elements are zero.
        """
        return None

    @property
    @abstractmethod
    def heads(self) -> Mapping[str, Head]:
        """Classification heads by task name."""

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the parameters that the vector covers."""
        return frozenset(parameter.name for parameter in self.about.base.parameters)

    @cached_property
    def digest(self) -> str:
        """SHA-256 that identifies the content of the vector's file, or of the file that `write_vector` would write."""
        return vector_digest(self.about, self, self.heads)


class InMemoryVector(VectorStorage):
    """A task vector whose tensors are in memory.

    Args:
        tensors: Dense changes by parameter name.
        about: The provenance.
        heads: Classification heads by task name.
        factors: Factors of low-rank changes by parameter name.
        remainders: Remainders of dense changes by parameter name.
        sparse: Sparse changes by parameter name.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        about: AboutVector,
        heads: Mapping[str, Head],
        factors: Mapping[str, Factors] | None = None,
        remainders: Mapping[str, Remainder] | None = None,
        sparse: Mapping[str, SparseChange] | None = None,
    ):
        self.about = about
        self._tensors, self._heads = tensors, heads
        self._factors, self._remainders, self._sparse = factors or {}, remainders or {}, sparse or {}
        self._shapes = {parameter.name: parameter.shape for parameter in about.base.parameters}

    def read(self, name: str) -> Tensor:
        """Returns a parameter's change in float32."""
        if name in self._factors:
            return dense_change(self._factors[name], self._shapes[name])
        if name in self._sparse:
            return from_sparse(self._sparse[name], self._shapes[name])
        return self._tensors[name].detach().float()

    def factors(self, name: str) -> Factors | None:
        """Returns the factors U and V of a parameter's change, or None if the change is not stored as factors."""
        return self._factors.get(name)

    def remainder(self, name: str) -> Remainder | None:
        """Returns the remainder of a parameter's change (corrections in float64), or None if there is no remainder."""
        return self._remainders.get(name)

    def sparse(self, name: str) -> SparseChange | None:
        """Returns the indices and values of the stored elements of a change, or None if the change is not sparse."""
        return self._sparse.get(name)

    @property
    def heads(self) -> Mapping[str, Head]:
        """Classification heads by task name."""
        return self._heads


class FileVector(VectorStorage):
    """A task vector in a memory-mapped file.

    Args:
        path: Path of the file, or its opened container.
    """

    def __init__(self, path: str | os.PathLike[str] | Container):
        self.file = VectorFile(path)
        manifest = self.file.manifest
        self.about = manifest.about()
        self._storage = {entry.name: entry for entry in manifest.storage}
        self._parameters = {
            parameter.name: (number, parameter.shape) for number, parameter in enumerate(manifest.base.parameters)
        }

    def read(self, name: str) -> Tensor:
        """Returns a parameter's change in float32. When a tensor is first accessed, its SHA-256 is checked."""
        if (factors := self.factors(name)) is not None:
            return dense_change(factors, self._parameters[name][1])
        if (sparse := self.sparse(name)) is not None:
            return from_sparse(sparse, self._parameters[name][1])
        return self.file.tensor(name)

    def rank(self, name: str) -> int | None:
        """Returns the rank of a parameter's factors, or None if the change is not stored as factors."""
        return self._storage[name].rank if name in self._storage else None

    def factors(self, name: str) -> Factors | None:
        """Returns the factors U and V of a parameter's change, or None if the change is not stored as factors."""
        if (rank := self.rank(name)) is None:
            return None
        number, shape = self._parameters[name]
        if rank == 0:
            return no_change(shape)
        return self.file.tensor(factor_name(number, "U")), self.file.tensor(factor_name(number, "V"))

    def remainder(self, name: str) -> Remainder | None:
        """Returns the remainder of a parameter's change (corrections in float64), or None if there is no remainder."""
        if name not in self._storage or self._storage[name].remainder is None:
            return None
        number = self._parameters[name][0]
        index = self._checked_index(remainder_name(number, "index"))
        return index.long(), self.file.tensor(remainder_name(number, "value"))

    def sparse(self, name: str) -> SparseChange | None:
        """Returns the indices and values of the stored elements of a change, or None if the change is not sparse."""
        if name not in self._storage or self._storage[name].entries is None:
            return None
        number = self._parameters[name][0]
        bitmap = self._checked_index(sparse_name(number, "mask"))
        return unpack_bitmap(bitmap), self.file.tensor(sparse_name(number, "value"))

    def _checked_index(self, name: str) -> Tensor:
        if problem := self.file.index_problem(name):
            raise BundleError(self.file.path, problem, f"tensor {name!r}")
        return self.file.tensor(name)

    @cached_property
    def heads(self) -> Mapping[str, Head]:
        """Classification heads by task name."""
        return {
            task.name: Head(
                self.file.tensor(head_name(number, "weight")),
                self.file.tensor(head_name(number, "bias")),
                task.head.classes,
                task.head.origin,
            )
            for number, task in enumerate(self.about.tasks)
            if task.head
        }

    @cached_property
    def digest(self) -> str:
        """SHA-256 that identifies the entire content of the file."""
        return self.file.digest


class VectorFile(SealedFile):
    """An open task vector file. The manifest is read immediately; tensors are read and checked when they are accessed.

    Args:
        path: Path of the file, or its opened container.

    Raises:
        BundleError: If the file is not a task vector, or if its tensors do not match its manifest.
    """

    def __init__(self, path: str | os.PathLike[str] | Container):
        super().__init__(path, VECTOR)
        self.manifest = validated(self.path, self.manifest_json, VectorManifest)
        self._digests = {tensor.name: tensor.sha256 for tensor in self.manifest.tensors}
        self._indexed, self._bitmaps = self.manifest.index_limits()
        expected = self.manifest.specs()
        for name, (dtype, shape) in expected.items():
            where = f"tensor {name!r}"
            if name not in self.tensors or name not in self._digests:
                problem = "is missing, although the manifest requires it"
                raise BundleError(self.path, problem, where, download_again(self.path))
            spec = self.tensors[name]
            if (spec.dtype, spec.shape) != (dtype, shape):
                problem = f"is {spec.dtype} of shape {list(spec.shape)}, expected {dtype} of shape {list(shape)}"
                raise BundleError(self.path, problem, where)
        if unexpected := [name for name in self.tensors if name not in expected]:
            problem = "is unexpected: according to the manifest, it is part of neither a parameter's change nor a head"
            raise BundleError(self.path, problem, f"tensor {unexpected[0]!r}")

    def tensor(self, name: str) -> Tensor:
        """Maps a tensor into memory. When it is first accessed, its SHA-256 and its values are checked.

        Args:
            name: Name of the tensor in the file.
        """
        return map_tensor(self, name)

    @property
    def has_indices(self) -> bool:
        """Whether the file contains remainders or sparse changes."""
        return bool(self._indexed or self._bitmaps)

    def index_problem(self, name: str) -> str | None:
        """Describes the first problem with the indices of a remainder, or with the bitmap of a sparse change.

        Args:
            name: Name of a tensor. For tensors other than indices and bitmaps, the result is None.

        Returns:
            A description of the problem, or None if the tensor is valid. Indices must be in ascending order and within
            the parameter. A bitmap must have one set bit for each stored value.
        """
        if name in self._bitmaps:
            entries, size = self._bitmaps[name]
            positions = unpack_bitmap(self.tensor(name))
            if len(positions) != entries:
                return f"the number of set bits is {len(positions)}, expected {entries}, one for each stored value"
            if entries and int(positions[-1]) >= size:
                return f"bit {int(positions[-1])} is set, but only bits below {size} may be set"
        if name not in self._indexed:
            return None
        index, size = self.tensor(name).long(), self._indexed[name]
        outside = ((index < 0) | (index >= size)).nonzero()
        if len(outside):
            return f"element {int(outside[0])} is {int(index[outside[0]])}, expected an index from 0 to {size - 1}"
        if len(unordered := (index.diff() <= 0).nonzero()):
            return f"element {int(unordered[0]) + 1} is not larger than the previous element; expected ascending order"
        return None

    def __reduce__(self) -> tuple[type[VectorFile], tuple[str]]:
        return VectorFile, (str(self.path),)


def write_vector(
    path: str | os.PathLike[str],
    about: AboutVector,
    changes: ParameterChanges,
    heads: Mapping[str, Head],
    on_progress: OnProgress = lambda done, total: None,
) -> None:
    """Writes a task vector file atomically, one parameter at a time.

    Args:
        path: The file to write.
        about: The provenance.
        changes: The changes to the parameters.
        heads: Classification heads by task name.
        on_progress: Called with the number of tensors written and the total number.

    Raises:
        BundleError: If a tensor contains NaN or Inf, or if the file cannot be written.
    """
    manifest = _manifest(about, changes)
    specs = manifest.specs()
    with write_sealed(path, manifest, specs, VECTOR) as put:
        for number, (name, tensor) in enumerate(_file_tensors(manifest, changes, heads)):
            on_progress(number, len(specs))
            if tensor.is_floating_point() and not bool(torch.stack(tensor.aminmax()).isfinite().all()):
                raise BundleError(path, "contains NaN or Inf", f"tensor {name!r}", "Nothing was written")
            put(name, raw_bytes(tensor))
    on_progress(len(specs), len(specs))


def vector_digest(about: AboutVector, changes: ParameterChanges, heads: Mapping[str, Head]) -> str:
    """Returns the digest that the file of a task vector would have, without writing the file.

    Args:
        about: The provenance.
        changes: The changes to the parameters.
        heads: Classification heads by task name.
    """
    manifest = _manifest(about, changes)
    digests = {name: sha256(raw_bytes(tensor)).hexdigest() for name, tensor in _file_tensors(manifest, changes, heads)}
    return bundle_digest(manifest, manifest.specs(), digests, VECTOR)


def _file_tensors(
    manifest: VectorManifest, changes: ParameterChanges, heads: Mapping[str, Head]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a vector in the order in which its file stores them, reading one parameter at a time."""
    specs = manifest.specs()
    for number, parameter in enumerate(manifest.base.parameters):
        name = parameter.name
        if name in specs:
            yield name, changes.read(name)
            if remainder := changes.remainder(name):
                index = remainder_name(number, "index")
                yield index, remainder[0].to(TORCH_TYPES[specs[index][0]])
                yield remainder_name(number, "value"), remainder[1]
        elif factor_name(number, "U") in specs:
            factors = changes.factors(name)
            assert factors is not None, name
            yield factor_name(number, "U"), factors[0]
            yield factor_name(number, "V"), factors[1]
        elif sparse_name(number, "mask") in specs:
            sparse = changes.sparse(name)
            assert sparse is not None, name
            yield sparse_name(number, "mask"), pack_bitmap(sparse[0], prod(parameter.shape))
            yield sparse_name(number, "value"), sparse[1].float()
    for number, task in enumerate(manifest.tasks):
        if task.head:
            yield head_name(number, "weight"), heads[task.name].weight.detach().float()
            yield head_name(number, "bias"), heads[task.name].bias.detach().float()


def _manifest(about: AboutVector, changes: ParameterChanges) -> VectorManifest:
    storage = []
    for parameter in about.base.parameters:
        if (rank := changes.rank(parameter.name)) is not None:
            storage.append(ParameterStorage(name=parameter.name, rank=rank))
        elif remainder := changes.remainder(parameter.name):
            storage.append(ParameterStorage(name=parameter.name, remainder=len(remainder[0])))
        elif (sparse := changes.sparse(parameter.name)) is not None:
            storage.append(ParameterStorage(name=parameter.name, entries=len(sparse[0])))
    fields = {key: getattr(about, key) for key in AboutVector.model_fields}
    manifest = VectorManifest(
        version=version_of(about, storage),
        producer=f"kfacpack {version('kfacpack')}",
        requires=tuple(sorted({entry.feature for entry in storage})),
        storage=tuple(storage),
        tensors=(),
        **fields,
    )
    tensors = tuple(StoredTensor(name=name, sha256=UNSEALED) for name in manifest.specs())
    return manifest.model_copy(update={"tensors": tensors})


def read_vector_tensors(path: str | os.PathLike[str], curvature: Curvature) -> Callable[[str], Tensor]:
    """Opens a file that contains the changes to all parameters that a curvature covers.

    Args:
        path: A task vector, or any safetensors file whose tensors have the names of the parameters. Additional tensors
            are ignored.
        curvature: The curvature. If the file is a task vector, it must have the same base model as the curvature.

    Returns:
        A function that takes the name of a parameter and returns its change.

    Raises:
        BundleError: If the file cannot be read, or if a tensor is missing, has a wrong shape or type, or belongs to
            another base model. The returned function raises this error if a tensor contains NaN or Inf.
    """
    container = Container(path)
    if VECTOR.manifest in container.metadata:
        return _read_task_vector(path, curvature)
    specs = container.tensors
    shapes = {parameter.name: parameter.shape for parameter in curvature.about.base.parameters}
    if missing := [name for name in shapes if name not in specs]:
        problem = f"has no tensor {missing[0]!r}; missing parameters: {len(missing)} of {len(shapes)}"
        raise BundleError(path, problem, None, "Expected a task vector with the model's parameter names")
    for name, shape in shapes.items():
        dtype = TORCH_TYPES.get(specs[name].dtype)
        if specs[name].shape != shape or dtype is None or not dtype.is_floating_point:
            actual = f"{specs[name].dtype} of shape {list(specs[name].shape)}"
            problem = f"is {actual}, expected a floating-point tensor of shape {list(shape)}"
            raise BundleError(path, problem, f"tensor {name!r}")

    def read(name: str) -> Tensor:
        tensor = map_tensor(container, name)
        if not bool(tensor.isfinite().all()):
            raise BundleError(path, "contains NaN or Inf", f"tensor {name!r}")
        return tensor

    return read


def _read_task_vector(path: str | os.PathLike[str], curvature: Curvature) -> Callable[[str], Tensor]:
    """Opens a task vector and checks that it has the same base model as the curvature."""
    vector = FileVector(path)
    parameters = {parameter.name: parameter for parameter in vector.about.base.parameters}
    for parameter in curvature.about.base.parameters:
        if parameters.get(parameter.name) != parameter:
            problem = "belongs to another base model" if parameter.name in parameters else "is missing"
            expected = f"expected a task vector of {curvature.about.base.name} that covers the bundle's parameters"
            raise BundleError(path, f"{problem}; {expected}", f"tensor {parameter.name!r}")
    return vector.read
