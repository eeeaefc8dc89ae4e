"""VidCom2: tokens of a video unlike the rest of it and of their frame enter, more of them from unusual frames."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.policies.base import reduction
from vtx.runtime.policies.clip import Choose, Clip
from vtx.runtime.policies.options import option
from vtx.runtime.vision.tokens import HiddenStates, Ids, highest

Doubles = NDArray[np.float64]
WIDTHS = (0.125, 0.25, 0.5, 1, 2)  # of the Gaussians that are added up
TEMPERATURE = 0.01


@reduction("vidcom2")
@dataclass(frozen=True, slots=True)
class VidCom2(Clip):
    """Of the tokens of a video's frames about the share `keep` enters, at least one of each frame (VidCom2).

    The half of the projector's output whose numbers vary least over all tokens is scaled to length 1. How usual a token
    is, is a sum of five Gaussians of its distance to the mean of all tokens, and the same to the mean of its frame. A
    frame's share is `keep` * (1 + p - 1 / frames), at most 1, with p the softmax over frames, at temperature 0.01, of
    minus the mean of its tokens' first sums; its number is rounded to the nearest, at a half to the even one. In each
    frame the least usual tokens by both sums enter, of equal ones the earlier. All of it is what the released code
    does. A newline behind the frames enters beyond the budget, images enter whole, and tokens stand at positions
    without gaps. Sums run in float64, and how usual a token is is rounded to float32. With `window` each this many
    frames, the last ones fewer, are a video of their own in all of this.
    """

    keep: float = option(0.25, "give the share to keep, above 0 and up to 1", least=0, most=1, above=True)

    window: int = option(0, "give the frames of a window, or 0 for the whole video", least=0)

    @property
    def at_once(self) -> int:
        return self.window

    def number_kept(self, count: int, layer: int) -> int:
        """The number if all frames are alike; rounding adds or takes a few otherwise."""
        return max(1, round(round(self.keep * count, 9)))

    def begin(self, frames: int) -> Choose:
        kept = np.empty(0, np.int64)
        count = 0

        def choose(window: HiddenStates) -> Ids:
            nonlocal kept, count
            kept = np.concatenate([kept, count + self._of_window(window)])
            count = count + window[..., 0].size
            return kept

        return choose

    def _of_window(self, window: HiddenStates) -> Ids:
        frames, tokens_of_frame, _ = window.shape
        rows = window.astype(np.float64)
        varies = rows.var((0, 1)).astype(np.float32)
        rows = rows[..., np.sort(np.argsort(varies, kind="stable")[: len(varies) // 2])]
        rows /= np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)
        of_video = _likeness(rows, rows.mean((0, 1)))
        usual = (of_video + _likeness(rows, rows.mean(1, keepdims=True))).astype(np.float32)
        score = -of_video.mean(1).astype(np.float32).astype(np.float64)
        part = np.exp((score - score.max()) / TEMPERATURE)
        shares = np.minimum(1, self.keep * (1 + part / part.sum() - 1 / frames))
        numbers = [max(1, round(round(share * tokens_of_frame, 9))) for share in shares.tolist()]
        return np.flatnonzero([highest(-values, number) for values, number in zip(usual, numbers, strict=True)])


def _likeness(rows: Doubles, centre: Doubles) -> Doubles:
    """The nearness of each row to the centre, from 5 at it to 0."""
    distance = ((rows - centre) ** 2).sum(-1)
    near: Doubles = sum((np.exp(-distance / (2 * width)) for width in WIDTHS), np.zeros_like(distance))
    return near
