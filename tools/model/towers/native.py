"""Qwen-VL's tower and those like it: images at native resolution, rotary positions, and mergers as projectors."""

from __future__ import annotations

from vtx.tools.model.tensors import Shapes, linear_tensors, norm_tensors
from vtx.tools.model.towers.tower import Tower, block_macs
from vtx.tools.model.vision import VisionConfig

PATCHES = "vision.patch_embed.proj.weight"
POSITIONS = "vision.pos_embed.weight"
FIRST_NORM = "vision.embedding_norm"
LAST_NORM = "vision.post_layernorm"
MERGER = "vision.merger"
DOWNSAMPLE = "vision.downsample"
MOMENTS = 2
WIDER = 3  # times a token, the width of the gated MLP behind a convolution


class NativeTower(Tower):
    """The patches of a square become one token; some blocks attend within windows."""

    __slots__ = ()

    @property
    def moments(self) -> int:
        """Of a video two in a patch, and an image fills both; of a tower without videos it may be one."""
        return 1 if self.vision.one_frame else MOMENTS

    def tensors(self, *, last_attention: bool = False) -> Shapes:
        v = self.vision
        yield PATCHES, (v.hidden, 3, self.moments, v.patch, v.patch)
        if v.patch_bias:
            yield "vision.patch_embed.proj.bias", (v.hidden,)
        if v.position_grid is not None:
            yield POSITIONS, (v.position_grid**2, v.hidden)
        if v.first_norm:
            yield from norm_tensors(FIRST_NORM, v.hidden, bias=not v.rms_norm)
        for layer in range(v.layers):
            p = f"vision.blocks.{layer}"
            yield from norm_tensors(f"{p}.norm1", v.hidden, bias=not v.rms_norm)
            yield from norm_tensors(f"{p}.norm2", v.hidden, bias=not v.rms_norm)
            yield from _convolution(v, p) if layer in v.convolved else _attention(v, p)
            for name in ("gate_proj", "up_proj") if v.gated else ("fc1",):
                yield from linear_tensors(f"{p}.mlp.{name}", v.ffn, v.hidden, bias=v.qkv_bias)
            yield from linear_tensors(f"{p}.mlp.{'down_proj' if v.gated else 'fc2'}", v.hidden, v.ffn, bias=v.qkv_bias)
        if v.post_norm:
            yield from norm_tensors(LAST_NORM, v.hidden, bias=not v.rms_norm)

    def projector(self, out: int) -> Shapes:
        """The merger's weights, and those of the maps'."""
        v = self.vision
        model = self.model
        square = self.vision.hidden * self.vision.shuffle**2
        if v.downsampled:
            yield from _downsampling(v, out)
            return
        widths = {MERGER: v.hidden} | {map_merger(number): square for number in range(len(v.maps))}
        for name, width in widths.items():
            yield from norm_tensors(f"{name}.ln_q", width, bias=not model.projector_rms)
            yield from linear_tensors(f"{name}.mlp.0", model.between(out), square, bias=model.projector_bias)
            yield from linear_tensors(f"{name}.mlp.2", out, model.between(out), bias=model.projector_bias)

    @property
    def used(self) -> int:
        return self.vision.layers

    def layer_macs(self, tokens: int) -> int:
        v = self.vision
        visible = tokens
        if v.window is not None:
            full = max(1, len(v.full_blocks))
            visible = (full * tokens + (v.layers - full) * min(tokens, v.window**2)) // v.layers
        visible = visible * (v.layers - len(v.convolved)) // v.layers
        return block_macs(v, tokens, visible, matrices=3 if v.gated else 2)


def _attention(v: VisionConfig, p: str) -> Shapes:
    if v.kv_heads is None:
        yield from linear_tensors(f"{p}.attn.qkv", 3 * v.hidden, v.hidden, bias=v.qkv_bias)
    else:
        narrow = v.hidden // v.heads * v.kv_heads
        for part, width in zip("qkv", (v.hidden, narrow, narrow), strict=True):
            yield from linear_tensors(f"{p}.attn.{part}_proj", width, v.hidden, bias=v.qkv_bias)
    for part in "qk" if v.head_norms else "":
        yield f"{p}.attn.{part}_norm.weight", (v.hidden // v.heads,)
    yield from linear_tensors(f"{p}.attn.proj", v.hidden, v.hidden, bias=v.qkv_bias)


def _convolution(v: VisionConfig, p: str) -> Shapes:
    yield from linear_tensors(f"{p}.conv.in_proj", 3 * v.hidden, v.hidden, bias=False)
    yield f"{p}.conv.spatial_conv.weight", (v.hidden, 1, v.conv_kernel, v.conv_kernel)
    yield from linear_tensors(f"{p}.conv.out_proj", v.hidden, v.hidden, bias=False)


def _downsampling(v: VisionConfig, out: int) -> Shapes:
    """The weights of the convolution over a square, and of the gated MLP behind it."""
    yield f"{DOWNSAMPLE}.weight", (out, v.hidden, v.shuffle, v.shuffle)
    yield f"{DOWNSAMPLE}.bias", (out,)
    yield f"{MERGER}.proj.weight", (out, out)
    yield from norm_tensors(f"{MERGER}.post_projection_norm", out)
    for part in ("gate", "up"):
        yield f"{MERGER}.{part}_proj.weight", (WIDER * out, out)
    yield f"{MERGER}.down_proj.weight", (out, WIDER * out)


def map_merger(number: int) -> str:
    """The canonical name of the merger of map `number`, from 0; its norm is over all patches of a square together."""
    return f"vision.deepstack_merger_list.{number}"
