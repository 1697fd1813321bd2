"""What a bench promises: ratios and their bounds, told line by line."""

from __future__ import annotations

import operator
from collections.abc import Sequence

RELATIONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, "==": operator.eq}


def kept(promises: Sequence[tuple[str, float, str, float]]) -> bool:
    """Prints each promise, (what, found, relation, bound); whether all hold."""
    held = [bool(RELATIONS[relation](value, bound)) for _, value, relation, bound in promises]
    for holds, (what, value, relation, bound) in zip(held, promises, strict=True):
        print(f"  {'holds' if holds else 'FAILS'}  {what}: {value:.3g} (promised {relation} {bound:.3g})")
    return all(held)
