"""Gemma 3: a SigLIP tower whose states are averaged to 256 tokens, which see each other both ways in the decoder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from vtx.exporter.checkpoint.config import (
    VISION_FAMILIES,
    ModelConfig,
    check_values,
    image_token_of,
    parse_parts,
    part_of,
    tower_of,
)
from vtx.exporter.checkpoint.families.gemma.gemma4 import sliding_layers
from vtx.exporter.checkpoint.family import SIGLIP_DEFAULTS, Family, ImageProcessor
from vtx.exporter.checkpoint.fields import number, size
from vtx.exporter.checkpoint.text_config import GEMMA_NORMS, TextConfig, head_size, windowed_config_of
from vtx.runtime.bundle.spec.model_spec import MAX_LAYERS
from vtx.runtime.errors import BundleError, CheckpointError, UnsupportedModelError
from vtx.runtime.vision.layouts.crops import Crops
from vtx.runtime.vision.layouts.single import Single

PROCESSOR = ImageProcessor("Gemma3ImageProcessor", {**SIGLIP_DEFAULTS, "resample": 2})
IMAGE = "<image_soft_token>"
BEGIN = "<start_of_image>"
END = "<end_of_image>"
CROPS = {
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
MATRIX = "projector.linear_1.weight"


def _read(config: Mapping[str, Any]) -> ModelConfig:
    known = {"attention_bias": (None, False), "use_bidirectional_attention": (None, False)}
    check_values(part_of(config, "text_config"), "a Gemma 3", known)
    parsed = parse_parts("Gemma3Config", config, towers=("siglip_vision_model",))
    text = _text(parsed)
    tower = tower_of(parsed.vision_config, VISION_FAMILIES["siglip_vision_model"])
    tokens = size(parsed, "mm_tokens_per_image")
    side = isqrt(tokens)
    if side**2 != tokens or tower.grid % side:
        raise CheckpointError(
            f"config.json: mm_tokens_per_image is {tokens!r:.40}, and a tower of {tower.grid} x {tower.grid} patches "
            "averages squares of them to a square of tokens; correct config.json"
        )
    if text.sliding is not None and text.sliding.window < tokens:
        raise UnsupportedModelError(
            f"sliding_window is {text.sliding.window}, and an image has {tokens} tokens, which see each other; vtx "
            "exports models whose window holds an image"
        )
    vision = replace(tower, post_norm=True, pool=tower.grid // side)
    return ModelConfig(
        text=text,
        vision=vision,
        feature_layers=(vision.layers,),
        select="full",
        projector_activation="linear",
        projector_bias=False,
        projector_layers=1,
        projector_norm_eps=vision.eps,
        projector_rms=True,
        image_token_id=image_token_of(parsed, text),
        layout=Single(tokens),
    )


def _text(parsed: Any) -> TextConfig:
    config = parsed.text_config
    width = head_size(config)
    return windowed_config_of(
        parsed,
        "gemma3",
        (width, width),
        sliding_layers(config, size(config, "num_hidden_layers", MAX_LAYERS)),
        vocab=size(config, "vocab_size"),
        eps=number(vars(config), "rms_norm_eps"),
        activation=str(config.hidden_activation),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        post_norms=True,
        scaled_embedding=True,
        two_way="images",
        shifts=((GEMMA_NORMS, 1.0), (r"^projector\.norm\.weight$", 1.0)),
        attention_scale=number(vars(config), "query_pre_attn_scalar") ** -0.5,
    )


def _adjust(config: ModelConfig, processor: Mapping[str, Any]) -> ModelConfig:
    """Crops of images, if the image processor's file asks for them; published ones do not."""
    if not processor.get("do_pan_and_scan"):
        return config
    given: list[Any] = [processor.get(name) or default for name, default in CROPS.items()]
    side, most, ratio = given
    if (type(side), type(most)) != (int, int) or type(ratio) not in (int, float):
        raise CheckpointError(
            f"the image processor's {', '.join(CROPS)} are {side!r:.40}, {most!r:.40} and {ratio!r:.40}; they must be "
            "two whole numbers and a number"
        )
    try:
        crops = Crops(config.vision.image, config.view_tokens, side, most if most > 1 else 0, float(ratio))
    except BundleError as e:
        raise CheckpointError(f"the image processor's pan_and_scan settings: {e}") from e
    return replace(config, layout=crops)


def _template(template: str, config: ModelConfig) -> str:
    """The template with the text and tokens that transformers' processor puts around an image.

    With crops they are the layout's.
    """
    if config.layout.has_text:
        return template.replace(BEGIN, IMAGE)
    around = f"\\n\\n{BEGIN}{IMAGE}{END}\\n\\n"

    def surrounded(found: re.Match[str]) -> str:
        return f"{{{{ '{around}' }}}}" if found[0] == BEGIN else found[0].replace(BEGIN, around)

    return re.sub(rf"{{{{.*?}}}}|{{%.*?%}}|{BEGIN}", surrounded, template, flags=re.DOTALL)


FAMILY = Family(
    model_type="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    read=_read,
    processors=(PROCESSOR,),
    tensors=(
        (r"^(?:model\.)?multi_modal_projector\.mm_soft_emb_norm\.", "projector.norm."),
        (r"^(?:model\.)?multi_modal_projector\.mm_input_projection_weight$", MATRIX),
    ),
    adjust=_adjust,
    template=_template,
    transposed=(MATRIX,),
)
