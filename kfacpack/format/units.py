"""Sizes as people write them: 70MB, 1.5 GB, 10%.

Numbers in words, the same wherever they are shown.

What a vector is multiplied by, as people write it: 1.0, 0.3,0.5 or 0:2:0.1.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation

from kfacpack.errors import KfacpackError, printable

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}

OnProgress = Callable[[int, int], None]
"""Called with the number of items done and their total."""


def parse_size(said: str | int, whole: int) -> int:
    """A number of bytes; a percentage is one of `whole`."""
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*(%|[kmg]?b|)\s*", str(said), re.IGNORECASE)
    if match is None or isinstance(said, bool) or not float(match[1]):
        raise KfacpackError(f"budget {said!r}: expected a size such as 70MB, 1.5GB or 10% of dense float32")
    number, unit = float(match[1]), match[2].lower()
    return int(number / 100 * whole) if unit == "%" else int(number * _UNITS[unit])


MISSING = "–"


def human_bytes(count: float) -> str:
    """1536 -> '1.5 kB', in powers of a thousand as disks and hubs count."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def human_seconds(seconds: float) -> str:
    """75.2 -> '1 min 15 s'."""
    if seconds < 99.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_percent(share: float, std: float | None = None) -> str:
    """0.9312 -> '93.1 %'; with a deviation, '93.1 ± 0.4 %'."""
    return f"{100 * share:.1f} %" if std is None else f"{100 * share:.1f} ± {100 * std:.1f} %"


def format_number(value: float, std: float | None = None) -> str:
    """Three digits that count."""
    return f"{value:.3g}" if std is None else f"{value:.3g} ± {std:.2g}"


def format_score(value: float, std: float | None = None) -> str:
    """Three decimals, for what lies between 0 and 1 and is no share."""
    return f"{value:.3f}" if std is None else f"{value:.3f} ± {std:.3f}"


def format_count(number: float) -> str:
    return f"{number:,.0f}"


MAX_ALPHAS, MAX_ALPHA = 1000, 1000
ALPHA_FORMS = "expected a number (1.0), several (0.3,0.5), or a range from:to:step (0:2:0.1)"


def parse_alphas(text: str) -> list[float]:
    """The numbers, in the order they are written; a range has its end, too, where its steps arrive there.

    They are counted in decimals, so that the fourth of 0:2:0.1 is the very number that 0.3 is.
    """
    found = [each for part in text.split(",") for each in _alpha_range(part, text)]
    if len(found) > MAX_ALPHAS:
        raise _invalid_alphas(text, f"these are more than {MAX_ALPHAS:,} values")
    if twice := [each for k, each in enumerate(found) if each in found[:k]]:
        raise _invalid_alphas(text, f"{twice[0]} is there twice")
    return [float(each) for each in found]


def _alpha_range(part: str, text: str) -> list[Decimal]:
    if ":" not in part:
        return [_alpha_number(part, text)]
    numbers = [_alpha_number(each, text) for each in part.split(":")]
    if len(numbers) != 3:
        raise _invalid_alphas(text, f"a range has three numbers, found {len(numbers)}")
    start, stop, step = numbers
    if step <= 0:
        raise _invalid_alphas(text, f"the step of a range is greater than zero, found {step}")
    if stop < start:
        raise _invalid_alphas(text, f"a range goes upwards, found {start} to {stop}")
    steps = (stop - start) / step
    if steps >= MAX_ALPHAS:
        raise _invalid_alphas(text, f"these are more than {MAX_ALPHAS:,} values")
    return [start + k * step for k in range(int(steps) + 1)]


def _alpha_number(said: str, text: str) -> Decimal:
    try:
        number = Decimal(said.strip())
    except InvalidOperation:
        raise _invalid_alphas(text, f"{said.strip()!r} is no number") from None
    if not number.is_finite() or abs(number) > MAX_ALPHA or (number and abs(number) < Decimal("1e-9")):
        raise _invalid_alphas(text, f"{said.strip()} is no number that a vector is multiplied by")
    return number


def _invalid_alphas(text: str, problem: str) -> KfacpackError:
    return KfacpackError(f"alpha {printable(text)!r}: {printable(problem)}; {ALPHA_FORMS}")
