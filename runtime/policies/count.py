"""How many image tokens `keep=` means: a share up to 1, or a number."""

from __future__ import annotations

from vtx.runtime.vision.tokens import share


def number_to_keep(keep: float, count: int) -> int:
    """Of `count` tokens, the number that `keep` means: shares are rounded up."""
    return share(keep, count) if keep <= 1 else int(keep)
