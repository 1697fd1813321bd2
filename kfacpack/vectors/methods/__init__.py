"""Merge methods for task vectors."""

from __future__ import annotations

import re

from kfacpack.vectors.methods.curvature import ActMatMethod, CurvatureMethod, FisherMethod, RegMeanMethod
from kfacpack.vectors.methods.iso import IsoCtsMethod, IsoMethod, TsvMethod
from kfacpack.vectors.methods.method import MergeMethod, SumMethod
from kfacpack.vectors.methods.ties import DareMethod, TiesMethod

METHODS: dict[str, type[MergeMethod]] = {
    method.name: method
    for method in (
        SumMethod,
        TiesMethod,
        DareMethod,
        TsvMethod,
        IsoMethod,
        IsoCtsMethod,
        CurvatureMethod,
        RegMeanMethod,
        FisherMethod,
        ActMatMethod,
    )
}
"""Merge methods by name."""


def with_method_list(docstring: str) -> str:
    """Replaces the line `{methods}` in a docstring with a list of all methods and their settings.

    Args:
        docstring: A docstring that contains this line.
    """
    lines = []
    for name, method in METHODS.items():
        lines.append(f'- "{name}": {method.help}')
        lines += [
            f"    - `{setting.name}` (default {setting.default!r}): {setting.help}"
            for setting in method.declared_settings()
        ]
    return re.sub(
        r"^( *)\{methods\}$",
        lambda match: "\n".join(match[1] + line for line in lines),
        docstring,
        flags=re.MULTILINE,
    )


__all__ = ["METHODS", "with_method_list"]
