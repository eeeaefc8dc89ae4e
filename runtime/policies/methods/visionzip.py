"""VisionZip: the tokens that the class token looks at most enter, and the others merged into a few."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from vtx.runtime.bundle.spec.names import CLASS_TOKEN
from vtx.runtime.policies.base import Entry, Reduction, reduction
from vtx.runtime.policies.methods.cdpruner import Floats, lengths_of
from vtx.runtime.policies.options import number_to_keep, share_or_number
from vtx.runtime.vision.tokens import Ids, ImageTokens, MergedTokens, Patches, highest

Order = tuple[bool, int, int, int]  # squeezed image or tiles, kind of the token, and two numbers of its place there


@dataclass(frozen=True, slots=True, eq=False)
class _Token:
    """A token that enters: its place in the order, its view and patch there (-1 the class token), and its sources."""

    order: Order
    view: int
    patch: int
    sources: Ids  # the view's tokens within the tower, the target first


@reduction("visionzip")
@dataclass(frozen=True, slots=True)
class VisionZip(Reduction, Entry):
    """Of each view of an image the class token and others, `dominant` in all, enter, and `contextual` merged ones.

    Dominant are the patches that the class token looks at most in the last block in use. Of the patches left, targets
    stand at equal steps, from the first on; each other one goes to the target whose key, mean over heads in that block,
    is most alike, of equal ones the first. A contextual token is the target plus the mean of those that went to it,
    before the projector. First enters the class token, then dominant ones in raster order, then contextual ones; of an
    image in tiles so those of the squeezed image, then the dominant ones of all tiles, row by row of their grid, then
    the class tokens of the tiles, then their contextual ones. Padding takes part and no newline enters. Each option is
    a share of the patches up to 1, rounded up, or a number. All of it is what the released code does.
    """

    dominant: float = share_or_number(0.1875)
    contextual: float = share_or_number(0.0347)

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "192": {"dominant": 162.0, "contextual": 30.0},
        "128": {"dominant": 108.0, "contextual": 20.0},
        "64": {"dominant": 54.0, "contextual": 10.0},
    }

    per_view: ClassVar[bool] = True
    requires: ClassVar[dict[str, Any]] = {"projector": {}}

    def entry(self) -> Entry | None:
        return self

    def number_kept(self, count: int, layer: int) -> int:
        return sum(self._numbers(count))

    def _numbers(self, patches: int) -> tuple[int, int]:
        """The dominant and contextual tokens of a view."""
        dominant = min(patches + 1, number_to_keep(self.dominant, patches))
        return dominant, min(patches + 1 - dominant, number_to_keep(self.contextual, patches))

    def merge(self, image: ImageTokens) -> MergedTokens | None:
        tower = image.tower
        assert tower is not None, "the vision graph gives no tokens of the tower"
        views, states = tower.attention.shape
        tokens = [
            token
            for view in range(views)
            for token in self._of_view(view, tower.columns, tower.keys[view], tower.attention[view])
        ]
        tokens.sort(key=lambda token: token.order)
        counts = np.array([len(token.sources) for token in tokens])
        starts = np.cumsum(counts) - counts
        weights = np.repeat(1 / np.maximum(1, counts - 1), counts).astype(np.float32)
        weights[starts] = 1
        of_view, patch = (np.array([getattr(token, name) for token in tokens]) for name in ("view", "patch"))
        indices = np.where(patch < 0, CLASS_TOKEN, of_view * (states - 1) + patch)
        patches = Patches(indices, np.zeros(len(tokens), bool), views=of_view if views > 1 else None)
        sources = np.concatenate([token.view * states + token.sources for token in tokens])
        return MergedTokens(patches, starts, sources, weights)

    def _of_view(self, view: int, columns: int, keys: Floats, attention: Floats) -> list[_Token]:
        """The tokens of a view: keys [n, size] and the class token's attention [n], its own first."""
        count = len(attention) - 1
        tiled = view > 0
        dominant, contextual = self._numbers(count)
        looked_at = highest(attention[1:], dominant - 1)
        rest = np.flatnonzero(~looked_at)
        side = math.isqrt(count)
        row, column = divmod(view - 1, columns) if tiled else (0, 0)
        tokens = [_Token((tiled, int(tiled), view, 0), view, CLASS_TOKEN, np.zeros(1, np.int64))]
        for patch in np.flatnonzero(looked_at).tolist():
            order = tiled, int(not tiled), row * side + patch // side, column * side + patch % side
            tokens.append(_Token(order, view, patch, np.array([patch + 1])))
        targets = rest[:: max(1, len(rest) // max(1, contextual))][:contextual]
        merged = np.setdiff1d(rest, targets)
        unit = keys[1:] / lengths_of(keys[1:])[:, None]
        similarity = (unit[merged] @ unit[targets].T).astype(np.float32)
        nearest = similarity.argmax(1) if contextual else merged
        for number, target in enumerate(targets):
            sources = np.concatenate([[target], merged[nearest == number]]) + 1
            tokens.append(_Token((tiled, 2, view, int(target)), view, int(target), sources))
        return tokens
