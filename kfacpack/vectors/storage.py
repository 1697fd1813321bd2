"""Storage of the tensors of a task vector, and the provenance of sums of vectors.

A `TaskVector` is a weighted sum of `VectorStorage` objects: vectors in memory, in a file, or computed by a merge
method.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfacpack.curvature.matrices.components import raw_bytes
from kfacpack.errors import BundleError, TaskVectorError, printable
from kfacpack.format.container import ITEM_BYTES, UNSEALED, VECTOR, Container, download_again
from kfacpack.format.identity import function_difference
from kfacpack.format.reader import SealedFile, validated
from kfacpack.format.vector_manifest import (
    VERSION,
    AboutVector,
    Addend,
    StoredTensor,
    TaskEntry,
    VectorManifest,
    head_name,
)
from kfacpack.format.writer import bundle_digest, write_sealed
from kfacpack.models.heads import Head

if TYPE_CHECKING:
    import os

    from kfacpack.format.units import OnProgress

    WeightedVectors = Sequence[tuple[float, "VectorStorage"]]
    """The terms of a sum: (coefficient, vector)."""
    TensorReader = Callable[[str], Tensor]
    """Returns the tensor of a given name."""


_MAX_FLOAT32 = (2 - 2**-23) * 2.0**127


class VectorStorage(ABC):
    """The tensors, heads and provenance of one task vector."""

    about: AboutVector

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Returns a parameter's change in float32. It may share memory and must not be modified.

        Args:
            name: Name of the parameter.
        """

    @property
    @abstractmethod
    def heads(self) -> Mapping[str, Head]:
        """Heads by task name."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the whole content of its file, or of the file it would be saved to."""
        return vector_digest(self.about, file_tensors(self.read, self.about, self.heads))


class InMemoryVector(VectorStorage):
    """A task vector whose tensors are in memory."""

    def __init__(self, tensors: Mapping[str, Tensor], about: AboutVector, heads: Mapping[str, Head]):
        self.about = about
        self._tensors = tensors
        self._heads = heads

    def read(self, name: str) -> Tensor:
        """Returns a parameter's change in float32."""
        return self._tensors[name].detach().float()

    @property
    def heads(self) -> Mapping[str, Head]:
        """Heads by task name."""
        return self._heads


class FileVector(VectorStorage):
    """A task vector in a file, which is memory-mapped.

    Args:
        path: The file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.file = VectorFile(path)
        self.about = self.file.manifest.about()

    def read(self, name: str) -> Tensor:
        """Returns a parameter's change in float32; the first access checks its SHA-256."""
        spec, data = self.file.tensors[name], self.file.bytes_of(name)
        if spec.start % ITEM_BYTES[spec.dtype]:
            data = memoryview(bytearray(data))  # other writers may not align tensors
        return torch.frombuffer(data, dtype=torch.float32).view(spec.shape)

    @cached_property
    def heads(self) -> Mapping[str, Head]:
        """Heads by task name."""
        return {
            task.name: Head(
                self.read(head_name(number, "weight")),
                self.read(head_name(number, "bias")),
                task.head.classes,
                task.head.origin,
            )
            for number, task in enumerate(self.about.tasks)
            if task.head
        }

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the whole content of the file."""
        return self.file.digest


class VectorFile(SealedFile):
    """An open task vector file. The manifest is read at once, tensors are read and checked when they are accessed.

    Args:
        path: The file.

    Raises:
        BundleError: If the file is not a task vector, or if its tensors do not match its manifest.
    """

    def __init__(self, path: str | os.PathLike[str] | Container):
        super().__init__(path, VECTOR)
        self.manifest = validated(self.path, self.manifest_json, VectorManifest)
        self._digests = {tensor.name: tensor.sha256 for tensor in self.manifest.tensors}
        expected = self.manifest.specs()
        for name, (dtype, shape) in expected.items():
            where = f"tensor {name!r}"
            if name not in self.tensors or name not in self._digests:
                problem = "is missing, although the manifest requires it"
                raise BundleError(self.path, problem, where, download_again(self.path))
            spec = self.tensors[name]
            if (spec.dtype, spec.shape) != (dtype, shape):
                problem = f"is {spec.dtype} of shape {list(spec.shape)}, expected {dtype} of {list(shape)}"
                raise BundleError(self.path, problem, where)
        if unexpected := [name for name in self.tensors if name not in expected]:
            problem = "belongs neither to a parameter nor to a head"
            raise BundleError(self.path, problem, f"tensor {unexpected[0]!r}")

    def __reduce__(self) -> tuple[type[VectorFile], tuple[str]]:
        return VectorFile, (str(self.path),)


def check_addable(first: VectorStorage, second: VectorStorage) -> None:
    """Checks that two task vectors can be added.

    Raises:
        TaskVectorError: If their regime, f, base model or parameters differ, or their heads for a common task.
    """
    one, other = first.about, second.about
    names = " and ".join(repr(", ".join(task.name for task in about.tasks)) for about in (one, other))
    if one.regime != other.regime:
        raise TaskVectorError(f"{names} were trained in different regimes: {one.regime!r} and {other.regime!r}")
    if difference := function_difference(one.function, other.function):
        raise TaskVectorError(f"{names} were trained for different functions f: {difference}")
    first_parameters = {parameter.name: parameter for parameter in one.base.parameters}
    second_parameters = {parameter.name: parameter for parameter in other.base.parameters}
    for name in [*first_parameters, *second_parameters]:
        if name not in first_parameters or name not in second_parameters:
            raise TaskVectorError(f"{names} cover different parameters: only one of them has {name!r}")
        if first_parameters[name] != second_parameters[name]:
            models = f"{one.base.name} and {other.base.name}"
            raise TaskVectorError(f"{names} have different base models ({models}): the parameter {name!r} differs")
    for task, head in first.heads.items():
        if task in second.heads and (difference := head.difference(second.heads[task])):
            raise TaskVectorError(f"{names} have different heads for {printable(task)!r}: {difference}")


def require_finite(coefficient: float) -> float:
    """Returns a coefficient if float32 can represent it; a product of coefficients may overflow.

    Raises:
        TaskVectorError: If it cannot.
    """
    if not abs(coefficient) <= _MAX_FLOAT32:
        limit = f"more than the float32 maximum of {_MAX_FLOAT32:.2g}"
        raise TaskVectorError(f"an addend's coefficient would be {coefficient:g}, {limit}; use smaller factors")
    return coefficient


def about_sum(terms: WeightedVectors) -> AboutVector:
    """Returns the provenance of a sum; a single vector with coefficient 1 keeps its own.

    A multiple of a merged vector keeps its method, because merge methods are homogeneous: it is the merge of the
    multiplied inputs.
    """
    first = terms[0][1].about
    if len(terms) == 1 and terms[0][0] == 1:
        return first
    method = first.method.multiplied(terms[0][0]) if first.method and len(terms) == 1 else None
    return first.model_copy(update={"tasks": _tasks(terms), "addends": _addends(terms), "method": method})


def heads_of(terms: WeightedVectors) -> dict[str, Head]:
    """Returns the heads of all tasks of a sum, by task name."""
    heads: dict[str, Head] = {}
    for _, vector in terms:
        for task, head in vector.heads.items():
            heads.setdefault(task, head)
    return heads


def _tasks(terms: WeightedVectors) -> tuple[TaskEntry, ...]:
    tasks: dict[str, TaskEntry] = {}
    for _, vector in terms:
        for task in vector.about.tasks:
            first = tasks.setdefault(task.name, task)
            if first != task:
                # The task was trained twice; the addends' own files record how.
                training = first.training if first.training == task.training else None
                tasks[task.name] = first.model_copy(update={"training": training, "head": first.head or task.head})
    return tuple(tasks.values())


def _addends(terms: WeightedVectors) -> tuple[Addend, ...]:
    addends: dict[str, Addend] = {}
    for factor, vector in terms:
        # The result of a merge method is not the sum of its addends, so it is itself an addend.
        is_sum = vector.about.method is None or len(terms) == 1
        for addend in (vector.about.addends if is_sum else ()) or (_as_addend(vector),):
            before = addends[addend.sha256].coefficient if addend.sha256 in addends else 0.0
            total = require_finite(before + factor * addend.coefficient)
            addends[addend.sha256] = addend.model_copy(update={"coefficient": total})
    return tuple(addends.values())


def _as_addend(vector: VectorStorage) -> Addend:
    return Addend(sha256=vector.digest, coefficient=1.0, tasks=tuple(task.name for task in vector.about.tasks))


def file_tensors(parameter: TensorReader, about: AboutVector, heads: Mapping[str, Head]) -> TensorReader:
    """Returns a reader of all tensors of a file, in float32.

    Args:
        parameter: Reads a parameter's change.
        about: The provenance, which lists the tasks.
        heads: Heads by task name.
    """
    head_tensors = {
        head_name(number, part): getattr(heads[task.name], part).detach().float()
        for number, task in enumerate(about.tasks)
        for part in ("weight", "bias")
        if task.head
    }
    return lambda name: head_tensors[name] if name in head_tensors else parameter(name)


def write_vector(
    path: str | os.PathLike[str],
    about: AboutVector,
    read: TensorReader,
    on_progress: OnProgress = lambda done, total: None,
) -> None:
    """Writes a task vector file atomically, one tensor at a time.

    Args:
        path: The file to write.
        about: The provenance.
        read: Reads a tensor of the file.
        on_progress: Called with the number of tensors written and their total.

    Raises:
        BundleError: If a tensor contains NaN or Inf, or if the file cannot be written.
    """
    specs = about.specs()
    with write_sealed(path, _manifest(about), specs, VECTOR) as put:
        for number, name in enumerate(specs):
            on_progress(number, len(specs))
            tensor = read(name)
            if not bool(torch.stack(tensor.aminmax()).isfinite().all()):
                raise BundleError(path, "contains NaN or Inf", f"tensor {name!r}", "Nothing was written")
            put(name, raw_bytes(tensor))


def vector_digest(about: AboutVector, read: TensorReader) -> str:
    """Returns the digest that the file of a task vector will have.

    Args:
        about: The provenance.
        read: Reads a tensor of the file.
    """
    specs = about.specs()
    digests = {name: sha256(raw_bytes(read(name))).hexdigest() for name in specs}
    return bundle_digest(_manifest(about), specs, digests, VECTOR)


def _manifest(about: AboutVector) -> VectorManifest:
    fields = {key: getattr(about, key) for key in AboutVector.model_fields}
    tensors = tuple(StoredTensor(name=name, sha256=UNSEALED) for name in about.specs())
    return VectorManifest(version=VERSION, producer=f"kfacpack {version('kfacpack')}", tensors=tensors, **fields)
