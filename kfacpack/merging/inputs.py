"""What is merged: a curvature, and what its manifest tells about where it comes from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from kfacpack.bundle.manifest import Parent
from kfacpack.curvature.curvature import Curvature
from kfacpack.curvature.loading import load
from kfacpack.errors import KfacpackError

if TYPE_CHECKING:
    from kfacpack.bundle.manifest import Estimate, Source
    from kfacpack.curvature.block import CurvatureBlock

    Mergeable = Curvature | str | os.PathLike[str]


@dataclass(frozen=True)
class Input:
    curvature: Curvature
    name: str
    """What errors call it: its file, or its place among the inputs."""

    @classmethod
    def of(cls, given: Mergeable, place: int) -> Input:
        curvature = load(given) if isinstance(given, str | os.PathLike) else given
        if not isinstance(curvature, Curvature):
            raise KfacpackError(f"input {place}: expected a curvature or the path of one, found {type(given).__name__}")
        path = curvature.bundle.path if curvature.bundle else None
        return cls(curvature, str(path) if path else f"input {place}")

    @cached_property
    def parents(self) -> tuple[Parent, ...]:
        """The bundles behind it that were not merged themselves, with their weights; at least one."""
        if merge := self.curvature.about.merge:
            return merge.parents
        task, size = (self.source.task, self.source.dataset_size) if self.source else (None, self._seen())
        return (Parent(sha256=self.curvature.digest, weight=1.0, task=task, dataset_size=size),)

    def _seen(self) -> int | None:
        """The examples it was estimated from: the whole of its data, where nothing is said of a larger set."""
        matrices = (matrix for block in self.curvature.blocks for _, matrix in block.structure.matrices())
        return max((matrix.examples for matrix in matrices if matrix.examples), default=None)

    @property
    def tasks(self) -> float:
        """How many tasks it stands for. Weights average one over the tasks, so they add up to their number."""
        return sum(parent.weight for parent in self.parents)

    @property
    def dataset_size(self) -> int | None:
        """Of all the tasks behind it."""
        sizes = [parent.dataset_size for parent in self.parents if parent.dataset_size is not None]
        return sum(sizes) if len(sizes) == len(self.parents) else None

    @cached_property
    def blocks(self) -> dict[str, CurvatureBlock]:
        return {block.name: block for block in self.curvature.blocks}

    @property
    def source(self) -> Source | None:
        return self.curvature.about.source

    @property
    def estimate(self) -> Estimate | None:
        return self.curvature.about.estimate

    @property
    def estimate_without_seed(self) -> Estimate | None:
        return self.estimate and self.estimate.model_copy(update={"seed": None})
