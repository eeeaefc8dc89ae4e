"""The frames of a video that a model sees."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SampledFrames:
    """The frames sampled of a video: their `numbers` among its `count` frames, of which there are `rate` a second."""

    numbers: tuple[int, ...]
    count: int
    rate: float


@dataclass(frozen=True, slots=True)
class FrameSampling:
    """The frames taken of a video: `most`, or with `a_second` as many a second, `fewest` (if it has them) to `most`.

    Their number is rounded down, or with `rounded` to the nearest. They are taken as in `evenly`, to which `nearest`
    and `padded` belong. `without_ends`: a second is left out at both ends of a video that is two seconds longer than
    `most` times `a_second`. `by_second`: the frames at full seconds are taken instead, as in `at_seconds`.
    """

    most: int
    a_second: float | None = None
    fewest: int = 1
    rounded: bool = False
    nearest: bool = False
    padded: bool = False
    without_ends: bool = False
    by_second: bool = False

    def numbers(self, count: int, rate: float, wanted: int | None = None) -> list[int]:
        """The numbers of the frames sampled from `count` frames, `rate` a second; of `wanted` frames, if given."""
        most = self.most if wanted is None else wanted
        if self.by_second and (wanted is None or count / rate > wanted):
            return at_seconds(count, rate, most)
        number = most
        if self.a_second is not None and wanted is None:
            exact = count / rate * self.a_second
            number = min(max(round(exact) if self.rounded else int(exact), self.fewest), most, count)
        first = 0
        last = count - 1
        if self.without_ends and self.a_second is not None and count / rate - 2 > most * self.a_second:
            first = int(rate)
            last = min(int(count - rate), last)
            if first >= last:
                first = 0
                last = count - 1
        places = evenly(number, first, last, nearest=self.nearest, padded=self.padded)
        return sorted({*places}) if self.without_ends and wanted is None else places


def evenly(wanted: int, first: int, last: int, *, nearest: bool = False, padded: bool = False) -> list[int]:
    """`wanted` numbers of frames from the first to the last, rounded down; of few frames some twice.

    `nearest`: rounded to the nearest instead, at a half to the even one. `padded`: up to the one before the last; of
    too few frames all, behind black ones, whose number is -1.
    """
    if padded and (missing := wanted - (last + 1 - first)) > 0:
        return [-1] * missing + [*range(first, last + 1)]
    if wanted == 1:
        return [first]
    last -= padded
    step = (last - first) / (wanted - 1)
    places = (number * step + first for number in range(wanted - 1))
    return [*(round(place) if nearest else int(place) for place in places), last]


def at_seconds(count: int, rate: float, most: int) -> list[int]:
    """The frame at each full second of a video of `count` frames; of one of more than `most` seconds `most` frames.

    These are sampled evenly from the frames at each tenth of a second, as in transformers' code of MiniCPM-V 4.6.
    """
    duration = count / rate
    if duration <= most:
        return [min(int(second * rate), count - 1) for second in range(math.ceil(duration))]
    tenths = evenly(most, 0, int(duration / 0.1) - 1)
    return [min(int(round(tenth * 0.1, 1) * rate), count - 1) for tenth in tenths]
