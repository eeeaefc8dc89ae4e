"""GLM-OCR: Qwen2.5-VL's tower with norms of heads and a convolution before its merger, and a decoder of GLM-4."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.checkpoint.families.qwen.qwen2_vl import PROCESSOR, adjust, native_tower, read_qwen
from vtx.exporter.checkpoint.family import Family
from vtx.exporter.checkpoint.fields import number, size
from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.runtime.bundle.safetensors import TensorInfo
from vtx.runtime.errors import CheckpointError
from vtx.runtime.vision.layouts.native import FLOORED, Native
from vtx.tools.model.vision import VisionConfig

NORM_EPS = 1e-5  # of the merger's norm: no setting
FRAMES = 2  # as often as its image processor counts the pixels of an image
PIXELS = {"shortest_edge": 112**2, "longest_edge": 28**2 * 15_000}
NORMS = {  # its layers' norms by the names of Gemma's, which stand at the same places
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
_NORM = re.compile(rf"^(text\.layers\.\d+\.)({'|'.join(NORMS)})\.")
_TURNED = re.compile(r"^text\.layers\.\d+\.self_attn\.[qk]_proj\.")
_FUSED = ".mlp.gate_up_proj."


def _read(config: Mapping[str, Any]) -> ModelConfig:
    model = read_qwen(config, "GlmOcrConfig", _tower)
    assert isinstance(model.layout, Native)
    layout = replace(model.layout, small=FLOORED)
    model = replace(model, layout=layout, video=None, projector_norm_eps=NORM_EPS, projector_rms=False)
    return _adjust(model, {})


def _tower(config: Any, text: TextConfig) -> VisionConfig:
    hidden, ffn, out = (size(config, name) for name in ("hidden_size", "intermediate_size", "out_hidden_size"))
    return replace(
        native_tower(config, "glm_ocr", hidden, ffn, out, text),
        eps=number(vars(config), "rms_norm_eps"),
        rms_norm=True,
        gated=True,
        patch_bias=True,
        qkv_bias=bool(config.attention_bias),
        head_norms=True,
        theta=number(config.rope_parameters, "rope_theta"),
        post_norm=True,
        downsampled=True,
    )


def _adjust(config: ModelConfig, processor: Mapping[str, Any]) -> ModelConfig:
    """Set the image processor's limits of pixels, which hold for `FRAMES` frames of an image."""
    sizes = processor.get("size") or PIXELS
    counts: dict[str, Any] = {name: sizes.get(name) for name in PIXELS} if isinstance(sizes, Mapping) else {}
    if not counts or any(type(count) is not int or count < FRAMES or count % FRAMES for count in counts.values()):
        raise CheckpointError(f"the image processor's size is {sizes!r:.60}; it must have two even numbers of pixels")
    own = {name: value for name, value in processor.items() if name not in ("min_pixels", "max_pixels")}
    return adjust(config, {**own, "size": {name: count // FRAMES for name, count in counts.items()}})


def _arrange(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, TensorInfo]]:
    """The MLP's first matrix in two, and the rows of queries and keys so that halves rotate, not neighbours."""
    text = config.text
    turned = sum(rate > 0 for rate in text.rope.frequencies)
    still = [*range(2 * turned, text.head_dim)]
    half = text.head_dim // 2 - turned
    order = (*range(0, 2 * turned, 2), *still[:half], *range(1, 2 * turned, 2), *still[half:])
    for name, info in tensors.items():
        rows = info.shape[0] if info.shape else 0
        if _FUSED in name and not rows % 2:
            for number, part in enumerate(("gate", "up")):
                shape = (rows // 2, *info.shape[1:])
                offset = info.offset + number * info.nbytes // 2
                yield (
                    name.replace("gate_up", part),
                    replace(info, shape=shape, offset=offset, nbytes=info.nbytes // 2),
                )
        elif _TURNED.match(name) and not rows % text.head_dim:
            yield name, replace(info, order=order)
        else:
            yield _NORM.sub(lambda match: f"{match[1]}{NORMS[match[2]]}.", name), info


FAMILY = Family(
    model_type="glm_ocr",
    architecture="GlmOcrForConditionalGeneration",
    read=_read,
    processors=tuple(replace(PROCESSOR, name=f"Glm{name}ImageProcessor") for name in ("46V", "4v")),
    adjust=_adjust,
    arrange=_arrange,
    reader=True,
)
