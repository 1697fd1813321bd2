"""What can be checked of an open bundle without computing with it: its bytes, its numbers, its base model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfacpack.bundle.identity import differences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kfacpack.bundle.identity import Weights
    from kfacpack.bundle.reader import Bundle

    Progress = Callable[[str, int, int], None]
    """Called with a check's name, how many things it has looked at and how many there are."""


@dataclass(frozen=True)
class Failure:
    subject: str
    """The tensor or parameter at fault."""
    problem: str


@dataclass(frozen=True)
class Check:
    name: str
    checked: int
    failures: tuple[Failure, ...]


def run_check(
    name: str, subjects: Iterable[str], problems: Callable[[str], Iterator[Failure]], progress: Progress
) -> Check:
    """Look at every subject; one failure does not spare the others."""
    todo = list(subjects)
    failures: list[Failure] = []
    for done, subject in enumerate(todo):
        progress(name, done, len(todo))
        failures.extend(problems(subject))
    progress(name, len(todo), len(todo))
    return Check(name, len(todo), tuple(failures))


def check_hashes(bundle: Bundle, progress: Progress) -> Check:
    def problems(name: str) -> Iterator[Failure]:
        if problem := bundle.hash_problem(name):
            yield Failure(name, problem)

    return run_check("sha256", bundle.tensors, problems, progress)


def check_finite(bundle: Bundle, progress: Progress) -> Check:
    def problems(name: str) -> Iterator[Failure]:
        if problem := bundle.finite_problem(name):
            yield Failure(name, problem)

    return run_check("finite", bundle.tensors, problems, progress)


def check_model(bundle: Bundle, weights: Weights) -> Check:
    """Do these weights hold the very parameters the curvature was computed at?"""
    base = bundle.manifest.base
    failures = tuple(Failure(name, problem) for name, problem in differences(base, weights))
    return Check("model", len(base.parameters), failures)
