"""Prints the bounds that a benchmark promises, and checks them."""

from __future__ import annotations

import operator
from collections.abc import Sequence

RELATIONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, "==": operator.eq}


def all_hold(promises: Sequence[tuple[str, float, str, float]]) -> bool:
    """Prints each promise, (description, value, relation, bound), and returns whether all of them hold."""
    results = [bool(RELATIONS[relation](value, bound)) for _, value, relation, bound in promises]
    for holds, (description, value, relation, bound) in zip(results, promises, strict=True):
        print(f"  {'holds' if holds else 'FAILS'}  {description}: {value:.3g} (promised {relation} {bound:.3g})")
    return all(results)
