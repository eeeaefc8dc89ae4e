"""Milliseconds of the parts of one answer."""

from __future__ import annotations

import time
from collections.abc import Callable

from vtx.runtime.session.prefix import ImageEncoders
from vtx.runtime.vision.tokens import ImageTokens


class Clock:
    """Starts when it is made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._vision = 0.0
        self._prefilled = self._first = self._last = self._start
        self._tokens = 0

    def vision(self, encode: Callable[[], ImageTokens]) -> ImageTokens:
        """What `encode` gives, its time counted."""
        start = time.perf_counter()
        image = encode()
        self._vision += time.perf_counter() - start
        return image

    def all_vision(self, encoders: ImageEncoders) -> ImageEncoders:
        """The same encoders, their time counted."""
        return tuple((key, lambda encode=encode: self.vision(encode)) for key, encode in encoders)

    def prefilled(self) -> None:
        """The prompt has run."""
        self._prefilled = time.perf_counter()

    def token(self) -> None:
        """One more token is there."""
        self._last = time.perf_counter()
        self._first = self._last if not self._tokens else self._first
        self._tokens += 1

    def timings(self) -> dict[str, float]:
        """Milliseconds by name; 0 for what has not taken place."""
        per_token = (self._last - self._first) / (self._tokens - 1) if self._tokens > 1 else 0.0
        times = {
            "vision": self._vision,
            "prefill": max(0.0, self._prefilled - self._start - self._vision),
            "first_token": self._first - self._start,
            "decode_per_token": per_token,
        }
        return {name: round(1000 * seconds, 3) for name, seconds in times.items()}
