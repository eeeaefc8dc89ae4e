"""CLIP, whose class token leaves before its first norm."""

from __future__ import annotations

from vtx.tools.model.tensors import Placed, convolution_tensors, norm_tensors
from vtx.tools.model.towers.encoder import block_tensors
from vtx.tools.model.vision import VisionConfig

CLIP = "vision.clip"


def placed(v: VisionConfig) -> Placed:
    positions = (v.position_grid or v.grid) ** 2 + 1
    yield v.grid**2, convolution_tensors(f"{CLIP}.embeddings.patch_embedding", v.hidden, 3, v.patch, bias=False)
    yield 0, iter([(f"{CLIP}.embeddings.position_embedding.weight", (positions, v.hidden))])
    yield 0, norm_tensors(f"{CLIP}.pre_layrnorm", v.hidden)
    for layer in range(v.layers):
        yield v.grid**2, block_tensors(v, f"{CLIP}.encoder.layers.{layer}")
