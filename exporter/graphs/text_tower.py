"""CLIP's text tower, and the projection of patches into its space, node by node."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from vtx.exporter.graphs.builder import FLOAT, Builder
from vtx.exporter.graphs.encoder import TextEncoder, block_tensors, build_block
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.model_spec import TextTowerSpec

TOKENS, POSITIONS = "clip.text.embeddings.token_embedding.weight", "clip.text.embeddings.position_embedding.weight"
LAST_NORM, PROJECTION = "clip.text.final_layer_norm", "clip.text_projection"
VISION_NORM, VISION_PROJECTION = "clip.vision.post_layernorm", "clip.visual_projection"


def _encoder(spec: TextTowerSpec) -> TextEncoder:
    return TextEncoder(spec.hidden, spec.intermediate, spec.heads, spec.eps, spec.activation)


def text_tower_tensors(spec: TextTowerSpec, vision_hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Canonical names and shapes of the weights of the text tower's graph and of the patches' projection."""
    yield TOKENS, (spec.vocab, spec.hidden)
    yield POSITIONS, (spec.max_tokens, spec.hidden)
    for layer in range(spec.layers):
        yield from block_tensors(_encoder(spec), _block(layer))
    for norm, width in ((LAST_NORM, spec.hidden), (VISION_NORM, vision_hidden)):
        yield f"{norm}.weight", (width,)
        yield f"{norm}.bias", (width,)
    yield f"{PROJECTION}.weight", (spec.width, spec.hidden)
    yield f"{VISION_PROJECTION}.weight", (spec.width, vision_hidden)


def build_text_tower(b: Builder, spec: TextTowerSpec) -> None:
    """Ids [tokens] to the embedding [1, width] float32 of the last one, which has seen all of them."""
    ids = b.input(names.IDS, ir.DataType.INT64, ["tokens"])
    tokens = b.op("Cast", b.op("Gather", b.stored(TOKENS), ids), to=b.dialect.compute.value)
    positions = b.op("Slice", b.weight(POSITIONS), b.constant([0]), b.op("Shape", ids), b.constant([0]))
    x = b.op("Unsqueeze", b.op("Add", tokens, positions), b.constant([0]))
    for layer in range(spec.layers):
        x, _, _ = build_block(b, _encoder(spec), x, _block(layer), (1, -1, spec.hidden), causal=True)
    last = b.op("Slice", x, b.constant([-1]), b.constant([1 << 30]), b.constant([1]))
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
