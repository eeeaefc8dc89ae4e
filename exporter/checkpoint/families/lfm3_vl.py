"""LFM3-VL: convolutions, windows and full attention in turn in the decoder, convolutions and attention in the tower."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig, VideoConfig, check_known, image_token_of, parse_parts
from vtx.exporter.checkpoint.families.qwen.qwen2_vl import (
    FEWEST,
    MOST,
    PROCESSOR,
    adjust,
    adjust_video,
    largest_side,
    pairs_of,
)
from vtx.exporter.checkpoint.families.qwen.qwen3_vl import VIDEO_PROCESSOR, frames_in_time
from vtx.exporter.checkpoint.family import Family
from vtx.exporter.checkpoint.fields import number, size
from vtx.exporter.checkpoint.text_config import (
    ATTENTION_KINDS,
    STATE_KINDS,
    TextConfig,
    convolved_layers,
    head_size,
    windowed_config_of,
)
from vtx.runtime.bundle.safetensors import TensorInfo
from vtx.runtime.bundle.spec.model_spec import MAX_LAYERS
from vtx.runtime.errors import CheckpointError, UnsupportedModelError
from vtx.runtime.vision.layouts.native import Native
from vtx.tools.model.towers.native import FIRST_NORM, MOMENTS, PATCHES
from vtx.tools.model.vision import VisionConfig

NORM_EPS = 1e-6  # of the projector's norm: no setting
KERNELS = 7  # the largest side of the tower's convolutions
# A block's parts by the names of Qwen-VL's; its MLP has LFM2's.
_BLOCK = r"^model\.vision_tower\.layers\.(\d+)\."
_TOWER = (
    (_BLOCK + r"operator_norm\.", r"vision.blocks.\1.norm1."),
    (_BLOCK + r"ffn_norm\.", r"vision.blocks.\1.norm2."),
    (_BLOCK + r"self_attn\.out_proj\.", r"vision.blocks.\1.attn.proj."),
    (_BLOCK + r"self_attn\.([qk])_layernorm\.", r"vision.blocks.\1.attn.\2_norm."),
    (_BLOCK + r"self_attn\.", r"vision.blocks.\1.attn."),
    (_BLOCK + r"conv\.", r"vision.blocks.\1.conv."),
    (_BLOCK + r"feed_forward\.w1\.", r"vision.blocks.\1.mlp.gate_proj."),
    (_BLOCK + r"feed_forward\.w2\.", r"vision.blocks.\1.mlp.down_proj."),
    (_BLOCK + r"feed_forward\.w3\.", r"vision.blocks.\1.mlp.up_proj."),
    (r"^model\.vision_tower\.(?:patchifier|patch_embed)\.", "vision.patch_embed.proj."),
    (r"^model\.vision_tower\.embedding_norm\.", f"{FIRST_NORM}."),
)
_TEXT = r"^model\.language_model\.(layers\.\d+)\."
_DECODER = (
    (_TEXT + r"post_operator_norm\.", r"text.\1.post_operator_norm."),
    (_TEXT + r"post_ffn_norm\.", r"text.\1.post_feedforward_layernorm."),
    (_TEXT + r"self_attn\.(?:gate_proj|g_proj)\.", r"text.\1.self_attn.g_proj."),
)
_PROJECTOR = {"projector.norm.": "vision.merger.ln_q.", "projector.linear_1.": "vision.merger.mlp.0."}
_PROJECTOR["projector.linear_2."] = "vision.merger.mlp.2."


def _read(config: Mapping[str, Any]) -> ModelConfig:
    parsed = parse_parts("Lfm3VlConfig", config, ("lfm3",), ("lfm3_vl_vision",))
    text = _text(parsed)
    tower = _tower(parsed.vision_config)
    frames = replace(frames_in_time(pairs_of(tower), None), flat=True)
    return ModelConfig(
        text=text,
        vision=tower,
        feature_layers=(tower.layers,),
        select="full",
        projector_activation=parsed.projector_hidden_act,
        projector_bias=bool(parsed.projector_bias),
        image_token_id=image_token_of(parsed, text),
        layout=Native(tower.patch, tower.shuffle, FEWEST, MOST, flat=True),
        projector_norm_eps=NORM_EPS,
        projector_hidden=size(parsed, "projector_hidden_size"),
        video=VideoConfig(image_token_of(parsed, text, "video"), frames, "full"),
    )


def _text(parsed: Any) -> TextConfig:
    config = parsed.text_config
    width = head_size(config, size(config, "hidden_size") // size(config, "num_attention_heads"))
    for kind in config.layer_types:
        check_known("kind of layers", str(kind), (STATE_KINDS["lfm3"], *sorted(ATTENTION_KINDS)))
    convolutions = convolved_layers(config, "lfm3", size(config, "num_hidden_layers", MAX_LAYERS), "conv_L_cache")
    sliding = tuple(n for n, kind in enumerate(config.layer_types, 1) if kind == "sliding_attention")
    biased = bool(config.attention_bias)
    return windowed_config_of(
        parsed,
        "lfm3",
        (width, width),
        sliding,
        vocab=size(config, "vocab_size", 1 << 22),
        eps=number(vars(config), "norm_eps"),
        activation="silu",
        qkv_bias=biased,
        o_bias=biased,
        post_norms=bool(config.use_sandwich_norm),
        head_gates=bool(config.use_attention_gate),
        conv_bias=bool(config.conv_bias),
        **convolutions,
    )


def _tower(config: Any) -> VisionConfig:
    layers = size(config, "num_hidden_layers", MAX_LAYERS)
    hidden, heads, kv_heads = (
        size(config, name) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    kernel = size(config, "conv_kernel_size", KERNELS)
    kinds = [*map(str, config.layer_types)]
    if hidden % heads or hidden // heads % 4 or heads % kv_heads or kernel % 2 == 0 or len(kinds) != layers:
        raise CheckpointError(
            f"config.json: a tower of hidden size {hidden} with {heads} heads, {kv_heads} key/value heads, "
            f"convolutions of {kernel} and {len(kinds)} of {layers} layer_types does not fit together; correct it"
        )
    for kind in kinds:
        check_known("kind of the tower's layers", kind, ("conv", "full_attention"))
    stated = {"temporal_patch_size": MOMENTS, "in_channels": 3}
    for name, value in stated.items():
        if getattr(config, name) != value:
            raise UnsupportedModelError(f"{name} {getattr(config, name)!r:.40} is not supported; vtx supports {value}")
    patch = size(config, "patch_size", 1 << 10)
    merge = size(config, "spatial_merge_size", 64)
    return VisionConfig(
        family="lfm3_vl",
        layers=layers,
        hidden=hidden,
        ffn=size(config, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        image=largest_side(MOST, patch * merge),
        patch=patch,
        eps=number(vars(config), "norm_eps"),
        activation="silu",
        shuffle=merge,
        native=True,
        gated=True,
        rms_norm=True,
        qkv_bias=False,
        head_norms=True,
        first_norm=True,
        theta=number(config.rope_parameters, "rope_theta"),
        convolved=tuple(n for n, kind in enumerate(kinds) if kind == "conv"),
        conv_kernel=kernel,
    )


def _arrange(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, TensorInfo]]:
    """Patches' matrix as a kernel, the projector as a merger, and norms behind attention and MLP in Gemma's names."""
    v = config.vision
    pixels = (3, MOMENTS, v.patch, v.patch)
    for name, info in tensors.items():
        if name == PATCHES and info.shape == (v.hidden, 3 * MOMENTS * v.patch**2):
            yield name, replace(info, shape=(v.hidden, *pixels))
        elif config.text.post_norms and name.startswith("text.layers."):
            renamed = name.replace(".post_attention_layernorm.", ".pre_feedforward_layernorm.")
            yield renamed.replace(".post_operator_norm.", ".post_attention_layernorm."), info
        else:
            part = next((part for part in _PROJECTOR if name.startswith(part)), "")
            yield _PROJECTOR.get(part, "") + name.removeprefix(part), info


FAMILY = Family(
    model_type="lfm3_vl",
    architecture="Lfm3VlForConditionalGeneration",
    read=_read,
    processors=(PROCESSOR,),
    tensors=(*_TOWER, *_DECODER),
    adjust=adjust,
    arrange=_arrange,
    video_processor=VIDEO_PROCESSOR,
    adjust_video=adjust_video,
)
