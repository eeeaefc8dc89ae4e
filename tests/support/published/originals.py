"""Checkpoints in their authors' layout: the weights of transformers' counterpart, and where they lie."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.families import internvl_chat, original, vila
from tests.support.families.openvla import TinyOpenVLA, weights_of
from tests.support.published.places import read
from tests.support.published.sizes import VISION
from tests.support.tiny import write_json
from vtx.exporter.checkpoint.families import openvla

if TYPE_CHECKING:
    import torch

OPENVLA = TinyOpenVLA(layers=4, image=224)
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": VISION, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 2, "image_size": 336, "patch_size": 14, "projection_dim": 64,
}  # fmt: skip
CLIP_PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 336}, "do_resize": True, "resample": 3,
    "do_center_crop": True, "crop_size": {"height": 336, "width": 336}, "do_rescale": True, "do_normalize": True,
    "rescale_factor": 1 / 255, "do_convert_rgb": True, "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip
SIGLIP_PROCESSOR = {
    "image_processor_type": "SiglipImageProcessor", "size": {"height": 384, "width": 384}, "do_resize": True,
    "resample": 3, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255, "do_convert_rgb": True,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
Config = dict[str, Any]
Weights = dict[str, "torch.Tensor"]


def layout_of(config: Config) -> str | None:
    """The authors' layout by its name, or None for transformers' own."""
    names = {
        "LlavaLlamaForCausalLM": "llava_llama", "LlavaLlamaModel": "vila", "InternVLChatModel": "internvl_chat",
        "OpenVLAForActionPrediction": "openvla",
    }  # fmt: skip
    return names.get(config["architectures"][0])


def counterpart(config: Config) -> Config:
    """Transformers' configuration of the same weights; that of OpenVLA is stated in tests/support/families."""
    if layout_of(config) == "internvl_chat":
        tower = config["vision_config"] | {"model_type": "internvl_vision", "attention_bias": True}
        text = {key: value for key, value in config["llm_config"].items() if key != "auto_map"}
        return {
            "model_type": "internvl", "text_config": text | {"model_type": "llama"}, "vision_config": tower,
            "downsample_ratio": config["downsample_ratio"], "image_token_id": 92546, "tie_word_embeddings": False,
        }  # fmt: skip
    if layout_of(config) == "vila":
        towers = {"text_config": config["llm_cfg"], "vision_config": config["vision_tower_cfg"]}
        return {
            "model_type": "llava",
            **towers,
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "full",
            "tie_word_embeddings": False,
        }
    text = {key: value for key, value in config.items() if not key.startswith("mm_") and key != "architectures"}
    return {
        "model_type": "llava", "text_config": text | {"model_type": "llama"}, "vision_config": CLIP,
        "vision_feature_layer": config["mm_vision_select_layer"], "image_token_index": 0,
    }  # fmt: skip


def openvla_weights(config: Config, seed: int) -> Weights:
    """Those of a `TinyOpenVLA` with the published names."""
    import torch

    assert config["text_config"]["hidden_size"] == OPENVLA.hidden
    return {name: tensor.to(torch.bfloat16) for name, tensor in weights_of(OPENVLA, seed).items()}


def with_small_towers() -> pytest.MonkeyPatch:
    """The sizes of OPENVLA's towers in place of timm's, whose names the configuration states."""
    patch = pytest.MonkeyPatch()
    for name, tower in zip([*openvla.TOWERS], OPENVLA.towers.values(), strict=True):
        patch.setitem(openvla.TOWERS, name, tower)
    return patch


def renamed(config: Config, weights: Weights) -> Weights:
    """The tensors that lie at the top of the folder, by their published names."""
    if layout_of(config) == "internvl_chat":
        return dict(internvl_chat.renamed(weights, "llama", config["llm_config"]["num_key_value_heads"]))
    return {original.hub_name(name): tensor for name, tensor in weights.items() if "vision_tower." not in name}


def write_llava(folder: Path, config: Config, weights: Weights) -> None:
    """The tower of original LLaVA, in a folder of the name that the configuration states."""
    original.write_tower(folder / Path(config["mm_vision_tower"]).name, CLIP, CLIP_PROCESSOR, weights)
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "legacy": True})


def write_vila(folder: Path, config: Config, weights: Weights, seed: int) -> None:
    """VILA's folders; its decoder has the tokenizer."""
    from safetensors.torch import save_file

    original.write_tower(folder / "vision_tower", config["vision_tower_cfg"], SIGLIP_PROCESSOR, weights)
    write_json(folder / "llm" / "config.json", config["llm_cfg"])
    write_json(folder / "llm" / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "legacy": False})
    text = {
        original.hub_name(name): tensor
        for name, tensor in weights.items()
        if "vision" not in name and "modal" not in name
    }
    save_file(text, folder / "llm" / "model.safetensors", metadata={"format": "pt"})
    dtype = next(iter(text.values())).dtype
    vila.write_projector(folder / "mm_projector", VISION, config["hidden_size"], seed, dtype)
    write_json(folder / "mm_projector" / "config.json", config["mm_projector_cfg"])


def has_folders(folder: Path) -> bool:
    """Whether a checkpoint's parts lie in folders, as VILA's."""
    return layout_of(read(folder / "config.json")) == "vila"
