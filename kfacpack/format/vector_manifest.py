"""What the file of a task vector says of itself, in the words of a bundle's manifest. Nothing here imports torch.

The file is a safetensors file. A parameter's change stands under the parameter's own name; the head of task k (in the
manifest's order, from 0) under `HEAD.k.weight`, (K, C), and `HEAD.k.bias`, (K,). All numbers are float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import FailFast, Field, StrictBool, StrictFloat, StrictInt, StrictStr, model_validator

from kfacpack.format.container import Spec, refuse_duplicate_keys
from kfacpack.format.manifest import Base, Digest, Entry, Function, Name, Source, Text

VERSION = "1.0"
HEAD = "kfacpack.head"
"""What the names of a head's tensors begin with, and no parameter's does."""

RegimeName = Literal["linear", "full", "attention"]
HeadOrigin = Literal["text", "prototypes", "words"]
Setting = StrictBool | StrictInt | StrictFloat | Text


class Training(Entry):
    """How a vector was trained: enough to do it again."""

    seed: Annotated[StrictInt, Field(ge=0, lt=2**64)] | None = None
    settings: dict[Name, Setting] = Field(default_factory=dict)
    bundles: Annotated[tuple[Digest, ...], FailFast()] = ()
    """The digests of the bundles that the penalty was made of."""


class HeadEntry(Entry):
    """What a head's classes are called and what it was made from. Its numbers are tensors of the file."""

    origin: HeadOrigin
    classes: Annotated[tuple[Text, ...], FailFast(), Field(min_length=1)]


class TaskEntry(Entry):
    """One task that is in the vector."""

    source: Source
    training: Training | None = None
    head: HeadEntry | None = None

    @property
    def name(self) -> str:
        return self.source.task


class Addend(Entry):
    """A vector that this one is a sum of, by its digest. Addends of addends are listed, not nested."""

    sha256: Digest
    coefficient: StrictFloat
    tasks: Annotated[tuple[Name, ...], FailFast()] = ()


class MethodEntry(Entry):
    """By what the addends became one vector, if not by adding them up. Their coefficients are the α of each."""

    name: Name
    settings: dict[Name, Setting] = Field(default_factory=dict)


class AboutVector(Entry):
    """Everything that is said of a task vector and is not the vector itself."""

    base: Base
    function: Function
    regime: RegimeName
    tasks: Annotated[tuple[TaskEntry, ...], FailFast()]
    addends: Annotated[tuple[Addend, ...], FailFast()] = ()
    """None for a vector as it was trained."""
    method: MethodEntry | None = None
    """None for a sum."""

    @model_validator(mode="after")
    def _names_are_free(self) -> AboutVector:
        if twice := refuse_duplicate_keys(task.name for task in self.tasks):
            raise ValueError(f"the task {twice!r} is there twice")
        if taken := [p.name for p in self.base.parameters if p.name.startswith(HEAD)]:
            raise ValueError(f"no parameter may be called {taken[0]!r}: names from {HEAD!r} on are for heads")
        if self.method and not self.addends:
            raise ValueError(f"it was made by {self.method.name!r}, but no vectors are listed that it was made of")
        return self

    def specs(self) -> dict[str, Spec]:
        """Every tensor of the file, with its dtype and shape."""
        specs: dict[str, Spec] = {parameter.name: ("F32", parameter.shape) for parameter in self.base.parameters}
        for number, task in enumerate(self.tasks):
            if task.head:
                specs[head_name(number, "weight")] = "F32", (len(task.head.classes), self.function.width)
                specs[head_name(number, "bias")] = "F32", (len(task.head.classes),)
        return specs


class StoredTensor(Entry):
    name: Name
    sha256: Digest


class VectorManifest(AboutVector):
    version: Annotated[StrictStr, Field(pattern=r"^(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})$")]
    producer: Text | None = None
    tensors: Annotated[tuple[StoredTensor, ...], FailFast()]

    def with_digests(self, digests: Mapping[str, str]) -> VectorManifest:
        """The same manifest, the SHA-256 of each tensor filled in."""
        filled = tuple(each.model_copy(update={"sha256": digests[each.name]}) for each in self.tensors)
        return self.model_copy(update={"tensors": filled})

    def about(self) -> AboutVector:
        """What it says beside the tensors. It has been checked, and is not checked again."""
        return AboutVector.model_construct(**{key: getattr(self, key) for key in AboutVector.model_fields})


def head_name(number: int, what: Literal["weight", "bias"]) -> str:
    return f"{HEAD}.{number}.{what}"
