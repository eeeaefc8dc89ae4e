"""Gemma 4's tower: images at native resolution, a table of positions on each axis, and means of squares as tokens."""

from __future__ import annotations

from vtx.tools.model.tensors import Shapes
from vtx.tools.model.towers.tower import Tower, block_macs

PATCHES = "vision.patch_embed.weight"
POSITIONS = "vision.position_embedding_table"
PROJECTION = "projector.linear_1"
BOUNDS = ("input_min", "input_max", "output_min", "output_max")
NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


class AxialTower(Tower):
    """Blocks have four norms, no biases, and an MLP of three matrices."""

    __slots__ = ()

    def tensors(self, *, last_attention: bool = False) -> Shapes:
        v = self.vision
        assert v.axis_positions is not None
        yield PATCHES, (v.hidden, 3 * v.patch**2)
        yield POSITIONS, (2, v.axis_positions, v.hidden)
        for layer in range(v.layers):
            p = f"vision.encoder.layers.{layer}"
            for name in NORMS:
                yield f"{p}.{name}.weight", (v.hidden,)
            for name in ("q_norm", "k_norm"):
                yield f"{p}.self_attn.{name}.weight", (v.hidden // v.heads,)
            for name, out, into in (
                *((f"self_attn.{part}_proj", v.hidden, v.hidden) for part in "qkvo"),
                ("mlp.gate_proj", v.ffn, v.hidden),
                ("mlp.up_proj", v.ffn, v.hidden),
                ("mlp.down_proj", v.hidden, v.ffn),
            ):
                yield f"{p}.{name}.linear.weight", (out, into)
                for bound in BOUNDS if v.clipped else ():
                    yield f"{p}.{name}.{bound}", ()
        for name in ("std_bias", "std_scale") if v.standardised else ():
            yield f"vision.{name}", (v.hidden,)

    def projector(self, out: int) -> Shapes:
        yield f"{PROJECTION}.weight", (out, self.vision.hidden)

    @property
    def used(self) -> int:
        return self.vision.layers

    def layer_macs(self, tokens: int) -> int:
        return block_macs(self.vision, tokens, tokens, matrices=3)
