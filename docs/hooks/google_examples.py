"""Griffe extension: renders the section `Example:` of a docstring like `Examples:`, and lists the merge methods."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

from kfacpack.vectors.methods import with_method_list

SECTION = re.compile(r"^(\s*)Example:$", re.MULTILINE)


class GoogleExamples(Extension):
    """Renames the section before the docstring is parsed."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Changes the docstring of a function, class or attribute."""
        if obj.docstring:
            obj.docstring.value = with_method_list(SECTION.sub(r"\1Examples:", obj.docstring.value))
