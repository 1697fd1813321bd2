"""Parses and formats numbers: sizes (70MB, 10%), durations, percentages and lists of coefficients α (0:2:0.1)."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation

from kfacpack.errors import KfacpackError, printable

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}

OnProgress = Callable[[int, int], None]
"""Callback that receives the number of items processed so far and the total number of items."""


def parse_size(size: str | int, whole: int) -> int:
    """Parses a size such as 70MB, 1.5 GB or 10%.

    Args:
        size: The size as written by the user.
        whole: The number of bytes that corresponds to 100%.

    Returns:
        The number of bytes.

    Raises:
        KfacpackError: If `size` is not a valid size greater than zero.
    """
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*(%|[kmg]?b|)\s*", str(size), re.IGNORECASE)
    if match is None or isinstance(size, bool) or not float(match[1]):
        expected = "expected a size such as 70MB or 1.5GB, or a percentage such as 10%"
        raise KfacpackError(f"budget {size!r}: {expected}; the budget must be greater than zero")
    number, unit = float(match[1]), match[2].lower()
    return int(number / 100 * whole) if unit == "%" else int(number * _UNITS[unit])


MISSING = "–"
"""Placeholder for a missing value in tables."""


def human_bytes(count: float) -> str:
    """Formats a number of bytes with decimal units: 1536 -> '1.5 kB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def human_seconds(seconds: float) -> str:
    """Formats a duration: 75.2 -> '75 s', 125.2 -> '2 min 5 s'."""
    if seconds < 99.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_percent(share: float, std: float | None = None) -> str:
    """Formats a fraction as a percentage: 0.9312 -> '93.1 %'; with a standard deviation, '93.1 ± 0.4 %'."""
    return f"{100 * share:.1f} %" if std is None else f"{100 * share:.1f} ± {100 * std:.1f} %"


def format_number(value: float, std: float | None = None) -> str:
    """Formats a number with three significant digits, and its standard deviation with two."""
    return f"{value:.3g}" if std is None else f"{value:.3g} ± {std:.2g}"


def format_score(value: float, std: float | None = None) -> str:
    """Formats a score between 0 and 1 with three decimal places."""
    return f"{value:.3f}" if std is None else f"{value:.3f} ± {std:.3f}"


def format_count(number: float) -> str:
    """Formats an integer with thousands separators."""
    return f"{number:,.0f}"


MAX_ALPHAS, MAX_ALPHA = 1000, 1000
ALPHA_FORMS = "expected a number (1.0), several numbers (0.3,0.5), or a range from:to:step (0:2:0.1)"


def parse_alphas(text: str) -> list[float]:
    """Parses a list of values of α, the coefficient of a task vector.

    Ranges are computed in decimal arithmetic, so the fourth value of 0:2:0.1 is exactly the float 0.3.

    Args:
        text: The values as written by the user: a number, a comma-separated list, or a range `from:to:step`.

    Returns:
        The values in the order in which they are written. A range includes its end if a step reaches it exactly.

    Raises:
        KfacpackError: If `text` is invalid, contains a value twice, or contains too many values.
    """
    alphas = [alpha for part in text.split(",") for alpha in _alpha_range(part, text)]
    if len(alphas) > MAX_ALPHAS:
        raise _invalid_alphas(text, f"contains more than {MAX_ALPHAS:,} values")
    if duplicates := [alpha for k, alpha in enumerate(alphas) if alpha in alphas[:k]]:
        raise _invalid_alphas(text, f"{duplicates[0]} occurs twice")
    return [float(alpha) for alpha in alphas]


def _alpha_range(part: str, text: str) -> list[Decimal]:
    if ":" not in part:
        return [_alpha_number(part, text)]
    numbers = [_alpha_number(number, text) for number in part.split(":")]
    if len(numbers) != 3:
        raise _invalid_alphas(text, f"a range has three numbers, got {len(numbers)}")
    start, stop, step = numbers
    if step <= 0:
        raise _invalid_alphas(text, f"the step of a range must be greater than zero, got {step}")
    if stop < start:
        raise _invalid_alphas(text, f"a range must be increasing, got {start} to {stop}")
    steps = (stop - start) / step
    if steps >= MAX_ALPHAS:
        raise _invalid_alphas(text, f"contains more than {MAX_ALPHAS:,} values")
    return [start + k * step for k in range(int(steps) + 1)]


def _alpha_number(word: str, text: str) -> Decimal:
    try:
        number = Decimal(word.strip())
    except InvalidOperation:
        raise _invalid_alphas(text, f"{word.strip()!r} is not a number") from None
    if not number.is_finite() or abs(number) > MAX_ALPHA or (number and abs(number) < Decimal("1e-9")):
        problem = f"{word.strip()} is out of range, expected 0 or an absolute value from 1e-9 to {MAX_ALPHA}"
        raise _invalid_alphas(text, problem)
    return number


def _invalid_alphas(text: str, problem: str) -> KfacpackError:
    return KfacpackError(f"alpha {printable(text)!r}: {printable(problem)}; {ALPHA_FORMS}")
