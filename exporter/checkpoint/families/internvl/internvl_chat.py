"""InternVL-Chat in its authors' layout (1.5, InternVL2, 2.5): InternVL's tiles, and a decoder as its authors name it.

The code in such checkpoints is never run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig, check_known
from vtx.exporter.checkpoint.families.internvl.internvl import FAMILY as INTERNVL
from vtx.exporter.checkpoint.families.internvl.internvl import PLACEHOLDER
from vtx.exporter.checkpoint.families.llava_llama import DECODER
from vtx.exporter.checkpoint.family.declaration import Family
from vtx.exporter.checkpoint.original.known_towers import thirds
from vtx.exporter.checkpoint.original.parts import Config, OriginalLayout, WholeLayout
from vtx.exporter.checkpoint.original.templates import INTERNVL_SYSTEMS, TEMPLATES
from vtx.runtime.bundle.safetensors import TensorInfo
from vtx.runtime.errors import BundleError, CheckpointError, UnsupportedModelError
from vtx.runtime.vision.layouts.tiles import Tiles

INTERNLM2 = "InternLM2ForCausalLM"
_DECODERS = {INTERNLM2: "llama", "LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}
# What the released code would do otherwise than this file, and the only values that are built.
_BUILT: Mapping[str, tuple[Any, ...]] = {
    "use_thumbnail": (True,),
    "pad2square": (None, False),
    "downsample_ratio": (0.5,),
    "dynamic_image_size": (None, True, False),
    "ps_version": (None, "v1", "v2"),
}
_TEMPLATES = {"internlm2-chat": "internlm2-chat", "Hermes-2": "internlm2-chat", "internvl2_5": "internvl2_5"}
MAX_SYSTEM = 4096  # characters
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
_LAYER = r"^language_model\.model\.layers\.(\d+)\."
_BLOCK = r"^vision_model\.encoder\.layers\.(\d+)\."


def _read(config: Config) -> ModelConfig:
    for name, known in _BUILT.items():
        if config.get(name) not in known:
            listed = ", ".join(str(value) for value in known if value is not None)
            raise UnsupportedModelError(
                f"{name} {config.get(name)!r:.40} is not supported in an InternVL-Chat model; vtx knows {listed}"
            )
    text, vision = _part(config, "llm_config"), _part(config, "vision_config")
    side = config.get("force_image_size") or vision.get("image_size")
    if side != vision.get("image_size", side):
        raise UnsupportedModelError(
            f"force_image_size {side!r:.20} is not the tower's {vision.get('image_size')!r:.20}; vtx does not resize "
            "its positions"
        )
    shaped = {
        "text_config": _text(text),
        "vision_config": _vision(vision, side),
        "vision_feature_layer": config.get("select_layer", -1),
        "image_token_id": config.get("image_token_id", 0),  # the tokenizer's files say it
        "tie_word_embeddings": False,  # whatever the file says
    }
    model = INTERNVL.read(shaped)
    tower = replace(
        model.vision,
        rms_norm=vision.get("norm_type", "rms_norm") == "rms_norm",
        qk_norm=vision.get("qk_normalization", True) is True,
        shuffle_by_columns=config.get("ps_version", "v1") == "v1",
    )
    return replace(model, vision=tower, layout=_layout(config, model))


def _part(config: Config, name: str) -> Config:
    part = config.get(name)
    if not isinstance(part, Mapping):
        raise CheckpointError(f"config.json: {name} is {part!r:.40}, not the settings of a part; download it again")
    return part


def _text(config: Config) -> dict[str, Any]:
    """The decoder's configuration as transformers names it."""
    listed = config.get("architectures")
    name = str(listed[0]) if isinstance(listed, list) and listed else "unnamed"
    check_known("decoder", name, tuple(_DECODERS))
    if name == INTERNLM2 and config.get("bias", False) is not False:
        raise UnsupportedModelError("an InternLM2 decoder with biases is not supported; vtx exports those without")
    found = {key: config[key] for key in DECODER if config.get(key) is not None}
    return {**found, "model_type": _DECODERS[name]}


def _vision(config: Config, side: Any) -> dict[str, Any]:
    """The tower's configuration as transformers names it, with InternViT's own defaults."""
    usual = {
        "hidden_size": 3200, "intermediate_size": 12800, "num_hidden_layers": 48, "num_attention_heads": 25,
        "patch_size": 14, "layer_norm_eps": 1e-6, "hidden_act": "gelu", "num_channels": 3,
    }  # fmt: skip
    if config.get("norm_type", "rms_norm") not in ("rms_norm", "layer_norm"):
        raise UnsupportedModelError(f"norm_type {config['norm_type']!r:.40} is not supported; vtx knows layer_norm")
    sizes = {key: config.get(key, value) for key, value in usual.items()}
    own = {"model_type": "internvl_vision", "norm_type": "layer_norm", "use_qk_norm": False, "use_mean_pooling": True}
    return {**sizes, **own, "image_size": side, "attention_bias": config.get("qkv_bias", False)}


def _layout(config: Config, model: ModelConfig) -> Tiles:
    assert isinstance(model.layout, Tiles)
    dynamic = config.get("dynamic_image_size", False) is True
    fewest, most = (config.get(f"{name}_dynamic_patch", usual) for name, usual in (("min", 1), ("max", 6)))
    if type(fewest) is not int or type(most) is not int:
        raise CheckpointError(
            f"config.json: min_dynamic_patch is {fewest!r:.20} and max_dynamic_patch {most!r:.20}, not whole numbers"
        )
    try:
        return replace(model.layout, fewest=fewest, most=most) if dynamic else replace(model.layout, fewest=1, most=1)
    except BundleError as e:
        raise CheckpointError(f"config.json: min_dynamic_patch and max_dynamic_patch: {e}") from e


def _processor(config: Config, _: Config) -> Config:
    side = config.get("force_image_size") or _part(config, "vision_config").get("image_size")
    square = {"height": side, "width": side}
    return {"image_processor_type": "GotOcr2ImageProcessor", "size": square, "image_mean": MEAN, "image_std": STD}


def _template(config: Config) -> str:
    name, system = config.get("template"), config.get("system_message")
    if name not in _TEMPLATES:
        raise UnsupportedModelError(
            f"the template {name!r:.40} is not supported; vtx knows {', '.join(_TEMPLATES)}; give another with "
            "--chat-template FILE"
        )
    template = TEMPLATES[_TEMPLATES[name]]
    if system is None:
        return template
    if not isinstance(system, str) or len(system) > MAX_SYSTEM or {"{", "}"} & set(system):
        raise UnsupportedModelError(f"config.json: system_message {str(system)[:40]!r} is not plain text")
    return template.replace(INTERNVL_SYSTEMS[_TEMPLATES[name]], system)


def _apart(config: Config, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, TensorInfo]]:
    """The tensors, with q, k and v each on its own: InternLM2 has them by key/value head, its queries first."""
    text = _part(config, "llm_config")
    heads, kv_heads = (text.get(f"num_{name}_heads") for name in ("attention", "key_value"))
    for name, info in thirds(tensors):
        stem, found, kind = name.partition(".wqkv.")
        if not found or not isinstance(heads, int) or not isinstance(kv_heads, int) or not 1 <= kv_heads <= heads:
            yield name, info
            continue
        group, rows = heads // kv_heads + 2, info.shape[0] if info.shape else 0
        head_dim = rows // (kv_heads * group)
        if not head_dim or rows % (kv_heads * group):
            yield name, info
            continue
        for part, first, count in (("q", 0, group - 2), ("k", group - 2, 1), ("v", group - 1, 1)):
            taken, row = count * head_dim, info.nbytes // rows
            yield f"{stem}.{part}_proj.{kind}", replace(
                info, shape=(kv_heads * taken, *info.shape[1:]), offset=info.offset + first * head_dim * row,
                nbytes=kv_heads * taken * row, spread=(taken, group * head_dim),
            )  # fmt: skip


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
        whole=WholeLayout("llm_config", PLACEHOLDER, "<|im_end|>", _apart),
    ),
)
