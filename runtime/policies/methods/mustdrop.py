"""MustDrop: windows merge in the tower, tokens leave by dual attention, early caches shrink to the survivors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal

from vtx.runtime.bundle.spec.names import CLS_ATTENTION, CLS_ATTENTION_LAST
from vtx.runtime.errors import RequestError
from vtx.runtime.policies.base import Boundary, Entry, Needs, Reduction
from vtx.runtime.policies.methods.lsm import Lsm, check_tau
from vtx.runtime.policies.registry import reduction
from vtx.runtime.vision.tokens import Mask, Patches, keys

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

    gamma: float = 0.001
    alpha: float = 0.001
    tau: float | None = 0.8
    key: float = 0.08
    layers: tuple[int, ...] = (3, 7, 11, 15)
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

    def __post_init__(self) -> None:
        if self.tau is not None:
            check_tau("mustdrop", self.tau)
        if not 0 <= self.key <= 1:
            raise RequestError(f"mustdrop: key is {self.key}; give the share never to drop, from 0 to 1")
        for name in ("gamma", "alpha"):
            if getattr(self, name) < 0:
                raise RequestError(f"mustdrop: {name} is {getattr(self, name)}; a threshold must be at least 0")
        if not self.layers or self.layers[0] < 1 or any(a >= b for a, b in pairwise(self.layers)):
            raise RequestError(
                f"mustdrop: layers are {'/'.join(map(str, self.layers))}; give rising numbers, at least 1, as 3/7/11/15"
            )

    @property
    def renumbers(self) -> bool:
        return self.positions == "renumber"

    def needs(self) -> Needs:
        return Needs(
            cuts=tuple(layer + 1 for layer in self.layers),
            queries=self.layers,
            shrinks=self.layers[0],
            merging=self.tau is not None,
            attention=self.key > 0 and self.keys == "used-block",
            last_attention=self.key > 0 and self.keys == "last-block",
        )

    def entry(self) -> Entry | None:
        return None if self.tau is None else Lsm(self.tau, self.order)

    def marks(self, images: Sequence[Patches]) -> Mask | None:
        return keys(images, self.key, SIGNALS[self.keys]) if self.key else None

    def keep_mask(self, boundary: Boundary) -> Mask | None:
        total, most = boundary.attention()
        kept: Mask = (total >= self.gamma * total.sum()) | (most >= self.alpha)
        marked = self.marks(boundary.images)
        return kept if marked is None else kept | marked[boundary.present]
