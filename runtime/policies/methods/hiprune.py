"""HiPrune: tokens that a middle and a deep block of the tower attend to, and the neighbours of the former, enter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from vtx.runtime.bundle.spec.names import RECEIVED
from vtx.runtime.policies.base import Entry, PromptText, Reduction, reduction
from vtx.runtime.policies.methods.cdpruner import Floats
from vtx.runtime.policies.options import number_to_keep, option, share_or_number
from vtx.runtime.vision.tokens import Ids, ImageTokens, highest


@reduction("hiprune")
@dataclass(frozen=True, slots=True)
class HiPrune(Reduction, Entry):
    """Of each view of an image `keep` tokens enter, in their order: anchors, their buffers, and registers.

    Anchors are the round(`keep` * `alpha` / 5) patches, a half to the even number, that get most attention in the
    tower's block `layer`, counted from 1; buffers those before, after, above and below them in raster order, where
    beyond the grid's ends the first or last patch; registers of all others those that get most in the last block in
    use. Attention is the mean over heads and over all the block's tokens; of equal ones the earlier counts. `keep` is a
    share up to 1, rounded up, or a number. Views are whole, so that padding takes part; no newline enters. All of it is
    what the released code does, whose number is that of all views together. Where anchors and buffers are more than
    `keep`, the last buffers stay out.
    """

    keep: float = share_or_number(0.25)
    alpha: float = option(0.1, "give the share for anchors and buffers, from 0 to 1", least=0, most=1)
    layer: int = option(9, "give a block of the tower, counted from 1", least=1)

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "192": {"keep": 192.0},
        "128": {"keep": 128.0},
        "64": {"keep": 64.0},
    }

    of_uncut: ClassVar[bool] = True
    per_view: ClassVar[bool] = True
    requires: ClassVar[dict[str, Any]] = {"tower_layers": "layer"}

    def entry(self) -> Entry | None:
        return self

    def number_kept(self, count: int, layer: int) -> int:
        return min(count, number_to_keep(self.keep, count))

    def select(self, image: ImageTokens, question: PromptText | None = None) -> Ids | None:
        patches = image.patches
        mask = np.zeros(len(image), bool)
        for view in patches.of_views():
            rows = view[patches.indices[view] >= 0]  # without a class token
            mask[rows[self._of_view(patches.signals[RECEIVED][rows])]] = True
        return np.flatnonzero(mask)

    def _of_view(self, received: Floats) -> Ids:
        """Indices of a view's patches that enter, by the attention [n, 2] that they get."""
        numbers = np.arange(len(received))
        most = self.number_kept(len(numbers), 1)
        side = math.isqrt(len(numbers))
        anchors = highest(received[:, 0], round(most * self.alpha / 5))
        near = np.add.outer(numbers[anchors], [-1, 1, -side, side]).clip(0, len(numbers) - 1)
        buffers = np.flatnonzero(np.isin(numbers, near) & ~anchors)[: most - anchors.sum()]
        anchors[buffers] = True
        rest = np.flatnonzero(~anchors)
        registers = rest[highest(received[rest, 1], most - int(anchors.sum()))]
        return np.concatenate([np.flatnonzero(anchors), registers])
