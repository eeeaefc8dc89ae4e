"""A published configuration with fewer layers and smaller widths; every other key as published."""

from __future__ import annotations

import copy
from typing import Any

TEXTS = "text_config", "llm_config", "llm_cfg"
TOWERS = "vision_config", "vision_tower_cfg"
HIDDEN, VISION = 64, 32
WIDE = ("qwen2_vl", "qwen2_5_vl")  # whose sections of rotation state heads of 128, which no key narrows
LAYERS = {"gemma3_text": 7, "gemma4_text": 10, "lfm2": 6, "qwen3_5_text": 8}  # every kind of layer, twice if need be
Config = dict[str, Any]


def part(config: Config, names: tuple[str, ...]) -> Config:
    """The nested configuration under the first of `names`; the configuration itself where it is flat."""
    return next((config[name] for name in names if name in config), config)


def shrunk(published: Config) -> Config:
    """The configuration of the small checkpoint."""
    config = copy.deepcopy(published)
    text = part(config, TEXTS)
    _shrink_text(text)
    for name in TOWERS:
        if name in config:
            _shrink_tower(config[name], config, text["hidden_size"])
    narrowed = {"hidden_size": text["hidden_size"], "projection_dim": HIDDEN, "projector_hidden_size": HIDDEN}
    narrowed |= {"mm_hidden_size": VISION, "num_hidden_layers": text["num_hidden_layers"]}
    config |= {key: value for key, value in narrowed.items() if key in config}
    if config.get("audio_config"):
        config["audio_config"] = None
    return config


def _shrink_text(text: Config) -> None:
    kind = text["model_type"]
    wide = kind in WIDE
    hidden, heads = (256, 2) if wide else (HIDDEN, 4)
    layers = LAYERS.get(kind, 4)
    shared = text.get("num_key_value_heads", 0)
    if kind == "gemma3_text" or 1 < shared < text.get("num_attention_heads", 32):
        text["num_key_value_heads"] = heads // 2
    elif shared > 1:
        text["num_key_value_heads"] = heads
    text |= {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    text["intermediate_size"] = 256 if wide else 96
    narrowed = {
        "num_heads": heads, "block_dim": HIDDEN, "conv_dim": HIDDEN, "conv_dim_out": HIDDEN, "block_ff_dim": 96,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 4,
    }  # fmt: skip
    text |= {key: value for key, value in narrowed.items() if text.get(key)}
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:layers]


def _shrink_tower(tower: Config, config: Config, hidden: int) -> None:
    kind = config["model_type"]
    if kind.startswith("qwen"):
        narrow = {"hidden_size": VISION, "intermediate_size": 48, "out_hidden_size": hidden}
        if kind == "qwen2_vl":
            narrow = {"embed_dim": VISION, "hidden_size": hidden}
        if "fullatt_block_indexes" in tower:
            tower["fullatt_block_indexes"] = tower["fullatt_block_indexes"][:1]
        last = [*tower.get("deepstack_visual_indexes", ()), *tower.get("fullatt_block_indexes", ()), 1]
        tower |= narrow | {"depth": max(last) + 1, "num_heads": 2}
        return
    features = config.get("vision_feature_layer", -1)
    deepest = -min(features) if isinstance(features, list) else 0
    layers = max(3, deepest + 1, config.get("insert_layer_id", 0) + 2)
    tower |= {
        "hidden_size": VISION, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 2,
    }  # fmt: skip
    if "head_dim" in tower:
        tower["hidden_size"] = 2 * tower["head_dim"]
    narrowed = {"num_key_value_heads": 2, "projection_dim": HIDDEN}
    tower |= {key: value for key, value in narrowed.items() if key in tower}
