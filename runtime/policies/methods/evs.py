"""EVS: the tokens of a video that differ most from those of the frame before enter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vtx.runtime.policies.base import Entry, PromptText, Reduction, reduction
from vtx.runtime.policies.methods.cdpruner import Floats
from vtx.runtime.policies.methods.dart import TINY
from vtx.runtime.policies.options import share_or_number
from vtx.runtime.vision.tokens import Ids, ImageTokens, highest


@reduction("evs")
@dataclass(frozen=True, slots=True)
class Evs(Reduction, Entry):
    """Of the tokens of a video's frames `keep` enter: the first frame, and those that changed most (EVS).

    A token's change is 1 - cosine with the token at its place in the frame before, of the projector's output; of equal
    ones the earlier counts. `keep` is a share up to 1 of all frames' tokens, rounded down, or a number; the first frame
    enters whole, however little that is. All of it is what the released code does. A newline behind the frames enters
    beyond the budget, images enter whole, and tokens stand at positions without gaps. Cosines are summed in float64 and
    rounded to float32, so that equal tokens are equally alike.
    """

    keep: float = share_or_number(0.25)

    of_videos: ClassVar[bool] = True

    def entry(self) -> Entry | None:
        return self

    def number_kept(self, count: int, layer: int) -> int:
        return min(count, math.floor(round(self.keep * count, 9)) if self.keep <= 1 else int(self.keep))

    def select(self, image: ImageTokens, question: PromptText | None = None) -> Ids | None:
        if (frames := image.patches.of_frames()) is None:
            return None
        count, each = frames.size, frames.shape[1]
        rows: Floats = image.hidden[frames]
        wide = rows.astype(np.float64)
        lengths = np.linalg.norm(wide, axis=-1)
        alike = (wide[1:] * wide[:-1]).sum(-1) / np.maximum(lengths[1:] * lengths[:-1], TINY)
        change = np.full(frames.shape, np.inf, np.float32)
        change[1:] = 1 - alike.astype(np.float32)
        stays = np.ones(len(image), bool)
        stays[frames.ravel()] = highest(change.ravel(), max(each, self.number_kept(count, 1)))
        return np.flatnonzero(stays)
