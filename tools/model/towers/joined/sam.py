"""SAM's encoder, with the neck behind it."""

from __future__ import annotations

from vtx.tools.model.tensors import Placed, Shapes, convolution_tensors, linear_tensors, norm_tensors
from vtx.tools.model.towers.joined.windows import attention_side, padded_patches
from vtx.tools.model.vision import VisionConfig

SAM = "vision.sam"
HALVES = ("layer_norm1", "layer_norm2")


def placed(v: VisionConfig) -> Placed:
    assert v.neck is not None
    yield v.grid**2, convolution_tensors(f"{SAM}.patch_embed.projection", v.hidden, 3, v.patch)
    yield 0, iter([(f"{SAM}.pos_embed", (1, v.grid, v.grid, v.hidden))])
    for layer in range(v.layers):
        p = f"{SAM}.layers.{layer}"
        for name in HALVES:
            yield 0, norm_tensors(f"{p}.{name}", v.hidden)
        yield padded_patches(v, layer), linear_tensors(f"{p}.attn.qkv", 3 * v.hidden, v.hidden)
        yield padded_patches(v, layer), linear_tensors(f"{p}.attn.proj", v.hidden, v.hidden)
        yield 0, _tables(v, layer)
        yield v.grid**2, linear_tensors(f"{p}.mlp.lin1", v.ffn, v.hidden)
        yield v.grid**2, linear_tensors(f"{p}.mlp.lin2", v.hidden, v.ffn)
    yield v.grid**2, convolution_tensors(f"{SAM}.neck.conv1", v.neck, v.hidden, 1, bias=False)
    yield 0, norm_tensors(f"{SAM}.neck.layer_norm1", v.neck)


def _tables(v: VisionConfig, layer: int) -> Shapes:
    """Entries for the distances of a layer's queries and keys, by rows and by columns."""
    for axis in "hw":
        distances = 2 * attention_side(v, layer) - 1
        yield f"{SAM}.layers.{layer}.attn.position_embedding_{axis}", (distances, v.hidden // v.heads)
