"""The shared parts of LeRobot's pi0 and pi0.5: PaliGemma of fixed sizes, and an expert of one of two."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig, check_values, parse
from vtx.exporter.checkpoint.families.lerobot.policy import action_spec, processor, square
from vtx.exporter.checkpoint.families.paligemma import paligemma_config
from vtx.exporter.checkpoint.families.pi0 import EXPERT_NORMS
from vtx.exporter.checkpoint.family import Config, OriginalLayout
from vtx.exporter.checkpoint.fields import size
from vtx.exporter.checkpoint.text_config import text_config_of
from vtx.runtime.errors import CheckpointError

SIDES = [224, 224]  # of a picture by default
VOCAB = 257_152  # of PaliGemma; the image token follows
BASE = "google/paligemma-3b-pt-224"  # whose tokenizer LeRobot names
DECODERS: dict[str, dict[str, int]] = {
    "gemma_300m": {
        "hidden_size": 1024, "num_hidden_layers": 18, "intermediate_size": 4096, "num_attention_heads": 8,
        "num_key_value_heads": 1, "head_dim": 256,
    },
    "gemma_2b": {
        "hidden_size": 2048, "num_hidden_layers": 18, "intermediate_size": 16_384, "num_attention_heads": 8,
        "num_key_value_heads": 1, "head_dim": 256,
    },
}  # fmt: skip
TOWER: dict[str, Any] = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
    "num_attention_heads": 16, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip


def read_pi(config: Config, state_in: str, **flags: Any) -> ModelConfig:
    """The configuration of a pi0 or pi0.5; `flags` are fields of the expert's ActionSpec."""
    known = {name: tuple(DECODERS) for name in ("paligemma_variant", "action_expert_variant")}
    check_values(config, "a pi0 or pi0.5", known)
    sides = config.get("image_resolution", SIDES)
    if not isinstance(sides, list) or len(sides) != 2 or sides[0] != sides[1]:
        raise CheckpointError(f"config.json: image_resolution is {sides!r:.60}, not one size twice; correct it")
    vlm = DECODERS[config["paligemma_variant"]]
    settings = {
        "image_token_id": VOCAB,
        "projection_dim": vlm["hidden_size"],
        "text_config": {"model_type": "gemma", "vocab_size": VOCAB, **vlm},
        "vision_config": {**TOWER, "image_size": sides[0], "projection_dim": vlm["hidden_size"]},
    }
    model = paligemma_config(parse("PaliGemmaConfig", settings), VOCAB)
    expert = parse("GemmaConfig", {"vocab_size": VOCAB, **DECODERS[config["action_expert_variant"]]})
    decoder = text_config_of(SimpleNamespace(text_config=expert, tie_word_embeddings=True))
    policy = SimpleNamespace(**{"num_inference_steps": 10, **config})
    action = action_spec(
        config,
        decoder,
        state_in=state_in,
        steps=size(policy, "num_inference_steps"),
        **flags,
    )
    text = replace(model.text, tied=True, shifts=(*model.text.shifts, (EXPERT_NORMS, 1.0)))
    return replace(model, text=text, action=action)


def layout(template: str) -> OriginalLayout:
    """The layout of a checkpoint whose prompts are those of a template."""
    return OriginalLayout(
        processor=lambda config, _: square(config.get("image_resolution", SIDES)),
        template=lambda _: template,
        base=lambda _: BASE,
    )


PICTURES = processor("PI0ImageProcessor", "centred")
