"""Qwen-VL's tower: images at native resolution, rotary positions, windows, and mergers in place of a projector."""

from __future__ import annotations

from vtx.tools.model.tensors import Shapes, linear_tensors, norm_tensors
from vtx.tools.model.towers.tower import Tower, block_macs

POSITIONS = "vision.pos_embed.weight"
MERGER = "vision.merger"


class NativeTower(Tower):
    """The patches of a square become one token; some blocks attend within windows."""

    __slots__ = ()
    moments = 2  # of a video; an image fills both

    def tensors(self, *, last_attention: bool = False) -> Shapes:
        v = self.vision
        yield "vision.patch_embed.proj.weight", (v.hidden, 3, self.moments, v.patch, v.patch)
        if v.patch_bias:
            yield "vision.patch_embed.proj.bias", (v.hidden,)
        if v.position_grid is not None:
            yield POSITIONS, (v.position_grid**2, v.hidden)
        for layer in range(v.layers):
            p = f"vision.blocks.{layer}"
            yield from norm_tensors(f"{p}.norm1", v.hidden, bias=not v.rms_norm)
            yield from norm_tensors(f"{p}.norm2", v.hidden, bias=not v.rms_norm)
            yield from linear_tensors(f"{p}.attn.qkv", 3 * v.hidden, v.hidden)
            yield from linear_tensors(f"{p}.attn.proj", v.hidden, v.hidden)
            for name in ("gate_proj", "up_proj") if v.gated else ("fc1",):
                yield from linear_tensors(f"{p}.mlp.{name}", v.ffn, v.hidden)
            yield from linear_tensors(f"{p}.mlp.{'down_proj' if v.gated else 'fc2'}", v.hidden, v.ffn)

    def projector(self, out: int) -> Shapes:
        """The merger's weights, and those of the maps'."""
        v = self.vision
        square = self.vision.hidden * self.vision.shuffle**2
        widths = {MERGER: v.hidden} | {map_merger(number): square for number in range(len(v.maps))}
        for name, width in widths.items():
            yield from norm_tensors(f"{name}.ln_q", width, bias=not v.rms_norm)
            yield from linear_tensors(f"{name}.mlp.0", square, square)
            yield from linear_tensors(f"{name}.mlp.2", out, square)

    @property
    def used(self) -> int:
        return self.vision.layers

    def layer_macs(self, tokens: int) -> int:
        v = self.vision
        visible = tokens
        if v.window is not None:
            full = max(1, len(v.full_blocks))
            visible = (full * tokens + (v.layers - full) * min(tokens, v.window**2)) // v.layers
        return block_macs(v, tokens, visible, matrices=3 if v.gated else 2)


def map_merger(number: int) -> str:
    """The canonical name of the merger of map `number`, from 0; its norm is over all patches of a square together."""
    return f"vision.deepstack_merger_list.{number}"
