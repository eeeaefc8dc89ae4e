"""Random tokens: the baseline that a method must beat."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from vtx.runtime.generator import SplitMix
from vtx.runtime.policies.base import Entry, PromptText, Reduction, reduction
from vtx.runtime.policies.options import number_to_keep, option, share_or_number
from vtx.runtime.vision.tokens import Ids, ImageTokens


@reduction("random")
@dataclass(frozen=True, slots=True)
class Random(Reduction, Entry):
    """Of each image `keep` tokens enter, drawn at random, in their order and at positions without gaps.

    `seed` and the image's pixels decide, so an image keeps the same tokens for every question and in every run: those
    with the lowest of `SplitMix` numbers, seeded with the first 64 bits of SHA-256("seed key"). `keep` is a
    share up to 1, rounded up, or a number.
    """

    keep: float = share_or_number(0.25)
    seed: int = option(0, "it must be at least 0", least=0)

    def entry(self) -> Entry | None:
        return self

    def number_kept(self, count: int, layer: int) -> int:
        return min(count, number_to_keep(self.keep, count))

    def select(self, image: ImageTokens, question: PromptText | None = None) -> Ids | None:
        count = self.number_kept(len(image), 1)
        if count == len(image):
            return None
        digest = hashlib.sha256(f"{self.seed} {image.key}".encode()).hexdigest()
        generator = SplitMix(int(digest[:16], 16))
        numbers = [generator.uniform() for _ in image.hidden]
        return np.sort(np.argsort(numbers, kind="stable")[:count])
