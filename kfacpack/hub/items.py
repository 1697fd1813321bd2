"""A bundle or a task vector, as far as it is to be shared: what it is, and whether it holds."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from kfacpack.bundle.checks import check_tensors
from kfacpack.bundle.container import Container
from kfacpack.bundle.manifest import Base, Source
from kfacpack.bundle.reader import Bundle
from kfacpack.bundle.seal import BUNDLE, VECTOR
from kfacpack.errors import BundleError, DoesNotHoldError
from kfacpack.hub.facts import bundle_facts, vector_facts
from kfacpack.hub.files.reference import header_of
from kfacpack.vectors.leaf import VectorFile
from kfacpack.verification import Verification
from kfacpack.verification import verify as verify_bundle

ENDINGS = (".kfac", ".safetensors")
"""What files that may be ours are called."""

Progress = Callable[[str, int, int], None]
"""Called with what is checked, how much of it is done and how much there is."""


@dataclass(frozen=True)
class Item:
    name: str
    """In its repository."""
    file: Bundle | VectorFile

    @classmethod
    def of(cls, path: str | os.PathLike[str], name: str) -> Item:
        """What a file is, by its header alone; one that is neither bundle nor vector is a `BundleError`."""
        place = header_of(path)
        container = Container(place)  # opened once: each time may be a request
        said = container.metadata
        if BUNDLE.manifest not in said and VECTOR.manifest not in said:
            problem = "is a safetensors file, but neither a bundle nor a task vector"
            raise BundleError(place, problem, None, "Are these a model's weights?")
        return cls(name, Bundle(container) if BUNDLE.manifest in said else VectorFile(container))

    @property
    def kind(self) -> Literal["bundle", "vector"]:
        return "bundle" if isinstance(self.file, Bundle) else "vector"

    @property
    def base(self) -> Base:
        return self.file.manifest.base

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """The tasks' data that the file itself speaks of; a merged bundle knows its parents' names alone."""
        if isinstance(self.file, VectorFile):
            return tuple(task.source for task in self.file.manifest.tasks)
        source = self.file.manifest.source
        return (source,) if source else ()

    @property
    def tasks(self) -> tuple[str, ...]:
        if isinstance(self.file, Bundle) and self.file.manifest.merge:
            parents = self.file.manifest.merge.parents
            return tuple(dict.fromkeys(parent.task for parent in parents if parent.task))
        return tuple(source.task for source in self.sources)

    @property
    def facts(self) -> list[tuple[str, str]]:
        return list(bundle_facts(self.file) if isinstance(self.file, Bundle) else vector_facts(self.file))

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "bytes": self.file.nbytes,
            "sha256": self.file.digest,
            "base": self.base.name,
            "tasks": list(self.tasks),
        }


def require_sound(path: str | os.PathLike[str], item: Item, progress: Progress) -> None:
    """All checks of a bundle, as `verify` makes them; of a vector, its bytes and its numbers."""
    if item.kind == "bundle":
        found = verify_bundle(path, progress=progress)
    else:
        file = VectorFile(path)
        checks = (
            check_tensors("sha256", file, file.hash_problem, progress),
            check_tensors("finite", file, file.finite_problem, progress),
        )
        found = Verification(str(file.path), file.digest, checks)
    for check in found.checks:
        for failure in check.failures[:1]:
            more = f" ({len(check.failures)} of {check.checked} fail)" if len(check.failures) > 1 else ""
            raise DoesNotHoldError(f"{found.path}: {failure.subject}: {failure.problem}{more}")
