"""MustDrop: windows merge in the tower, tokens leave by dual attention, early caches shrink to the survivors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from vtx.runtime.bundle.spec.names import CLS_ATTENTION, CLS_ATTENTION_LAST
from vtx.runtime.policies.base import Boundary, Entry, Reduction, reduction
from vtx.runtime.policies.methods.lsm import Lsm
from vtx.runtime.policies.options import Not, cosine, option
from vtx.runtime.vision.tokens import Mask, Patches, keys

THRESHOLD = "a threshold must be at least 0"
RELEASED = {"positions": "renumber", "order": "merged-first", "keys": "last-block"}
SIGNALS = {"used-block": CLS_ATTENTION, "last-block": CLS_ATTENTION_LAST}


@reduction("mustdrop")
@dataclass(frozen=True, slots=True)
class MustDrop(Reduction):
    """Dual-attention filtering after each of `layers`, key tokens spared, and the output-aware cache.

    After a layer, image token j with sum V_j and maximum A_j of the question's attention leaves when
    V_j < `gamma` * sum V and A_j < `alpha` (MustDrop Eq. 8 to 10), unless it is among the share `key` of its image's
    tokens that the class token looks at most. Presets are named by the tokens that the paper keeps of 576.
    The class token's attention is read in the tower's last block in use, with keys=last-block in its very last one.
    positions=renumber, order=merged-first and keys=last-block together are what the released code does, and the presets
    set them; without a preset they are off.
    """

    gamma: float = option(0.001, THRESHOLD, least=0)
    alpha: float = option(0.001, THRESHOLD, least=0)
    tau: float | None = cosine(0.8)
    key: float = option(0.08, "give the share never to drop, from 0 to 1", least=0, most=1)
    layers: tuple[int, ...] = option((3, 7, 11, 15), "give rising numbers of at least 1, e.g. 3/7/11/15", least=1)
    positions: Literal["keep", "renumber"] = "keep"
    order: Literal["raster", "merged-first"] = "raster"
    keys: Literal["used-block", "last-block"] = "used-block"

    thresholds: ClassVar[tuple[str, ...]] = ("gamma", "alpha")
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "192": {"gamma": 0.001, "alpha": 0.001, **RELEASED},
        "128": {"gamma": 0.0012, "alpha": 0.001, **RELEASED},
        "64": {"gamma": 0.011, "alpha": 0.01, **RELEASED},
        "vizwiz-64": {"gamma": 0.005, "alpha": 0.001, **RELEASED},
    }

    requires: ClassVar[dict[str, Any]] = {
        "cuts": "layers",
        "queries": "layers",
        "shrinks": "layers",
        "merging": {"tau": Not(None)},
        "attention": {"key": Not(0), "keys": "used-block"},
        "last_attention": {"key": Not(0), "keys": "last-block"},
    }

    @property
    def renumbers(self) -> bool:
        return self.positions == "renumber"

    def entry(self) -> Entry | None:
        return None if self.tau is None else Lsm(self.tau, self.order)

    def marks(self, images: Sequence[Patches]) -> Mask | None:
        return keys(images, self.key, SIGNALS[self.keys]) if self.key else None

    def keep_mask(self, boundary: Boundary) -> Mask | None:
        total, most = boundary.attention()
        mask: Mask = (total >= self.gamma * total.sum()) | (most >= self.alpha)
        marked = self.marks(boundary.images)
        return mask if marked is None else mask | marked[boundary.present]
