"""What a family declares of itself, and the reading that all of LLaVA's kin in Hugging Face's layout share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vtx.exporter.checkpoint.config import (
    TEXT_FAMILIES,
    VISION_FAMILIES,
    ModelConfig,
    VideoConfig,
    VisionConfig,
    check_known,
    check_layers,
    feature_layers_of,
    image_token_of,
    model_type,
    parse,
    text_config_of,
    vision_config_of,
)
from vtx.exporter.checkpoint.family.processors import ImageProcessor
from vtx.exporter.checkpoint.fields.numbers import number
from vtx.exporter.checkpoint.original.parts import OriginalLayout
from vtx.runtime.errors import UnsupportedModelError
from vtx.runtime.vision.layout import Layout

NORM = "projector_layernorm_eps"
MakeLayout = Callable[[Any, VisionConfig, str], Layout]
MakeVideo = Callable[[Any, ModelConfig], VideoConfig]


@dataclass(frozen=True, slots=True)
class Family:
    """One family, recognised by its `architecture` and `model_type`.

    `read` makes of `config.json` what the graphs need. `processors` are the image processors it may have, `tensors`
    pairs of a pattern and what it becomes in canonical names, for names that other families do not have.
    `video_processor` prepares the frames of videos, where the family takes them and they are not images to it.
    `adjust` adds what the image processor's file says, `template` what transformers' processor does to a prompt beside
    the chat template. `seg_token` stands for a segment of the image, whose state answers give out. A family with an
    `original` layout, its authors', is recognised by its `architecture` alone.
    """

    model_type: str
    architecture: str
    read: Callable[[Mapping[str, Any]], ModelConfig]
    processors: tuple[ImageProcessor, ...]
    tensors: tuple[tuple[str, str], ...] = ()
    video_processor: ImageProcessor | None = None
    adjust: Callable[[ModelConfig, Mapping[str, Any]], ModelConfig] | None = None
    template: Callable[[str], str] | None = None
    original: OriginalLayout | None = None
    seg_token: str | None = None


def read_llava_like(
    config: Mapping[str, Any], kind: str, layout: MakeLayout, video: MakeVideo | None = None
) -> ModelConfig:
    """Read `config.json` as transformers' class `kind` does, with its defaults; `layout` gets that, tower and strategy.

    `video` gets it too, with all that is known of the model.

    Raises:
        UnsupportedModelError: a part that vtx does not export, by name.
        CheckpointError: values that are no sizes of a model.

    """
    if "text_config" not in config and any(key.startswith("mm_") for key in config):
        raise UnsupportedModelError(
            "config.json names an architecture of Hugging Face's layout and holds LLaVA's own settings (mm_...); "
            "take a checkpoint in one of the layouts"
        )
    text, vision = (config.get(key) or {} for key in ("text_config", "vision_config"))
    check_known("text model", model_type(text, "llama"), TEXT_FAMILIES)
    check_known("vision tower", model_type(vision, "clip_vision_model"), tuple(VISION_FAMILIES))
    for part in (text, vision):
        check_layers(part)
    parsed = parse(kind, config)
    text_config, vision_config = text_config_of(parsed), vision_config_of(parsed.vision_config)
    select = getattr(parsed, "vision_feature_select_strategy", "default")
    if select not in ("default", "full"):
        raise UnsupportedModelError(
            f"vision_feature_select_strategy {select!r} is not supported; vtx knows 'default' and 'full'"
        )
    model = ModelConfig(
        text=text_config,
        vision=vision_config,
        feature_layers=feature_layers_of(_feature_layer(parsed), vision_config.layers),
        select=select,
        projector_activation=parsed.projector_hidden_act,
        projector_bias=bool(getattr(parsed, "multimodal_projector_bias", True)),
        image_token_id=image_token_of(parsed, text_config),
        layout=layout(parsed, vision_config, select),
        projector_norm_eps=number(vars(parsed), NORM) if hasattr(parsed, NORM) else None,
    )
    return model if video is None else replace(model, video=video(parsed, model))


def _feature_layer(parsed: Any) -> Any:
    """Older releases of transformers, such as the newest for Python 3.10, have a plural name for ViP-LLaVA's."""
    named = getattr(parsed, "vision_feature_layers", None)
    return parsed.vision_feature_layer if named is None else named
