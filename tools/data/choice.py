"""A K that a calibration chose, the share of answers it keeps, and the consent it needs below the limit."""

from __future__ import annotations

from dataclasses import dataclass

from vtx.runtime.errors import RequestError
from vtx.tools.data.intervals import CONFIDENCE, ShareInterval

KEPT = 0.9  # share of unchanged answers, lower end of the interval, below which a K needs consent


@dataclass(frozen=True, slots=True)
class RecordedChoice:
    """The K of a calibration as an export records it; `kept`: the share of unchanged answers, None if not compared."""

    k: int
    rule: str
    data: str
    items: int
    kept: ShareInterval | None

    @property
    def warning(self) -> str | None:
        """The reason against the K; None if enough answers stay the same."""
        return changed_answers(self.k, self.kept)

    def check(self, *, allowed: bool) -> None:
        """Raise RequestError if too few answers stay the same, or if that is unknown, unless it is `allowed`."""
        if self.warning and not allowed:
            raise RequestError(
                f"{self.warning}; calibrate with more --samples or choose K yourself (--k N), or accept this K with "
                "--allow-changed-answers"
            )


def changed_answers(k: int, kept: ShareInterval | None) -> str | None:
    """The sentence on a K at which it is not certain that `KEPT` of the answers stay the same, else None."""
    if kept is None:
        return (
            f"K = {k} was chosen without comparing answers, so it is unknown whether {KEPT:.0%} of them stay the same"
        )
    if kept.low >= KEPT:
        return None
    return (
        f"at K = {k}, {kept.share:.1%} of {kept.count} answers stay the same, {kept.low:.1%} at the lower end of the "
        f"{CONFIDENCE:.0%} interval, where the limit is {KEPT:.0%}"
    )
