"""What a sum of task vectors says of itself, and which sums are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kfacpack.bundle.identity import function_difference
from kfacpack.errors import TaskVectorError, printable
from kfacpack.vectors.manifest import AboutVector, Addend, TaskEntry

if TYPE_CHECKING:
    from kfacpack.vectors.head import Head
    from kfacpack.vectors.leaf import Leaf

    Terms = Sequence[tuple[float, Leaf]]

_LARGEST = (2 - 2**-23) * 2.0**127


def check_addable(ours: Leaf, theirs: Leaf) -> None:
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


def about_sum(terms: Terms) -> AboutVector:
    """One leaf, as it is, is what it says; anything else is a sum.

    Methods are homogeneous, so that a multiple of what one made is what it makes of multiples.
    """
    first = terms[0][1].about
    if len(terms) == 1 and terms[0][0] == 1:
        return first
    method = first.method if len(terms) == 1 else None
    return first.model_copy(update={"tasks": _tasks(terms), "addends": _addends(terms), "method": method})


def heads_of(terms: Terms) -> dict[str, Head]:
    found: dict[str, Head] = {}
    for _, leaf in terms:
        for task, head in leaf.heads.items():
            found.setdefault(task, head)
    return found


def _tasks(terms: Terms) -> tuple[TaskEntry, ...]:
    found: dict[str, TaskEntry] = {}
    for _, leaf in terms:
        for task in leaf.about.tasks:
            known = found.setdefault(task.name, task)
            if known != task:
                # The same task, trained twice: how, the addends' own files tell.
                training = known.training if known.training == task.training else None
                found[task.name] = known.model_copy(update={"training": training, "head": known.head or task.head})
    return tuple(found.values())


def _addends(terms: Terms) -> tuple[Addend, ...]:
    found: dict[str, Addend] = {}
    for factor, leaf in terms:
        # What a method made is no sum of its addends: it counts as one itself.
        apart = leaf.about.method is None or len(terms) == 1
        for addend in (leaf.about.addends if apart else ()) or (_itself(leaf),):
            before = found[addend.sha256].coefficient if addend.sha256 in found else 0.0
            total = require_finite(before + factor * addend.coefficient)
            found[addend.sha256] = addend.model_copy(update={"coefficient": total})
    return tuple(found.values())


def _itself(leaf: Leaf) -> Addend:
    return Addend(sha256=leaf.digest, coefficient=1.0, tasks=tuple(task.name for task in leaf.about.tasks))
