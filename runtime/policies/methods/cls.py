"""Pruning before the decoder: the patches that the tower's class token looks at most enter, the others do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from vtx.runtime.bundle.spec.names import CLS_ATTENTION
from vtx.runtime.policies.base import Entry, PromptText, Reduction, reduction
from vtx.runtime.policies.options import option
from vtx.runtime.vision.tokens import Ids, ImageTokens, share


@reduction("cls")
@dataclass(frozen=True, slots=True)
class Cls(Reduction, Entry):
    """The share `keep` of each view's tokens, rounded up, enters the decoder, in their order; no newline does.

    An image is one view, or in a layout of tiles each of them.
    """

    keep: float = option(0.25, "give the share to keep, above 0 and up to 1", least=0, most=1, above=True)

    requires: ClassVar[dict[str, Any]] = {"attention": {}}

    def entry(self) -> Entry | None:
        return self

    def number_kept(self, count: int, layer: int) -> int:
        return share(self.keep, count)

    def select(self, image: ImageTokens, question: PromptText | None = None) -> Ids | None:
        return np.flatnonzero(image.patches.highest_of_each_view(CLS_ATTENTION, self.keep))
