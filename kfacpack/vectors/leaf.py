"""A vector as it was trained, or as it is read from a file: what sums are sums of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from hashlib import sha256
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfacpack.bundle.container import ITEM_BYTES, Container, download_again
from kfacpack.bundle.reader import SealedFile, validated
from kfacpack.bundle.seal import UNSEALED, VECTOR
from kfacpack.bundle.writer import bundle_digest, write_sealed
from kfacpack.curvature.matrices.components import raw_bytes
from kfacpack.errors import BundleError
from kfacpack.vectors.head import Head
from kfacpack.vectors.manifest import VERSION, AboutVector, Stored, VectorManifest, head_name

if TYPE_CHECKING:
    import os

    Read = Callable[[str], Tensor]
    """A tensor of the file, by its name."""


class Leaf(ABC):
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
        return digest_of(self.about, reader(self.read, self.about, self.heads))


class InMemory(Leaf):
    def __init__(self, tensors: Mapping[str, Tensor], about: AboutVector, heads: Mapping[str, Head]):
        self.about = about
        self._tensors = tensors
        self._heads = heads

    def read(self, name: str) -> Tensor:
        return self._tensors[name].detach().float()

    @property
    def heads(self) -> Mapping[str, Head]:
        return self._heads


class InFile(Leaf):
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


def reader(parameter: Read, about: AboutVector, heads: Mapping[str, Head]) -> Read:
    """Every tensor of a file that is to be, float32."""
    numbers = {
        head_name(number, what): getattr(heads[task.name], what).detach().float()
        for number, task in enumerate(about.tasks)
        for what in ("weight", "bias")
        if task.head
    }
    return lambda name: numbers[name] if name in numbers else parameter(name)


def write(
    path: str | os.PathLike[str],
    about: AboutVector,
    read: Read,
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


def digest_of(about: AboutVector, read: Read) -> str:
    """The digest that its file will have."""
    specs = about.specs()
    digests = {name: sha256(raw_bytes(read(name))).hexdigest() for name in specs}
    return bundle_digest(_manifest(about), specs, digests, VECTOR)


def _manifest(about: AboutVector) -> VectorManifest:
    said = {key: getattr(about, key) for key in AboutVector.model_fields}
    tensors = tuple(Stored(name=name, sha256=UNSEALED) for name in about.specs())
    return VectorManifest(version=VERSION, producer=f"kfacpack {version('kfacpack')}", tensors=tensors, **said)
