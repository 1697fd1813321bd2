"""What can be checked of an open bundle without computing with it: its bytes, its numbers, its base model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfacpack.bundle.identity import difference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kfacpack.bundle.identity import Weights
    from kfacpack.bundle.reader import Bundle, SealedFile

    Progress = Callable[[str, int, int], None]
    """Called with a check's name, how many things it has looked at and how many there are."""


@dataclass(frozen=True)
class Failure:
    subject: str
    """What is at fault: tensor 'fc/B', parameter 'fc.weight'."""
    problem: str


@dataclass(frozen=True)
class Check:
    name: str
    checked: int
    failures: tuple[Failure, ...]
    exempt: int = 0
    """How many were not looked at because they do not promise to hold."""


def run_check(
    name: str, subjects: Iterable[str], failure: Callable[[str], Failure | None], progress: Progress
) -> Check:
    """Look at every subject; one failure does not spare the others."""
    todo = list(subjects)
    failures = []
    for done, subject in enumerate(todo):
        progress(name, done, len(todo))
        if found := failure(subject):
            failures.append(found)
    progress(name, len(todo), len(todo))
    return Check(name, len(todo), tuple(failures))


def check_tensors(name: str, bundle: SealedFile, problem: Callable[[str], str | None], progress: Progress) -> Check:
    """Every tensor of a sealed file, by what `problem` says of it."""

    def failure(tensor: str) -> Failure | None:
        found = problem(tensor)
        return Failure(f"tensor {tensor!r}", found) if found else None

    return run_check(name, bundle.tensors, failure, progress)


def check_model(bundle: Bundle, weights: Weights, progress: Progress) -> Check:
    """Do these weights hold the very parameters the curvature was computed at?"""
    listed = {parameter.name: parameter for parameter in bundle.manifest.base.parameters}

    def failure(name: str) -> Failure | None:
        found = difference(listed[name], weights)
        return Failure(f"parameter {name!r}", found) if found else None

    return run_check("model", listed, failure, progress)
