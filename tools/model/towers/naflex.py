"""SigLIP 2's tower of images at native resolution (NaFlex), and MiniCPM's, inside which patches merge."""

from __future__ import annotations

from vtx.tools.model.tensors import Shapes, linear_tensors, norm_tensors, products
from vtx.tools.model.towers.encoder import TOWER, embedding_tensors, encoder_tensors, post_norm_tensors
from vtx.tools.model.towers.tower import Tower, block_macs
from vtx.tools.model.vision import MERGED, VisionConfig

MERGER = "vision.vit_merger"


class NaflexTower(Tower):
    """An encoder whose table of positions is stretched to an image; patches describe a tile."""

    __slots__ = ()

    def tensors(self, *, last_attention: bool = False) -> Shapes:
        v = self.vision
        kernel = None if v.nearest else (3 * v.patch**2,)
        yield from embedding_tensors(v, TOWER, kernel)
        yield from encoder_tensors(v, self.used, last_attention)
        if v.merged_after is not None:
            yield from _merger_tensors(v)
        yield from post_norm_tensors(v)

    def layer_macs(self, tokens: int) -> int:
        """The mean of the layers before and behind the merger, with its share of the merger."""
        v = self.vision
        squares = tokens // MERGED**2
        if v.merged_after is None:
            return block_macs(v, tokens, tokens)
        before = v.merged_after * block_macs(v, tokens, tokens)
        behind = (self.used - v.merged_after) * block_macs(v, squares, squares)
        attention = tokens * (4 * v.hidden**2 + 2 * MERGED**2 * v.hidden)
        return (before + behind + attention + squares * products(_merger_mlp(v))) // self.used


def _merger_tensors(v: VisionConfig) -> Shapes:
    """The weights by which squares of patches become one patch."""
    yield from norm_tensors(f"{MERGER}.layer_norm1", v.hidden)
    for part in ("q", "k", "v", "out"):
        yield from linear_tensors(f"{MERGER}.self_attn.{part}_proj", v.hidden, v.hidden)
    yield from norm_tensors(f"{MERGER}.pre_norm", MERGED**2 * v.hidden)
    yield from _merger_mlp(v)


def _merger_mlp(v: VisionConfig) -> Shapes:
    yield from linear_tensors(f"{MERGER}.linear_1", MERGED**2 * v.ffn, MERGED**2 * v.hidden)
    yield from linear_tensors(f"{MERGER}.linear_2", v.hidden, MERGED**2 * v.ffn)
