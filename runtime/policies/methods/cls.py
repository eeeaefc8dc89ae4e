"""Pruning before the decoder: the patches that the tower's class token looks at most enter, the others do not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vtx.runtime.bundle.spec.names import CLS_ATTENTION
from vtx.runtime.errors import RequestError
from vtx.runtime.policies.base import Entry, Needs, PromptText, Reduction
from vtx.runtime.policies.registry import reduction
from vtx.runtime.vision.tokens import Ids, ImageTokens, share


@reduction("cls")
@dataclass(frozen=True, slots=True)
class Cls(Reduction, Entry):
    """Of each view the share `keep` of its tokens, rounded up, enters the decoder, in their order; no newline does.

    An image is one view, or in a layout of tiles each of them.
    """

    keep: float = 0.25

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise RequestError(f"cls: keep is {self.keep}; give the share to keep, above 0 and up to 1")

    def needs(self) -> Needs:
        return Needs(attention=True)

    def entry(self) -> Entry | None:
        return self

    def number_kept(self, count: int, layer: int) -> int:
        return share(self.keep, count)

    def select(self, image: ImageTokens, question: PromptText | None = None) -> Ids | None:
        return np.flatnonzero(image.patches.highest_of_each_view(CLS_ATTENTION, self.keep))
