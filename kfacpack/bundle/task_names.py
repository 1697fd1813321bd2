"""What the names of tasks in manifests say: NAME@k/n is the k-th of n parts of a task, by its classes."""

from __future__ import annotations

import re
from fractions import Fraction

WHICH = re.compile(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})")


def whole_name(name: str) -> str:
    """What a part is of; of any other task, its own name."""
    whole, _, which = name.rpartition("@")
    return whole if whole and WHICH.fullmatch(which) else name


def share_classes(one: str, other: str) -> bool:
    """Whether two names are of one task and of classes that both have: cars and cars@1/4, cars@1/2 and cars@1/4.

    How many classes there are, a name does not say: parts whose stretches meet are taken to share some. Those whose
    stretches do not meet have none in common, however many there are.
    """
    if whole_name(one) != whole_name(other):
        return False
    (start, stop), (other_start, other_stop) = _stretch(one), _stretch(other)
    return start < other_stop and other_start < stop


def _stretch(name: str) -> tuple[Fraction, Fraction]:
    """Of all classes in their order, from which share to which."""
    if whole_name(name) == name:
        return Fraction(0), Fraction(1)
    k, n = map(int, name.rpartition("@")[2].split("/"))
    return Fraction(k - 1, n), Fraction(k, n)
