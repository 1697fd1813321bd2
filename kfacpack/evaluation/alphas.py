"""What a vector is multiplied by, as people write it: 1.0, 0.3,0.5 or 0:2:0.1."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

from kfacpack.errors import KfacpackError, printable

MOST, LARGEST = 1000, 1000
FORMS = "expected a number (1.0), several (0.3,0.5), or a range from:to:step (0:2:0.1)"


def parse_alphas(text: str) -> list[float]:
    """The numbers, in the order they are written; a range has its end, too, where its steps arrive there.

    They are counted in decimals, so that the fourth of 0:2:0.1 is the very number that 0.3 is.
    """
    found = [each for part in text.split(",") for each in _part(part, text)]
    if len(found) > MOST:
        raise _wrong(text, f"these are more than {MOST:,} values")
    if twice := [each for k, each in enumerate(found) if each in found[:k]]:
        raise _wrong(text, f"{twice[0]} is there twice")
    return [float(each) for each in found]


def _part(part: str, text: str) -> list[Decimal]:
    if ":" not in part:
        return [_number(part, text)]
    numbers = [_number(each, text) for each in part.split(":")]
    if len(numbers) != 3:
        raise _wrong(text, f"a range has three numbers, found {len(numbers)}")
    start, stop, step = numbers
    if step <= 0:
        raise _wrong(text, f"the step of a range is greater than zero, found {step}")
    if stop < start:
        raise _wrong(text, f"a range goes upwards, found {start} to {stop}")
    steps = (stop - start) / step
    if steps >= MOST:
        raise _wrong(text, f"these are more than {MOST:,} values")
    return [start + k * step for k in range(int(steps) + 1)]


def _number(said: str, text: str) -> Decimal:
    try:
        number = Decimal(said.strip())
    except InvalidOperation:
        raise _wrong(text, f"{said.strip()!r} is no number") from None
    if not number.is_finite() or abs(number) > LARGEST or (number and abs(number) < Decimal("1e-9")):
        raise _wrong(text, f"{said.strip()} is no number that a vector is multiplied by")
    return number


def _wrong(text: str, problem: str) -> KfacpackError:
    return KfacpackError(f"alpha {printable(text)!r}: {printable(problem)}; {FORMS}")
