"""A task whose pictures are at hand: made on first use, cached, and checked against the hash that was recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from PIL import Image

from kfacpack.errors import KfacpackError, printable
from kfacpack.packages import Package
from kfacpack.tasks.base import Example, Origin
from kfacpack.tasks.embedded import cache
from kfacpack.tasks.embedded.pictures import Labelled, Pictures, digest

MODEL = "tiny"
"""The model that these tasks are for."""


@dataclass(frozen=True)
class Embedded:
    name: str
    classes: tuple[str, ...]
    templates: tuple[str, ...]
    sizes: Mapping[str, int]
    source: str
    license: str | None
    make: Callable[[], Pictures]
    sha256: str
    """Of what `make` makes, by `pictures.digest`. To record it for a new task, ask for a split: the error has it."""
    package: Package | None = None
    """What carries the data, or the fonts that it is drawn from."""
    namesake: str | None = None
    """Where the data is that others mean by this name, with what they mean: 'ylecun/mnist, all 70,000 digits'."""

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    def notices(self, model: str) -> tuple[str, ...]:
        """To a model that is not our own, a task's namesake may be what is meant."""
        if self.namesake is None or model == MODEL:
            return ()
        repository, _, meant = self.namesake.partition(", ")
        here = f"{self.name} without --data is {self.source}: {self.sizes['test']:,} of them are its test split"
        return (
            f"{here}, and accuracies on it cannot be compared with those on {meant}. For these: "
            f"--data hf://datasets/{repository}",
        )

    def listing(self, split: str) -> list[tuple[str, str]]:
        return []

    def split(self, name: str) -> EmbeddedSplit:
        if name not in self.sizes:
            raise KfacpackError(f"{self.name}: no split {printable(name)!r}; there are {', '.join(self.splits)}")
        return EmbeddedSplit(self._pictures[name], Origin(self.source, name, self.license))

    @cached_property
    def _pictures(self) -> Pictures:
        file = cache.place(self.name, self.sha256)
        kept = cache.read(file)
        if kept is not None and digest(kept) == self.sha256:
            return kept
        made = self.make()
        self._require_recorded(digest(made))
        cache.write(file, made)
        return made

    def _require_recorded(self, found: str) -> None:
        if found == self.sha256:
            return
        problem = f"its pictures have sha256 {found}, expected {self.sha256}"
        if self.package is None:
            made = f"drawn by kfacpack with numpy {np.__version__}"
            raise KfacpackError(f"{self.name}: {problem}. They were {made}; install kfacpack anew, or report this")
        remedy = f"They are made from {self.package}; take a version that is known to fit: {self.package.remedy}"
        raise KfacpackError(f"{self.name}: {problem}. {remedy}")


class EmbeddedSplit:
    def __init__(self, pictures: Labelled, source: Origin):
        self.source = source
        self._pictures = pictures

    def __len__(self) -> int:
        return len(self._pictures.labels)

    def __getitem__(self, index: int) -> Example:
        return {"image": Image.fromarray(self._pictures.images[index])}

    def label(self, index: int) -> int:
        return int(self._pictures.labels[index])
