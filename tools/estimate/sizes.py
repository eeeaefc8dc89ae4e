"""Sizes of a model for a plan: of one known by name, or of a bundle."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vtx.runtime.bundle.spec.model_spec import ModelSpec
from vtx.runtime.vision.layout import Layout
from vtx.runtime.vision.layout_spec import read_layout
from vtx.runtime.vision.layouts.anyres import Anyres
from vtx.runtime.vision.layouts.marked import MarkedTiles
from vtx.runtime.vision.layouts.native import Native
from vtx.runtime.vision.layouts.single import Single
from vtx.runtime.vision.layouts.tiles import Tiles
from vtx.tools.estimate.flops import DecoderSize, VisionSize
from vtx.tools.estimate.native import NativeSize, native_size, seeing

if TYPE_CHECKING:
    from vtx.runtime.bundle.bundle import Bundle

_VICUNA_7B = DecoderSize(layers=32, hidden=4096, ffn=11008, heads=32, kv_heads=32, head_dim=128, vocab=32064)
_VICUNA_13B = DecoderSize(layers=40, hidden=5120, ffn=13824, heads=40, kv_heads=40, head_dim=128, vocab=32064)
_SMOLLM2_360M = DecoderSize(layers=32, hidden=960, ffn=2560, heads=15, kv_heads=5, head_dim=64, vocab=49280)
_CLIP_L_336 = VisionSize(
    layers=24, used=23, hidden=1024, ffn=4096, patches=576, patch=14, class_token=True,
    features=1, view_tokens=576, image_tokens=576, out=4096,
)  # fmt: skip
# InternViT-6B seen at 336 pixels, up to the fourth layer from the end: DyVTE's InternVL-7B is InternVL-Chat 1.0.
_INTERNVIT_6B = VisionSize(
    layers=48, used=45, hidden=3200, ffn=12800, patches=576, patch=14, class_token=True,
    features=1, view_tokens=576, image_tokens=576, out=4096,
)  # fmt: skip
# SigLIP-so400m at 384 pixels: four of its 27 x 27 patches, with a row and a column of zeros, are one token.
_VILA_1_5 = VisionSize(
    layers=27, used=26, hidden=1152, ffn=4304, patches=729, patch=14, class_token=False,
    features=4, view_tokens=196, image_tokens=196, out=5120,
)  # fmt: skip
# SigLIP-base at 512 pixels: 4 x 4 of its 32 x 32 patches are one token; up to 16 tiles and the whole image.
_SMOLVLM = VisionSize(
    layers=12, used=12, hidden=768, ffn=3072, patches=1024, patch=16, class_token=False, features=16, view_tokens=64,
    image_tokens=17 * 64, out=960, views=17, projector_bias=False, projector_layers=1,
)  # fmt: skip
# InternViT-300M at 448 pixels: 2 x 2 of its patches are one token; up to 12 tiles and the whole image.
_INTERNVL2 = VisionSize(
    layers=24, used=24, hidden=1024, ffn=4096, patches=1024, patch=14, class_token=True, features=4, view_tokens=256,
    image_tokens=13 * 256, out=4096, views=13,
)  # fmt: skip
_INTERNLM2_7B = DecoderSize(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=92553)
# CLIP-L at 224 pixels, and one matrix as projector.
_LISA = replace(_CLIP_L_336, patches=256, view_tokens=256, image_tokens=256, out=5120, projector_layers=1)
# 8 frames of 16 x 16 patches and a class token; pictures and videos have a tower each.
_VIDEO = replace(_CLIP_L_336, patches=256, view_tokens=257, image_tokens=8 * 257, views=8, towers=2)

_QWEN_3B = DecoderSize(
    layers=36, hidden=2048, ffn=11008, heads=16, kv_heads=2, head_dim=128, vocab=151936, tied=True, qkv_bias=True
)
_QWEN_7B = DecoderSize(
    layers=28, hidden=3584, ffn=18944, heads=28, kv_heads=4, head_dim=128, vocab=152064, qkv_bias=True
)
_QWEN_2B = replace(_QWEN_7B, hidden=1536, ffn=8960, heads=12, kv_heads=2, vocab=151936, tied=True)
_QWEN2_VL = NativeSize(
    layers=32, used=32, hidden=1280, ffn=5120, patches=4 * 16384, patch=14, class_token=False,
    features=4, view_tokens=16384, image_tokens=16384, out=1536, whole=32,
)  # fmt: skip
# Windows of 8 x 8 patches in all layers but four.
_QWEN2_5_VL = replace(_QWEN2_VL, ffn=3420, out=2048, gated=True, window=64, whole=4)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """One model: `vision` is None where a bundle or a checkpoint has no tower.

    `layout` says how many tokens an image of a size has; None: what it sees is a video, always of the same number.
    """

    name: str
    source: str
    decoder: DecoderSize
    vision: VisionSize | None
    layout: Layout | None = None

    @property
    def parameters(self) -> int:
        return self.decoder.parameters + (0 if self.vision is None else self.vision.parameters)

    def views(self, vision_tokens: int) -> int:
        """Passes of the tower that `vision_tokens` in the prompt need, counted in whole images."""
        if self.vision is None:
            return 0
        return -(-vision_tokens // self.vision.image_tokens) * self.vision.views

    def picture(self, width: int, height: int) -> tuple[int, int]:
        """Tokens of an image of this size, and the passes of the tower that it takes."""
        if self.vision is None:
            return 0, 0
        if self.layout is None:
            return self.vision.image_tokens, self.vision.views
        return self.layout.count(width, height), self.layout.passes(width, height)

    def seeing(self, vision_tokens: int) -> ModelSize:
        """The model as it sees an image of so many tokens, where that decides what the tower costs."""
        return replace(self, vision=seeing(self.vision, vision_tokens))

    def to_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(replace(self, layout=None))
        del values["layout"]
        return values


# LLaVA-NeXT: up to four tiles and the whole picture, the 48 x 48 patches of the tiles with a newline token a row, the
# 24 x 24 of the whole.
_NEXT = Anyres(336, 24, ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)), rounded=True)
_NATIVE = Native(patch=14, merge=2, min_pixels=4 * 28**2, max_pixels=16384 * 28**2)
# The sizes that the models' public configurations state.
KNOWN: Mapping[str, ModelSize] = {
    model.name: model
    for model in (
        ModelSize("llava-1.5-7b", "known", _VICUNA_7B, _CLIP_L_336, Single(576)),
        ModelSize("llava-1.5-13b", "known", _VICUNA_13B, replace(_CLIP_L_336, out=5120), Single(576)),
        ModelSize("llava-next-7b", "known", _VICUNA_7B, replace(_CLIP_L_336, views=5, image_tokens=2928), _NEXT),
        ModelSize("video-llava-7b", "known", _VICUNA_7B, _VIDEO),
        ModelSize("vila-7b", "known", replace(_VICUNA_7B, vocab=32000), _CLIP_L_336, Single(576)),
        ModelSize("vila1.5-13b", "known", replace(_VICUNA_13B, vocab=32000), _VILA_1_5, Single(196)),
        ModelSize("lisa-13b", "known", replace(_VICUNA_13B, vocab=32003), _LISA, Single(256)),
        ModelSize("internvl2-8b", "known", _INTERNLM2_7B, _INTERNVL2, Tiles(448, 256, 1, 12)),
        ModelSize("smolvlm2-500m", "known", _SMOLLM2_360M, _SMOLVLM, MarkedTiles(512, 64, 4, 17)),
        ModelSize("internvl-7b", "known", replace(_VICUNA_7B, vocab=32000), _INTERNVIT_6B, Single(576)),
        ModelSize("qwen2-vl-2b", "known", _QWEN_2B, _QWEN2_VL, _NATIVE),
        ModelSize("qwen2-vl-7b", "known", _QWEN_7B, replace(_QWEN2_VL, out=3584), _NATIVE),
        ModelSize("qwen2.5-vl-3b", "known", _QWEN_3B, _QWEN2_5_VL, _NATIVE),
        ModelSize("qwen2.5-vl-7b", "known", _QWEN_7B, replace(_QWEN2_5_VL, out=3584), _NATIVE),
    )
}


def bundle_size(bundle: Bundle) -> ModelSize:
    """Sizes of a bundle, as its manifest declares them."""
    manifest = bundle.manifest
    size = spec_size(manifest.model, read_layout(manifest.layout, manifest.model.tower), "bundle")
    if size.vision is None or not manifest.dialects["ort"].vision_last_attention:
        return size
    return replace(size, vision=replace(size.vision, used=size.vision.layers))


def spec_size(m: ModelSpec, layout: Layout, source: str) -> ModelSize:
    """Sizes of a model; an image is counted with the most tokens and views that it can have."""
    decoder = DecoderSize(
        m.layers, m.hidden, m.intermediate, m.heads, m.kv_heads, m.head_dim, m.vocab, m.tied, m.qkv_bias, m.o_bias,
        m.mlp_bias,
    )  # fmt: skip
    tower = m.tower
    if "native" in tower.flags:
        return ModelSize(m.name, source, decoder, native_size(tower, m.hidden, layout.max_tokens), layout)
    vision = VisionSize(
        layers=tower.layers, used=tower.used_layers, hidden=tower.hidden, ffn=tower.intermediate,
        patches=tower.grid**2, patch=tower.patch, class_token=tower.class_token,
        features=len(tower.feature_layers) * tower.shuffle**2, view_tokens=tower.tokens,
        image_tokens=layout.max_tokens, out=m.hidden, views=layout.max_views, projector_bias=m.projector.bias,
        projector_layers=m.projector.layers,
    )  # fmt: skip
    return ModelSize(m.name, source, decoder, vision, layout)
