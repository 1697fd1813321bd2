"""Sizes as people write them: 70MB, 1.5 GB, 10%."""

from __future__ import annotations

import re

from kfacpack.errors import KfacpackError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def parse_size(said: str | int, whole: int) -> int:
    """A number of bytes; a percentage is one of `whole`."""
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*(%|[kmg]?b|)\s*", str(said), re.IGNORECASE)
    if match is None or isinstance(said, bool) or not float(match[1]):
        raise KfacpackError(f"budget {said!r}: expected a size such as 70MB, 1.5GB or 10% of dense float32")
    number, unit = float(match[1]), match[2].lower()
    return int(number / 100 * whole) if unit == "%" else int(number * _UNITS[unit])
