"""InternVL-Chat in its authors' layout (1.5, InternVL2, 2.5): InternVL's tiles, and its authors' decoder names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig, check_known, check_values, part_of
from vtx.exporter.checkpoint.families.internvl.internvl import FAMILY as INTERNVL
from vtx.exporter.checkpoint.families.internvl.internvl import PLACEHOLDER
from vtx.exporter.checkpoint.families.llava_llama import DECODER
from vtx.exporter.checkpoint.family import Config, Family, OriginalLayout, WholeLayout
from vtx.exporter.checkpoint.original.known_towers import thirds
from vtx.exporter.checkpoint.original.templates import INTERNVL_SYSTEMS, TEMPLATES
from vtx.runtime.bundle.safetensors import TensorInfo
from vtx.runtime.errors import BundleError, CheckpointError, UnsupportedModelError
from vtx.runtime.vision.layouts.tiles import Tiles

INTERNLM2 = "InternLM2ForCausalLM"
_DECODERS = {INTERNLM2: "llama", "LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}
# Settings whose other values are not supported.
_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "use_thumbnail": (True,),
    "pad2square": (None, False),
    "downsample_ratio": (0.5,),
    "dynamic_image_size": (None, True, False),
    "ps_version": (None, "v1", "v2"),
}
_TEMPLATES = {"internlm2-chat": "internlm2-chat", "Hermes-2": "internlm2-chat", "internvl2_5": "internvl2_5"}
MAX_SYSTEM = 4096  # characters
MEAN = [0.485, 0.456, 0.406]
STD = [0.229, 0.224, 0.225]
_TOWER_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 3200,
    "intermediate_size": 12800,
    "num_hidden_layers": 48,
    "num_attention_heads": 25,
    "patch_size": 14,
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu",
    "num_channels": 3,
}
_LAYER = r"^language_model\.model\.layers\.(\d+)\."
_BLOCK = r"^vision_model\.encoder\.layers\.(\d+)\."


def _read(config: Config) -> ModelConfig:
    check_values(config, "an InternVL-Chat", _SUPPORTED)
    text = part_of(config, "llm_config")
    vision = part_of(config, "vision_config")
    listed = text.get("architectures")
    decoder = str(listed[0]) if isinstance(listed, list) and listed else "unnamed"
    check_known("decoder", decoder, tuple(_DECODERS))
    if decoder == INTERNLM2 and text.get("bias", False) is not False:
        raise UnsupportedModelError("an InternLM2 decoder with biases is not supported; vtx exports those without")
    if vision.get("norm_type", "rms_norm") not in ("rms_norm", "layer_norm"):
        raise UnsupportedModelError(f"norm_type {vision['norm_type']!r:.40} is not supported; vtx supports layer_norm")
    side = config.get("force_image_size") or vision.get("image_size")
    if side != vision.get("image_size", side):
        raise UnsupportedModelError(
            f"force_image_size {side!r:.20} is not the tower's {vision.get('image_size')!r:.20}; vtx does not resize "
            "its positions"
        )
    shaped = {
        "text_config": {
            **{key: text[key] for key in DECODER if text.get(key) is not None},
            "model_type": _DECODERS[decoder],
        },
        "vision_config": {
            **{key: vision.get(key, usual) for key, usual in _TOWER_DEFAULTS.items()},
            "model_type": "internvl_vision",
            "norm_type": "layer_norm",
            "use_qk_norm": False,
            "use_mean_pooling": True,
            "image_size": side,
            "attention_bias": vision.get("qkv_bias", False),
        },
        "vision_feature_layer": config.get("select_layer", -1),
        "image_token_id": config.get("image_token_id", 0),  # from the tokenizer's files
        "tie_word_embeddings": False,  # whatever the file says
    }
    model = INTERNVL.read(shaped)
    tower = replace(
        model.vision,
        rms_norm=vision.get("norm_type", "rms_norm") == "rms_norm",
        qk_norm=vision.get("qk_normalization", True) is True,
        shuffle_by_columns=config.get("ps_version", "v1") == "v1",
    )
    fewest, most = (config.get(f"{name}_dynamic_patch", usual) for name, usual in (("min", 1), ("max", 6)))
    if type(fewest) is not int or type(most) is not int:
        raise CheckpointError(
            f"config.json: min_dynamic_patch is {fewest!r:.20} and max_dynamic_patch {most!r:.20}, not whole numbers"
        )
    if config.get("dynamic_image_size", False) is not True:
        fewest = most = 1
    assert isinstance(model.layout, Tiles)
    try:
        return replace(model, vision=tower, layout=replace(model.layout, fewest=fewest, most=most))
    except BundleError as e:
        raise CheckpointError(f"config.json: min_dynamic_patch and max_dynamic_patch: {e}") from e


def _processor(config: Config, _: Config) -> Config:
    side = config.get("force_image_size") or part_of(config, "vision_config").get("image_size")
    square = {"height": side, "width": side}
    return {"image_processor_type": "GotOcr2ImageProcessor", "size": square, "image_mean": MEAN, "image_std": STD}


def _template(config: Config) -> str:
    name = config.get("template")
    system = config.get("system_message")
    if name not in _TEMPLATES:
        raise UnsupportedModelError(
            f"the template {name!r:.40} is not supported; vtx supports {', '.join(_TEMPLATES)}; give another with "
            "--chat-template FILE"
        )
    template = TEMPLATES[_TEMPLATES[name]]
    if system is None:
        return template
    if not isinstance(system, str) or len(system) > MAX_SYSTEM or {"{", "}"} & set(system):
        raise UnsupportedModelError(f"config.json: system_message {str(system)[:40]!r} is not plain text")
    return template.replace(INTERNVL_SYSTEMS[_TEMPLATES[name]], system)


def _separate(config: Config, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, TensorInfo]]:
    """The tensors with q, k and v separated: InternLM2 stores each key/value head with its queries, queries first."""
    text = part_of(config, "llm_config")
    heads = text.get("num_attention_heads")
    kv_heads = text.get("num_key_value_heads")
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or not 1 <= kv_heads <= heads:
        yield from thirds(tensors)
        return
    group = heads // kv_heads + 2
    for name, info in thirds(tensors):
        stem, found, kind = name.partition(".wqkv.")
        rows = info.shape[0] if info.shape else 0
        if not found or not rows or rows % (kv_heads * group):
            yield name, info
            continue
        head_dim = rows // (kv_heads * group)
        for part, first, count in (("q", 0, group - 2), ("k", group - 2, 1), ("v", group - 1, 1)):
            run = count * head_dim
            row = info.nbytes // rows
            yield (
                f"{stem}.{part}_proj.{kind}",
                replace(
                    info,
                    shape=(kv_heads * run, *info.shape[1:]),
                    offset=info.offset + first * head_dim * row,
                    nbytes=kv_heads * run * row,
                    spread=(run, group * head_dim),
                ),
            )


FAMILY = Family(
    model_type="internvl_chat",
    architecture="InternVLChatModel",
    read=_read,
    processors=INTERNVL.processors,
    tensors=(
        (r"^vision_model\.embeddings\.position_embedding$", "vision.embeddings.position_embedding.weight"),
        (_BLOCK + r"norm([12])\.", r"vision.encoder.layers.\1.layer_norm\2."),
        (_BLOCK + r"ls([12])$", r"vision.encoder.layers.\1.lambda_\2"),
        (_BLOCK + r"attn\.proj\.", r"vision.encoder.layers.\1.self_attn.out_proj."),
        (_BLOCK + r"attn\.", r"vision.encoder.layers.\1.self_attn."),
        (r"^mlp1\.0\.", "projector.norm."),
        (r"^mlp1\.1\.", "projector.linear_1."),
        (r"^mlp1\.3\.", "projector.linear_2."),
        (r"^language_model\.model\.tok_embeddings\.", "text.embed_tokens."),
        (r"^language_model\.output\.", "head."),
        (_LAYER + r"attention_norm\.", r"text.layers.\1.input_layernorm."),
        (_LAYER + r"ffn_norm\.", r"text.layers.\1.post_attention_layernorm."),
        (_LAYER + r"attention\.wqkv\.", r"text.layers.\1.self_attn.wqkv."),
        (_LAYER + r"attention\.wo\.", r"text.layers.\1.self_attn.o_proj."),
        (_LAYER + r"feed_forward\.w1\.", r"text.layers.\1.mlp.gate_proj."),
        (_LAYER + r"feed_forward\.w3\.", r"text.layers.\1.mlp.up_proj."),
        (_LAYER + r"feed_forward\.w2\.", r"text.layers.\1.mlp.down_proj."),
    ),
    original=OriginalLayout(
        processor=_processor,
        template=_template,
        whole=WholeLayout("llm_config", PLACEHOLDER, "<|im_end|>", _separate),
    ),
    boxes=INTERNVL.boxes,
)
