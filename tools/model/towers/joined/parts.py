"""The tower of a model that has several: the sum of its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vtx.tools.model.tensors import Placed, Shapes, products
from vtx.tools.model.towers.joined import clip, convnext, eva02, pix2struct, sam
from vtx.tools.model.towers.joined.windows import padded_patches
from vtx.tools.model.towers.tower import Tower
from vtx.tools.model.vision import VisionConfig

PARTS: Mapping[str, Callable[[VisionConfig], Placed]] = {
    "clip": clip.placed,
    "convnext": convnext.placed,
    "sam": sam.placed,
    "eva02": eva02.placed,
    "pix2struct": pix2struct.placed,
}


class JoinedTower(Tower):
    """All towers together are one layer. A patch is a place of the grid that their features are stretched to."""

    __slots__ = ()

    def tensors(self, *, last_attention: bool = False) -> Shapes:
        for part in self.vision.towers:
            for _, tensors in PARTS[part.family](part):
                yield from tensors

    def layer_macs(self, tokens: int) -> int:
        return sum(part_macs(part) for part in self.vision.towers)

    def patch_macs(self, patches: int) -> int:
        return 0

    def widest(self, patches: int) -> int:
        return max(_widest(part) for part in self.vision.towers) + patches * self.vision.hidden

    def apart(self, patches: int) -> int:
        return self.widest(patches)


def part_macs(v: VisionConfig) -> int:
    """The work of one tower for one picture."""
    total = sum(places * products(tensors) for places, tensors in PARTS[v.family](v))
    if v.stage_blocks:
        return total
    full = v.layers if v.window is None else len(v.full_blocks)
    visible = full * v.grid**4 + (v.layers - full) * padded_patches(v) * (v.window or 0) ** 2
    return total + 2 * visible * v.hidden


def _widest(v: VisionConfig) -> int:
    if v.stage_blocks:
        return convnext.widest(v)
    return padded_patches(v) * (2 * v.hidden + max(4 * v.hidden, 2 * v.ffn))
