"""EVA-02, as it was trained for detection."""

from __future__ import annotations

from vtx.tools.model.tensors import Placed, Shapes, convolution_tensors, linear_tensors, norm_tensors
from vtx.tools.model.towers.joined.windows import padded_patches
from vtx.tools.model.vision import VisionConfig

EVA = "vision.eva02"
HALVES = ("norm1", "norm2")


def placed(v: VisionConfig) -> Placed:
    yield v.grid**2, convolution_tensors(f"{EVA}.patch_embed.proj", v.hidden, 3, v.patch)
    yield 0, iter([(f"{EVA}.pos_embed", (1, (v.position_grid or v.grid) ** 2 + 1, v.hidden))])
    for layer in range(v.layers):
        p = f"{EVA}.blocks.{layer}"
        for name in HALVES:
            yield 0, norm_tensors(f"{p}.{name}", v.hidden)
        yield padded_patches(v, layer), _attention_tensors(f"{p}.attn", v.hidden)
        for part in ("w1", "w2"):
            yield v.grid**2, linear_tensors(f"{p}.mlp.{part}", v.ffn, v.hidden)
        yield 0, norm_tensors(f"{p}.mlp.ffn_ln", v.ffn)
        yield v.grid**2, linear_tensors(f"{p}.mlp.w3", v.hidden, v.ffn)


def _attention_tensors(name: str, hidden: int) -> Shapes:
    for part in "qkv":
        yield f"{name}.{part}_proj.weight", (hidden, hidden)
    for part in "qv":
        yield f"{name}.{part}_bias", (hidden,)
    yield from linear_tensors(f"{name}.proj", hidden, hidden)
