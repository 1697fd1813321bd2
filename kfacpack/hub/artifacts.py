"""A bundle or a task vector, as far as it is to be shared: what it is, whether it holds, and how others use it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kfacpack.curvature.verification import Verification, verify
from kfacpack.errors import BundleError, VerificationError
from kfacpack.format.container import BUNDLE, VECTOR, Container
from kfacpack.format.manifest import Base, Source
from kfacpack.format.reader import Bundle, check_tensors
from kfacpack.format.reference import header_of
from kfacpack.hub.card import bundle_summary, vector_summary
from kfacpack.hub.model_ids import data_option, model_option
from kfacpack.vectors.storage import VectorFile

SUFFIXES = (".kfac", ".safetensors")
"""What files that may be ours are called."""

FileProgress = Callable[[str, int, int], None]
"""Called with what is checked, how much of it is done and how much there is."""


@dataclass(frozen=True)
class Artifact(ABC):
    kind: ClassVar[Literal["bundle", "vector"]]
    what: ClassVar[str]
    """What a card calls it."""

    name: str
    """In its repository."""
    file: Bundle | VectorFile

    @staticmethod
    def of(path: str | os.PathLike[str], name: str) -> Artifact:
        """What a file is, by its header alone; one that is neither bundle nor vector is a `BundleError`."""
        place = header_of(path)
        container = Container(place)  # opened once: each time may be a request
        if BUNDLE.manifest in container.metadata:
            return BundleArtifact(name, Bundle(container))
        if VECTOR.manifest in container.metadata:
            return VectorArtifact(name, VectorFile(container))
        problem = "is a safetensors file, but neither a bundle nor a task vector"
        raise BundleError(place, problem, None, "Are these a model's weights?")

    @property
    def base(self) -> Base:
        return self.file.manifest.base

    @property
    @abstractmethod
    def sources(self) -> tuple[Source, ...]:
        """The tasks' data that the file itself speaks of; a merged bundle knows its parents' names alone."""

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(source.task for source in self.sources)

    @property
    @abstractmethod
    def facts(self) -> list[tuple[str, str]]:
        """(what, its value in words)."""

    @abstractmethod
    def commands(self, place: str) -> list[str]:
        """What a person types to use it, where it is published at `place`."""

    @abstractmethod
    def python(self, place: str) -> list[str]:
        """The same in Python."""

    @abstractmethod
    def verified(self, path: str | os.PathLike[str], progress: FileProgress) -> Verification:
        """All that can be checked of the file, which is at `path`."""

    def require_sound(self, path: str | os.PathLike[str], progress: FileProgress) -> None:
        found = self.verified(path, progress)
        for check in found.checks:
            for failure in check.failures[:1]:
                more = f" ({len(check.failures)} of {check.checked} fail)" if len(check.failures) > 1 else ""
                raise VerificationError(f"{found.path}: {failure.subject}: {failure.problem}{more}")

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "bytes": self.file.nbytes,
            "sha256": self.file.digest,
            "base": self.base.name,
            "tasks": list(self.tasks),
        }

    @property
    def _model(self) -> str:
        """What a command says of the model, behind a space; nothing of the one that it would take anyway."""
        model = model_option(self.base)
        return "" if model in (None, "tiny") else f" --model {model}"


@dataclass(frozen=True)
class BundleArtifact(Artifact):
    kind = "bundle"
    what = "curvature"

    file: Bundle

    @property
    def sources(self) -> tuple[Source, ...]:
        source = self.file.manifest.source
        return (source,) if source else ()

    @property
    def tasks(self) -> tuple[str, ...]:
        if merge := self.file.manifest.merge:
            return tuple(dict.fromkeys(parent.task for parent in merge.parents if parent.task))
        return super().tasks

    @property
    def facts(self) -> list[tuple[str, str]]:
        return list(bundle_summary(self.file))

    def commands(self, place: str) -> list[str]:
        use = f"kfacpack train{self._model} --task TASK --reg {place} -o TASK.safetensors"
        return ["pip install kfacpack", f"kfacpack inspect {place}", use]

    def python(self, place: str) -> list[str]:
        used = "drift = curvature.quadratic(tau)  # how far a task vector tau moves f on this task, predicted"
        return ["import kfacpack as kp", f'curvature = kp.load("{place}")', used]

    def verified(self, path: str | os.PathLike[str], progress: FileProgress) -> Verification:
        return verify(path, progress=progress)


@dataclass(frozen=True)
class VectorArtifact(Artifact):
    kind = "vector"
    what = "task vector"

    file: VectorFile

    @property
    def sources(self) -> tuple[Source, ...]:
        return tuple(task.source for task in self.file.manifest.tasks)

    @property
    def facts(self) -> list[tuple[str, str]]:
        return list(vector_summary(self.file))

    def commands(self, place: str) -> list[str]:
        task = f" --task {self.tasks[0]}{data_option(self.sources[0])}" if self.tasks else ""
        use = f"kfacpack eval{self._model}{task} --vector {place}"
        return ["pip install kfacpack", f"kfacpack pull {place} -o {self.name.rpartition('/')[2]}", use]

    def python(self, place: str) -> list[str]:
        applied = "edited = vector.apply(model)  # the base model with the vector added"
        return ["import kfacpack as kp", f'vector = kp.TaskVector.load("{place}")', applied]

    def verified(self, path: str | os.PathLike[str], progress: FileProgress) -> Verification:
        """Its bytes and its numbers."""
        file = VectorFile(path)
        checks = (
            check_tensors("sha256", file, file.hash_problem, progress),
            check_tensors("finite", file, file.finite_problem, progress),
        )
        return Verification(str(file.path), file.digest, checks)
