"""A block of a tower, of patches or of text: attention and an MLP, each after a layer norm; and CLIP's text tower."""

from __future__ import annotations

import onnx_ir as ir

from vtx.exporter.graphs.activations import activate
from vtx.exporter.graphs.builder import FLOAT, INT64, Builder, Heads
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.model_spec import TextTowerSpec
from vtx.tools.model.tensors import Shapes, norm_tensors
from vtx.tools.model.towers.encoder import LAYER_SCALES, Encoder, TextEncoder, block_tensors


def build_block(
    b: Builder,
    e: Encoder,
    x: ir.Value,
    name: str,
    shape: tuple[int, int, int],
    seen: ir.Value | None = None,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """One block on [batch, tokens, hidden], and its q and k.

    `shape` restores that from [batch * tokens, hidden]. `seen`: the tokens that are attended to, None for all.
    """
    q, k, w = projected(b, e, x, name, shape, "qkv")
    y = b.dialect.tower_attention(b, q, k, w, Heads(e.heads, e.hidden // e.heads, causal=e.causal), seen)
    y = b.linear(b.reshape(y, -1, e.hidden), f"{name}.self_attn.out_proj", bias=True)
    x = b.op("Add", x, b.reshape(_scaled(b, e, y, name, 0), *shape))
    hidden = b.reshape(norm(b, e, x, f"{name}.layer_norm2"), -1, e.hidden)
    hidden = activate(b, b.linear(hidden, f"{name}.mlp.fc1", bias=True), e.activation)
    y = b.linear(hidden, f"{name}.mlp.fc2", bias=True)
    return b.op("Add", x, b.reshape(_scaled(b, e, y, name, 1), *shape)), q, k


def _scaled(b: Builder, e: Encoder, y: ir.Value, name: str, half: int) -> ir.Value:
    return b.op("Mul", y, b.weight(f"{name}.{LAYER_SCALES[half]}")) if e.layer_scale else y


def projected(
    b: Builder, e: Encoder, x: ir.Value, name: str, shape: tuple[int, int, int], parts: str
) -> list[ir.Value]:
    hidden = b.reshape(norm(b, e, x, f"{name}.layer_norm1"), -1, e.hidden)
    projections = []
    for part in parts:
        y = b.linear(hidden, f"{name}.self_attn.{part}_proj", bias=e.qkv_bias)
        if e.qk_norm and part != "v":
            y = b.dialect.norm(b, y, f"{name}.self_attn.{part}_norm.weight", e.eps)
        projections.append(b.reshape(y, *shape))
    return projections


def norm(b: Builder, e: Encoder, x: ir.Value, name: str) -> ir.Value:
    if e.rms_norm:
        return b.dialect.norm(b, x, f"{name}.weight", e.eps)
    return b.dialect.layer_norm(b, x, name, e.eps)


TOKENS = "clip.text.embeddings.token_embedding.weight"
POSITIONS = "clip.text.embeddings.position_embedding.weight"
LAST_NORM = "clip.text.final_layer_norm"
PROJECTION = "clip.text_projection"
VISION_NORM = "clip.vision.post_layernorm"
VISION_PROJECTION = "clip.visual_projection"


def _encoder(spec: TextTowerSpec) -> TextEncoder:
    return TextEncoder(spec.hidden, spec.intermediate, spec.heads, spec.eps, spec.activation)


def text_tower_tensors(spec: TextTowerSpec, vision_hidden: int) -> Shapes:
    """Canonical names and shapes of the weights of the text tower's graph and of the patches' projection."""
    yield TOKENS, (spec.vocab, spec.hidden)
    yield POSITIONS, (spec.max_tokens, spec.hidden)
    for layer in range(spec.layers):
        yield from block_tensors(_encoder(spec), _block(layer))
    yield from norm_tensors(LAST_NORM, spec.hidden)
    yield from norm_tensors(VISION_NORM, vision_hidden)
    yield f"{PROJECTION}.weight", (spec.width, spec.hidden)
    yield f"{VISION_PROJECTION}.weight", (spec.width, vision_hidden)


def build_text_tower(b: Builder, spec: TextTowerSpec) -> None:
    """Ids [tokens] to the embedding [1, width] float32 of the last one, which has seen all of them."""
    ids = b.input(names.IDS, INT64, ["tokens"])
    tokens = b.cast(b.op("Gather", b.stored(TOKENS), ids), b.dialect.compute)
    positions = b.slice(b.weight(POSITIONS), 0, b.op("Shape", ids), 0)
    x = b.unsqueeze(b.op("Add", tokens, positions), 0)
    for layer in range(spec.layers):
        x, _, _ = build_block(b, _encoder(spec), x, _block(layer), (1, -1, spec.hidden))
    last = b.slice(x, -1, 1 << 30, 1)
    normed = b.reshape(b.dialect.layer_norm(b, last, LAST_NORM, spec.eps), 1, spec.hidden)
    out = b.to_float32(b.linear(normed, PROJECTION, bias=False))
    b.output(out, names.TEXT_EMBEDDING, FLOAT, [1, spec.width])


def project_patches(b: Builder, spec: TextTowerSpec, hidden: ir.Value, width: int, count: int | str) -> None:
    """The tower's chosen hidden states [images, tokens, width] as an output in the text tower's space."""
    normed = b.reshape(b.dialect.layer_norm(b, hidden, VISION_NORM, spec.vision_eps), -1, width)
    out = b.to_float32(b.linear(normed, VISION_PROJECTION, bias=False))
    b.output(out, names.CLIP_PATCHES, FLOAT, [count, spec.width])


def _block(layer: int) -> str:
    return f"clip.text.encoder.layers.{layer}"
