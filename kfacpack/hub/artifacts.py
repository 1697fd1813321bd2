"""Bundles and task vectors as files in a repository: their kind, summary, verification and usage examples."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from kfacpack.curvature.verification import Verification, verify
from kfacpack.errors import BundleError, VerificationError
from kfacpack.format.bundle_index import INDEX_SUFFIX, open_container
from kfacpack.format.container import BUNDLE, VECTOR
from kfacpack.format.manifest import Base, Source
from kfacpack.format.reader import Bundle, check_tensors
from kfacpack.format.reference import header_of
from kfacpack.hub.card import bundle_summary, data_option, model_option, vector_summary
from kfacpack.vectors.storage import VectorFile

if TYPE_CHECKING:
    from kfacpack.format.reader import CheckProgress


SUFFIXES = (".kfac", ".safetensors", INDEX_SUFFIX)
"""File name suffixes of bundles and task vectors; a bundle in several files is represented by its index."""


@dataclass(frozen=True)
class Artifact(ABC):
    """A bundle or a task vector in a repository."""

    kind: ClassVar[Literal["bundle", "vector"]]
    label: ClassVar[str]
    """Name of the kind in model cards."""

    name: str
    """File name in the repository."""
    file: Bundle | VectorFile

    @staticmethod
    def of(path: str | os.PathLike[str], name: str) -> Artifact:
        """Opens a file and determines its kind from its header alone.

        Args:
            path: The file, or a reference to a file on the Hub.
            name: File name in the repository.

        Raises:
            BundleError: If the file is neither a bundle nor a task vector.
        """
        location = header_of(path)
        container = open_container(location)  # opened once: on the Hub, every access may be a request
        if BUNDLE.manifest in container.metadata:
            return BundleArtifact(name, Bundle(container))
        if VECTOR.manifest in container.metadata:
            return VectorArtifact(name, VectorFile(container))
        problem = "is a safetensors file, but neither a bundle nor a task vector"
        raise BundleError(location, problem, None, "It may contain the weights of a model")

    @property
    def base(self) -> Base:
        """The base model."""
        return self.file.manifest.base

    @property
    @abstractmethod
    def sources(self) -> tuple[Source, ...]:
        """The datasets that the file records; a merged bundle records only the names of its parents' tasks."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Task names."""
        return tuple(source.task for source in self.sources)

    @property
    @abstractmethod
    def summary(self) -> list[tuple[str, str]]:
        """Summary of the file: (label, value)."""

    @abstractmethod
    def commands(self, location: str) -> list[str]:
        """Returns shell commands that use the file.

        Args:
            location: Path or `hf://` reference of the file.
        """

    @abstractmethod
    def python(self, location: str) -> list[str]:
        """Returns lines of Python code that use the file.

        Args:
            location: Path or `hf://` reference of the file.
        """

    @abstractmethod
    def verify(self, path: str | os.PathLike[str], on_progress: CheckProgress) -> Verification:
        """Runs all checks on the file.

        Args:
            path: Local path of the file.
            on_progress: Called as checks advance.
        """

    def require_valid(self, path: str | os.PathLike[str], on_progress: CheckProgress) -> None:
        """Runs all checks on the file.

        Args:
            path: Local path of the file.
            on_progress: Called as checks advance.

        Raises:
            VerificationError: If a check fails.
        """
        verification = self.verify(path, on_progress)
        for check in verification.checks:
            for failure in check.failures[:1]:
                more = f" ({len(check.failures)} of {check.checked} failed)" if len(check.failures) > 1 else ""
                raise VerificationError(f"{verification.path}: {failure.subject}: {failure.problem}{more}")

    @property
    def _model(self) -> str:
        """The `--model` option for commands, with a leading space; empty for the default model."""
        model = model_option(self.base)
        return "" if model in (None, "tiny") else f" --model {model}"


@dataclass(frozen=True)
class BundleArtifact(Artifact):
    """A bundle in a repository."""

    kind = "bundle"
    label = "curvature"

    file: Bundle

    @property
    def sources(self) -> tuple[Source, ...]:
        """The dataset of the estimate; empty for a merged bundle."""
        source = self.file.manifest.source
        return (source,) if source else ()

    @property
    def tasks(self) -> tuple[str, ...]:
        """Task names; for a merged bundle, those of its parents."""
        if merge := self.file.manifest.merge:
            return tuple(dict.fromkeys(parent.task for parent in merge.parents if parent.task))
        return super().tasks

    @property
    def summary(self) -> list[tuple[str, str]]:
        """Summary of the bundle."""
        return list(bundle_summary(self.file))

    def commands(self, location: str) -> list[str]:
        """Returns shell commands that inspect the bundle and train with it."""
        train = f"kfacpack train{self._model} --task TASK --reg {location} -o TASK.safetensors"
        return ["pip install kfacpack", f"kfacpack inspect {location}", train]

    def python(self, location: str) -> list[str]:
        """Returns lines of Python code that load the bundle and use it."""
        use = "drift = curvature.quadratic(tau)  # predicted drift of f on this task for a task vector tau"
        return ["import kfacpack as kp", f'curvature = kp.load("{location}")', use]

    def verify(self, path: str | os.PathLike[str], on_progress: CheckProgress) -> Verification:
        """Runs all checks on the bundle."""
        return verify(path, on_progress=on_progress)


@dataclass(frozen=True)
class VectorArtifact(Artifact):
    """A task vector in a repository."""

    kind = "vector"
    label = "task vector"

    file: VectorFile

    @property
    def sources(self) -> tuple[Source, ...]:
        """The datasets of all tasks."""
        return tuple(task.source for task in self.file.manifest.tasks)

    @property
    def summary(self) -> list[tuple[str, str]]:
        """Summary of the task vector."""
        return list(vector_summary(self.file))

    def commands(self, location: str) -> list[str]:
        """Returns shell commands that download the task vector and evaluate it."""
        task = f" --task {self.tasks[0]}{data_option(self.sources[0])}" if self.tasks else ""
        evaluate = f"kfacpack eval{self._model}{task} --vector {location}"
        return ["pip install kfacpack", f"kfacpack pull {location} -o {self.name.rpartition('/')[2]}", evaluate]

    def python(self, location: str) -> list[str]:
        """Returns lines of Python code that load the task vector and apply it."""
        use = "edited = vector.apply(model)  # the base model with the vector added"
        return ["import kfacpack as kp", f'vector = kp.TaskVector.load("{location}")', use]

    def verify(self, path: str | os.PathLike[str], on_progress: CheckProgress) -> Verification:
        """Checks the bytes and values of all tensors."""
        file = VectorFile(path)
        checks = (
            check_tensors("sha256", file, file.hash_problem, on_progress),
            check_tensors("finite", file, file.finite_problem, on_progress),
            *([check_tensors("indices", file, file.index_problem, on_progress)] if file.has_indices else []),
        )
        return Verification(str(file.path), file.digest, checks)
