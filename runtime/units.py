"""Quantities as a person reads them."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes with three figures: 9.41 MB."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 1000:
            break
    return f"{count:.3g} {unit}"
