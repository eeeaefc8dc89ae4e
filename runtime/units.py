"""Quantities as a person reads them."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes with three figures: 9.41 MB."""
    if count < 1000:
        return f"{count:.0f} B"
    power = min(4, (len(str(int(count))) - 1) // 3)
    return f"{count / 1000**power:.3g} {('kB', 'MB', 'GB', 'TB')[power - 1]}"
