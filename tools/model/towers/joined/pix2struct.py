"""Pix2Struct's encoder."""

from __future__ import annotations

from vtx.tools.model.tensors import Placed, Shapes, linear_tensors
from vtx.tools.model.vision import VisionConfig

PIX2STRUCT = "vision.pix2struct"
HALVES = ("pre_attention_layer_norm", "pre_mlp_layer_norm")


def placed(v: VisionConfig) -> Placed:
    yield v.grid**2, linear_tensors(f"{PIX2STRUCT}.embeddings.patch_projection", v.hidden, 3 * v.patch**2)
    yield 0, _tables(v)
    for layer in range(v.layers):
        yield v.grid**2, _block_tensors(v, f"{PIX2STRUCT}.encoder.layer.{layer}")
    yield 0, iter([(f"{PIX2STRUCT}.layernorm.weight", (v.hidden,))])


def _tables(v: VisionConfig) -> Shapes:
    assert v.axis_positions is not None
    for axis in ("row", "column"):
        yield f"{PIX2STRUCT}.embeddings.{axis}_embedder.weight", (v.axis_positions, v.hidden)


def _block_tensors(v: VisionConfig, p: str) -> Shapes:
    for name in HALVES:
        yield f"{p}.{name}.weight", (v.hidden,)
    for part in ("query", "key", "value", "output"):
        yield f"{p}.attention.{part}.weight", (v.hidden, v.hidden)
    yield f"{p}.mlp.wi_0.weight", (v.ffn, v.hidden)
    yield f"{p}.mlp.wi_1.weight", (v.ffn, v.hidden)
    yield f"{p}.mlp.wo.weight", (v.hidden, v.ffn)
