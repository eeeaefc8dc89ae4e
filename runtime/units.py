"""Quantities as a person reads them, and reports of progress."""

from __future__ import annotations

import re
from collections.abc import Callable

from vtx.runtime.errors import RequestError

Progress = Callable[[str, int, int], None]  # gets the name of the step, the units done, and the units in all


def counter(report: Progress, phase: str, total: int) -> Callable[[int], None]:
    """Return a callback that adds to the units done of a phase and reports them."""
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        report(phase, done, total)

    return count


def size(count: float) -> str:
    """Bytes with three figures: 9.41 MB."""
    if count < 1000:
        return f"{count:.0f} B"
    power = min(4, (len(str(int(count))) - 1) // 3)
    return f"{count / 1000**power:.3g} {('kB', 'MB', 'GB', 'TB')[power - 1]}"


def parse_size(text: str, name: str) -> int:
    """The bytes of the setting `name`, a size such as 900MB or 2GB. Raises RequestError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(MB|GB)", text.strip(), re.IGNORECASE)
    if not match:
        raise RequestError(f"{name} is {text!r:.80}, not a size such as 900MB or 2GB")
    return int(float(match[1]) * {"MB": 10**6, "GB": 10**9}[match[2].upper()])


def duration(seconds: float) -> str:
    """Seconds as 0.8 s, 85 s, 12 min or 3.5 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 300:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def counted(count: int, noun: str) -> str:
    """One thread as `1 thread`, two as `2 threads`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
