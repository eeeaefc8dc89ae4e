"""PaliGemma and PaliGemma 2: a SigLIP tower, one matrix as projector, and a Gemma or Gemma 2 decoder.

The prompt sees itself both ways. Gemma 2's windows are no shorter than the context that vtx gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vtx.exporter.checkpoint.config import (
    VISION_FAMILIES,
    ModelConfig,
    check_values,
    image_token_of,
    parse_parts,
    tower_of,
)
from vtx.exporter.checkpoint.family import SIGLIP, Family
from vtx.exporter.checkpoint.text_config import TEXT_FAMILIES, text_config_of
from vtx.runtime.bundle.spec.text_settings import BoxForm
from vtx.runtime.errors import CheckpointError
from vtx.runtime.vision.layouts.single import Single

# The prompt of transformers' processor: images, the token that begins a text, the text, a newline.
PROMPT = (
    "{%- if messages | length != 1 or messages[0]['role'] != 'user' -%}"
    "{{ raise_exception('this model takes one question, without a system prompt and earlier turns') }}"
    "{%- endif -%}"
    "{%- for part in messages[0]['content'] if part['type'] == 'image' -%}<image>{%- endfor -%}"
    "{{- bos_token -}}"
    "{%- for part in messages[0]['content'] if part['type'] == 'text' -%}{{- part['text'] -}}{%- endfor -%}"
    "{{- '\\n' -}}"
)


def _read(config: Mapping[str, Any]) -> ModelConfig:
    parsed = parse_parts("PaliGemmaConfig", config, (*TEXT_FAMILIES, "gemma2"), ("siglip_vision_model",))
    text = text_config_of(parsed)
    return paligemma_config(parsed, image_token_of(parsed, text))


def paligemma_config(parsed: Any, image_token: int) -> ModelConfig:
    """The configuration of a parsed PaliGemmaConfig, whose images are tokens of that id in a prompt."""
    text, vision = text_config_of(parsed), parsed.vision_config
    check_values(
        {"use_bidirectional_attention": parsed.text_config.use_bidirectional_attention},
        "a PaliGemma",
        {"use_bidirectional_attention": (True,)},
    )
    if parsed.projection_dim != text.hidden:
        raise CheckpointError(
            f"config.json: projection_dim is {parsed.projection_dim!r:.40}, the decoder's hidden_size {text.hidden}; "
            "correct config.json"
        )
    tower = replace(tower_of(vision, VISION_FAMILIES[vision.model_type]), post_norm=True)
    return ModelConfig(
        text=replace(text, two_way="prompt"),
        vision=tower,
        feature_layers=(tower.layers,),
        select="full",
        projector_activation="linear",
        projector_bias=True,
        image_token_id=image_token,
        layout=Single(tower.states),
        projector_layers=1,
    )


FAMILY = Family(
    model_type="paligemma",
    architecture="PaliGemmaForConditionalGeneration",
    read=_read,
    processors=(SIGLIP,),
    tensors=((r"^(model\.)?multi_modal_projector\.linear\.", "projector.linear_1."),),
    prompt=PROMPT,
    boxes=BoxForm("<loc#><loc#><loc#><loc#>", "after", 1024, rows_first=True),
)
