"""How many image tokens `keep=` means: a share up to 1, or a number."""

from __future__ import annotations

from vtx.runtime.errors import RequestError
from vtx.runtime.vision.tokens import share


def check_keep(name: str, keep: float) -> None:
    """Raise RequestError unless `keep` is a share or a whole number."""
    if not 0 < keep <= 1 and not (keep >= 2 and keep == int(keep)):
        raise RequestError(
            f"{name}: keep is {keep}; give the share to keep, above 0 and up to 1, or a whole number of at least 2"
        )


def number_to_keep(keep: float, count: int) -> int:
    """Of `count` tokens, the number that `keep` means: shares are rounded up."""
    return share(keep, count) if keep <= 1 else int(keep)
