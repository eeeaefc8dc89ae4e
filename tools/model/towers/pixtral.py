"""Pixtral's tower: images at native resolution, rotary positions of rows and columns, and a projector behind it."""

from __future__ import annotations

from vtx.tools.model.tensors import Shapes, linear_tensors
from vtx.tools.model.towers.tower import Tower, block_macs

PATCHES = "vision.patch_conv.weight"
FIRST_NORM = "vision.ln_pre.weight"
MERGER = "projector.patch_merger.merging_layer"
MERGER_NORM = "projector.norm.weight"


def block_name(layer: int) -> str:
    """The first part of the names of a block's weights."""
    return f"vision.transformer.layers.{layer}"


class PixtralTower(Tower):
    """Blocks have RMS norms, no biases, and an MLP of three matrices; one matrix merges the patches of a square."""

    __slots__ = ()

    def tensors(self, *, last_attention: bool = False) -> Shapes:
        v = self.vision
        yield PATCHES, (v.hidden, 3, v.patch, v.patch)
        yield FIRST_NORM, (v.hidden,)
        for layer in range(self.used):
            p = block_name(layer)
            yield f"{p}.attention_norm.weight", (v.hidden,)
            yield f"{p}.ffn_norm.weight", (v.hidden,)
            for part in "qkvo":
                yield f"{p}.attention.{part}_proj.weight", (v.hidden, v.hidden)
            for name in ("gate_proj", "up_proj"):
                yield f"{p}.feed_forward.{name}.weight", (v.ffn, v.hidden)
            yield f"{p}.feed_forward.down_proj.weight", (v.hidden, v.ffn)

    def projector(self, out: int) -> Shapes:
        width = self.model.state_width
        if self.vision.shuffle > 1:
            yield MERGER_NORM, (width,)
            yield f"{MERGER}.weight", (width, width * self.vision.shuffle**2)
        for name, into in zip(self.model.projector_matrices, (width, out), strict=True):
            yield from linear_tensors(name, out, into, bias=self.model.projector_bias)

    def layer_macs(self, tokens: int) -> int:
        return block_macs(self.vision, tokens, tokens, matrices=3)
