"""The vision graph: a CLIP or SigLIP tower up to the last feature layer that is used, and the projector."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from vtx.exporter.graphs.activations import activate
from vtx.exporter.graphs.builder import FLOAT, Builder
from vtx.exporter.hf.config import ModelConfig, VisionConfig
from vtx.runtime import names

MAX_ROW = 1 << 30


def vision_tensors(c: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Canonical names and shapes of the weights that the vision graph uses."""
    v = c.vision
    yield "vision.embeddings.patch_embedding.weight", (v.hidden, 3, v.patch, v.patch)
    yield "vision.embeddings.position_embedding.weight", (v.rows, v.hidden)
    if v.family == "clip":
        yield "vision.embeddings.class_embedding", (v.hidden,)
        yield "vision.pre_layrnorm.weight", (v.hidden,)
        yield "vision.pre_layrnorm.bias", (v.hidden,)
    else:
        yield "vision.embeddings.patch_embedding.bias", (v.hidden,)
    for layer in range(max(c.feature_layers)):
        yield from _layer_tensors(v, f"vision.encoder.layers.{layer}")
    width = v.hidden * len(c.feature_layers)
    for name, into in (("linear_1", width), ("linear_2", c.text.hidden)):
        yield f"projector.{name}.weight", (c.text.hidden, into)
        if c.projector_bias:
            yield f"projector.{name}.bias", (c.text.hidden,)


def _layer_tensors(v: VisionConfig, p: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name in ("layer_norm1", "layer_norm2"):
        yield f"{p}.{name}.weight", (v.hidden,)
        yield f"{p}.{name}.bias", (v.hidden,)
    for name, out, into in (
        ("self_attn.q_proj", v.hidden, v.hidden),
        ("self_attn.k_proj", v.hidden, v.hidden),
        ("self_attn.v_proj", v.hidden, v.hidden),
        ("self_attn.out_proj", v.hidden, v.hidden),
        ("mlp.fc1", v.ffn, v.hidden),
        ("mlp.fc2", v.hidden, v.ffn),
    ):
        yield f"{p}.{name}.weight", (out, into)
        yield f"{p}.{name}.bias", (out,)


def build_vision(b: Builder, c: ModelConfig) -> None:
    """[images, 3, side, side] float32 to [images, vision_tokens, hidden] float32."""
    v = c.vision
    pixels = b.from_float32(b.input(names.PIXELS, FLOAT, ["images", 3, v.image, v.image]))
    x = _embeddings(b, v, pixels)
    states = [x]
    for layer in range(max(c.feature_layers)):
        x = _layer(b, v, x, f"vision.encoder.layers.{layer}", (-1, v.rows, v.hidden))
        states.append(x)
    chosen = [_select(b, c, states[number]) for number in c.feature_layers]
    features = b.op("Concat", *chosen, axis=-1) if len(chosen) > 1 else chosen[0]
    rows = b.reshape(features, -1, v.hidden * len(chosen))
    rows = activate(b, b.linear(rows, "projector.linear_1", bias=c.projector_bias), c.projector_activation)
    rows = b.linear(rows, "projector.linear_2", bias=c.projector_bias)
    out = b.reshape(rows, -1, c.vision_tokens, c.text.hidden)
    b.output(b.to_float32(out), names.FEATURES, FLOAT, ["images", c.vision_tokens, c.text.hidden])


def _embeddings(b: Builder, v: VisionConfig, pixels: ir.Value) -> ir.Value:
    inputs = [pixels, b.weight("vision.embeddings.patch_embedding.weight")]
    if v.family == "siglip":
        inputs.append(b.weight("vision.embeddings.patch_embedding.bias"))
    patches = b.op("Conv", *inputs, kernel_shape=[v.patch] * 2, strides=[v.patch] * 2)
    x = b.op("Transpose", b.reshape(patches, 0, v.hidden, -1), perm=[0, 2, 1])
    positions = b.weight("vision.embeddings.position_embedding.weight")
    if v.family == "siglip":
        return b.op("Add", x, positions)
    images = b.op("Shape", pixels, start=0, end=1)
    shape = b.op("Concat", images, b.constant([1, v.hidden]), axis=0)
    cls = b.op("Expand", b.weight("vision.embeddings.class_embedding"), shape)
    x = b.op("Add", b.op("Concat", cls, x, axis=1), positions)
    return b.dialect.layer_norm(b, x, "vision.pre_layrnorm", v.eps)


def _layer(b: Builder, v: VisionConfig, x: ir.Value, name: str, shape: tuple[int, int, int]) -> ir.Value:
    """One block on [images, rows, hidden]; `shape` says how to come back to that from [images * rows, hidden]."""
    rows = b.reshape(b.dialect.layer_norm(b, x, f"{name}.layer_norm1", v.eps), -1, v.hidden)
    q, k, w = (b.reshape(b.linear(rows, f"{name}.self_attn.{part}_proj", bias=True), *shape) for part in "qkv")
    y = b.dialect.tower_attention(b, q, k, w, v.heads)
    y = b.linear(b.reshape(y, -1, v.hidden), f"{name}.self_attn.out_proj", bias=True)
    x = b.op("Add", x, b.reshape(y, *shape))
    rows = b.reshape(b.dialect.layer_norm(b, x, f"{name}.layer_norm2", v.eps), -1, v.hidden)
    rows = activate(b, b.linear(rows, f"{name}.mlp.fc1", bias=True), v.activation)
    y = b.linear(rows, f"{name}.mlp.fc2", bias=True)
    return b.op("Add", x, b.reshape(y, *shape))


def _select(b: Builder, c: ModelConfig, x: ir.Value) -> ir.Value:
    """`default` leaves out the first row (CLIP's class token); `full` keeps all."""
    if c.select == "full":
        return x
    return b.op("Slice", x, b.constant([1]), b.constant([MAX_ROW]), b.constant([1]))
