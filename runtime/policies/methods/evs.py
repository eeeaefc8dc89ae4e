"""EVS: the tokens of a video that differ most from those of the frame before enter."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vtx.runtime.policies.base import reduction
from vtx.runtime.policies.clip import Choose, Clip
from vtx.runtime.policies.methods.dart import TINY
from vtx.runtime.policies.options import share_or_number
from vtx.runtime.vision.tokens import HiddenStates, Ids, highest

WINDOW = 16  # frames; what stays is the same whatever this is


@reduction("evs")
@dataclass(frozen=True, slots=True)
class Evs(Clip):
    """Of the tokens of a video's frames `keep` enter: the first frame, and those that changed most (EVS).

    A token's change is 1 - cosine with the token at its place in the frame before, of the projector's output; of equal
    ones the earlier counts. `keep` is a share up to 1 of all frames' tokens, rounded down, or a number; the first frame
    enters whole, however little that is. A newline behind the frames enters beyond the budget, images enter whole, and
    tokens stand at positions without gaps. Cosines are summed in float64 and rounded to float32, so that equal tokens
    are equally alike. The tokens are those of vLLM's code, but for its number, which it truncates in binary.
    """

    keep: float = share_or_number(0.25)

    @property
    def at_once(self) -> int:
        return WINDOW

    def number_kept(self, count: int, layer: int) -> int:
        return min(count, math.floor(round(self.keep * count, 9)) if self.keep <= 1 else int(self.keep))

    def begin(self, frames: int) -> Choose:
        kept = np.empty(0, np.int64)
        changes = np.empty(0, np.float32)
        before = np.empty((0, 0, 0))
        count = 0

        def choose(window: HiddenStates) -> Ids:
            nonlocal kept, changes, before, count
            wide = window.astype(np.float64)
            _, tokens_of_frame, _ = window.shape
            earlier = np.concatenate([before if count else np.zeros_like(wide[:1]), wide[:-1]])
            lengths = np.linalg.norm(wide, axis=-1) * np.linalg.norm(earlier, axis=-1)
            change = 1 - ((wide * earlier).sum(-1) / np.maximum(lengths, TINY)).astype(np.float32)
            if not count:
                change[0] = np.inf
            numbers = np.concatenate([kept, count + np.arange(change.size)])
            changes = np.concatenate([changes, change.ravel()])
            stays = highest(changes, max(tokens_of_frame, self.number_kept(frames * tokens_of_frame, 1)))
            kept = numbers[stays]
            changes = changes[stays]
            before = wide[-1:].copy()
            count = count + change.size
            return kept

        return choose
