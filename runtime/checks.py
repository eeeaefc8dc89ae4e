"""Checks of values from callers: one line with the problem and the limit."""

from __future__ import annotations

import math
import numbers

from vtx.runtime.errors import RequestError

MOST_THREADS = 1024  # more than machines have cores; tens of thousands stall one
MOST = 1 << 53  # beyond it a whole number is a mistake, and its digits do not belong in a message


def check_whole(name: str, value: object, least: int, most: int = MOST) -> None:
    """Raise RequestError unless `value` is a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise RequestError(f"{name} is {_short(value)}; it must be a whole number of at least {least}")
    if not least <= int(value) <= most:
        raise RequestError(f"{name} is {_short(value)}; it must be at least {least} and at most {most}")


def check_text(name: str, value: object) -> None:
    """Raise RequestError unless `value` is a string."""
    if not isinstance(value, str):
        raise RequestError(f"{name} is {_short(value)}; it must be a string")


def check_number(name: str, value: object, allowed: str, *, least: float = -math.inf, most: float = math.inf) -> None:
    """Raise RequestError, naming the `allowed` values, unless `value` is a finite number from `least` to `most`."""
    try:
        plain = type(value) in (int, float)  # asking an abstract class takes longer
        valid = (plain or (isinstance(value, numbers.Real) and not isinstance(value, bool))) and math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:
        valid = False
    if not valid or not least <= value <= most:  # type: ignore[operator]
        raise RequestError(f"{name} is {_short(value)}; it must be {allowed}")


def _short(value: object) -> str:
    """The value in at most 40 characters."""
    if isinstance(value, int) and abs(value) > MOST:
        return f"a number of {value.bit_length()} bits"  # Python refuses to print the longest
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
