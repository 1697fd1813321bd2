"""What a sum of task vectors says of itself, and which sums are refused.

A vector as it was trained, or as it is read from a file: what sums are sums of.
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

    WeightedVectors = Sequence[tuple[float, "VectorStorage"]]

    TensorReader = Callable[[str], Tensor]

    """A tensor of the file, by its name."""


_LARGEST = (2 - 2**-23) * 2.0**127


def check_addable(ours: VectorStorage, theirs: VectorStorage) -> None:
    """Refuse vectors that do not belong together, naming what differs."""
    one, other = ours.about, theirs.about
    names = " and ".join(repr(", ".join(task.name for task in about.tasks)) for about in (one, other))
    if one.regime != other.regime:
        raise TaskVectorError(f"{names} were trained in different regimes: {one.regime!r} and {other.regime!r}")
    if difference := function_difference(one.function, other.function):
        raise TaskVectorError(f"{names} were trained for different f: {difference}")
    mine = {parameter.name: parameter for parameter in one.base.parameters}
    yours = {parameter.name: parameter for parameter in other.base.parameters}
    for name in [*mine, *yours]:
        if name not in mine or name not in yours:
            raise TaskVectorError(f"{names} cover different parameters: only one of them has {name!r}")
        if mine[name] != yours[name]:
            models = f"{one.base.name} and {other.base.name}"
            raise TaskVectorError(f"{names} are of different base models ({models}): {name!r} is not the same there")
    for task, head in ours.heads.items():
        if task in theirs.heads and (difference := head.difference(theirs.heads[task])):
            raise TaskVectorError(f"both have a head for {printable(task)!r}, but not the same one: {difference}")


def require_finite(coefficient: float) -> float:
    """Vectors are float32: what is multiplied by more than that can hold is no vector. Factors of factors may be so
    large, though each of them is not."""
    if not abs(coefficient) <= _LARGEST:
        most = f"float32 holds {_LARGEST:.2g} at most"
        raise TaskVectorError(f"an addend's coefficient would be {coefficient:g}, {most}; multiply by smaller numbers")
    return coefficient


def about_sum(terms: WeightedVectors) -> AboutVector:
    """One leaf, as it is, is what it says; anything else is a sum.

    Methods are homogeneous, so that a multiple of what one made is what it makes of multiples.
    """
    first = terms[0][1].about
    if len(terms) == 1 and terms[0][0] == 1:
        return first
    method = first.method if len(terms) == 1 else None
    return first.model_copy(update={"tasks": _tasks(terms), "addends": _addends(terms), "method": method})


def heads_of(terms: WeightedVectors) -> dict[str, Head]:
    found: dict[str, Head] = {}
    for _, leaf in terms:
        for task, head in leaf.heads.items():
            found.setdefault(task, head)
    return found


def _tasks(terms: WeightedVectors) -> tuple[TaskEntry, ...]:
    found: dict[str, TaskEntry] = {}
    for _, leaf in terms:
        for task in leaf.about.tasks:
            known = found.setdefault(task.name, task)
            if known != task:
                # The same task, trained twice: how, the addends' own files tell.
                training = known.training if known.training == task.training else None
                found[task.name] = known.model_copy(update={"training": training, "head": known.head or task.head})
    return tuple(found.values())


def _addends(terms: WeightedVectors) -> tuple[Addend, ...]:
    found: dict[str, Addend] = {}
    for factor, leaf in terms:
        # What a method made is no sum of its addends: it counts as one itself.
        apart = leaf.about.method is None or len(terms) == 1
        for addend in (leaf.about.addends if apart else ()) or (_itself(leaf),):
            before = found[addend.sha256].coefficient if addend.sha256 in found else 0.0
            total = require_finite(before + factor * addend.coefficient)
            found[addend.sha256] = addend.model_copy(update={"coefficient": total})
    return tuple(found.values())


def _itself(leaf: VectorStorage) -> Addend:
    return Addend(sha256=leaf.digest, coefficient=1.0, tasks=tuple(task.name for task in leaf.about.tasks))


class VectorStorage(ABC):
    about: AboutVector

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """A parameter's change, float32. It may be the leaf's own memory, and is not to be changed."""

    @property
    @abstractmethod
    def heads(self) -> Mapping[str, Head]:
        """A task's name -> its head."""

    @cached_property
    def digest(self) -> str:
        """Of the whole content of its file, or of the one that it would be saved to."""
        return vector_digest(self.about, open_storage(self.read, self.about, self.heads))


class InMemoryVector(VectorStorage):
    def __init__(self, tensors: Mapping[str, Tensor], about: AboutVector, heads: Mapping[str, Head]):
        self.about = about
        self._tensors = tensors
        self._heads = heads

    def read(self, name: str) -> Tensor:
        return self._tensors[name].detach().float()

    @property
    def heads(self) -> Mapping[str, Head]:
        return self._heads


class FileVector(VectorStorage):
    def __init__(self, path: str | os.PathLike[str]):
        self.file = VectorFile(path)
        self.about = self.file.manifest.about()

    def read(self, name: str) -> Tensor:
        spec, data = self.file.tensors[name], self.file.bytes_of(name)
        if spec.start % ITEM_BYTES[spec.dtype]:
            data = memoryview(bytearray(data))  # other writers may lay tensors at odd places
        return torch.frombuffer(data, dtype=torch.float32).view(spec.shape)

    @cached_property
    def heads(self) -> Mapping[str, Head]:
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
        return self.file.digest


class VectorFile(SealedFile):
    """An open file: its manifest now, its tensors when asked for. The first touch of one checks its SHA-256."""

    def __init__(self, path: str | os.PathLike[str] | Container):
        super().__init__(path, VECTOR)
        self.manifest = validated(self.path, self.said, VectorManifest)
        self._digests = {each.name: each.sha256 for each in self.manifest.tensors}
        expected = self.manifest.specs()
        for name, (dtype, shape) in expected.items():
            where = f"tensor {name!r}"
            if name not in self.tensors or name not in self._digests:
                problem = "is not there, though the manifest speaks of it"
                raise BundleError(self.path, problem, where, download_again(self.path))
            found = self.tensors[name]
            if (found.dtype, found.shape) != (dtype, shape):
                problem = f"is {found.dtype} of shape {list(found.shape)}, expected {dtype} of {list(shape)}"
                raise BundleError(self.path, problem, where)
        if more := [name for name in self.tensors if name not in expected]:
            raise BundleError(self.path, "is neither a parameter's nor a head's", f"tensor {more[0]!r}")

    def __reduce__(self) -> tuple[type[VectorFile], tuple[str]]:
        return VectorFile, (str(self.path),)


def open_storage(parameter: TensorReader, about: AboutVector, heads: Mapping[str, Head]) -> TensorReader:
    """Every tensor of a file that is to be, float32."""
    numbers = {
        head_name(number, what): getattr(heads[task.name], what).detach().float()
        for number, task in enumerate(about.tasks)
        for what in ("weight", "bias")
        if task.head
    }
    return lambda name: numbers[name] if name in numbers else parameter(name)


def write_vector(
    path: str | os.PathLike[str],
    about: AboutVector,
    read: TensorReader,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """The file, whole or not at all, a tensor at a time."""
    specs = about.specs()
    with write_sealed(path, _manifest(about), specs, VECTOR) as put:
        for number, name in enumerate(specs):
            progress(number, len(specs))
            tensor = read(name)
            if not bool(torch.stack(tensor.aminmax()).isfinite().all()):
                problem = "has a number that is not finite"
                raise BundleError(path, problem, f"tensor {name!r}", "Nothing was written")
            put(name, raw_bytes(tensor))


def vector_digest(about: AboutVector, read: TensorReader) -> str:
    """The digest that its file will have."""
    specs = about.specs()
    digests = {name: sha256(raw_bytes(read(name))).hexdigest() for name in specs}
    return bundle_digest(_manifest(about), specs, digests, VECTOR)


def _manifest(about: AboutVector) -> VectorManifest:
    said = {key: getattr(about, key) for key in AboutVector.model_fields}
    tensors = tuple(StoredTensor(name=name, sha256=UNSEALED) for name in about.specs())
    return VectorManifest(version=VERSION, producer=f"kfacpack {version('kfacpack')}", tensors=tensors, **said)
