"""DivPrune: the image tokens that are least alike enter the decoder."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vtx.runtime.policies.base import Entry, PromptText, Reduction, reduction
from vtx.runtime.policies.methods.cdpruner import image_cosines
from vtx.runtime.policies.options import share_or_number
from vtx.runtime.vision.tokens import Ids, ImageTokens


@reduction("divprune")
@dataclass(frozen=True, slots=True)
class DivPrune(Reduction, Entry):
    """Of each image `keep` tokens enter: those whose least distance to each other is greedily the largest (DivPrune).

    The distance is 1 - cosine of the projector's output. The first token is the one farthest from its nearest other,
    each next one the farthest from its nearest among those chosen; of equal ones the earlier. Tokens enter in their
    order, at positions without gaps. `keep` is a share up to 1, rounded to the nearest number, at a half to the even
    one, as the released code does, or a number. At least one token enters.
    """

    keep: float = share_or_number(0.098)

    def entry(self) -> Entry | None:
        return self

    def number_kept(self, count: int, layer: int) -> int:
        return min(count, max(1, round(self.keep * count) if self.keep <= 1 else int(self.keep)))

    def select(self, image: ImageTokens, question: PromptText | None = None) -> Ids | None:
        count = self.number_kept(len(image), 1)
        if count == len(image):
            return None
        cosines = image_cosines(image)
        nearest = np.max(cosines - 3 * np.eye(len(cosines), dtype=np.float32), 0)  # -2 of a token with itself
        mask = np.zeros(len(cosines), bool)
        for step in range(count):
            best = int(np.argmin(np.where(mask, np.inf, nearest)))
            nearest = np.maximum(nearest, cosines[best]) if step else cosines[best].copy()
            mask[best] = True
        return np.flatnonzero(mask)
