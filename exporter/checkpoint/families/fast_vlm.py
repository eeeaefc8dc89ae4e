"""FastVLM in Hugging Face's layout: a convolutional tower of few tokens, FastViTHD, and a qwen2 decoder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig, image_token_of, parse_parts
from vtx.exporter.checkpoint.family import ONE_PIECE, Family
from vtx.exporter.checkpoint.fields import MAX_WIDTH
from vtx.exporter.checkpoint.text_config import TEXT_FAMILIES, text_config_of
from vtx.runtime.bundle.spec.model_spec import MAX_LAYERS
from vtx.runtime.errors import CheckpointError, UnsupportedModelError
from vtx.runtime.vision.layouts.single import Single
from vtx.tools.model.towers.convolutional import ATTENDING, STEM
from vtx.tools.model.vision import VisionConfig

TOWER = "fastvit_mci3"  # timm's name, which stands for the sizes below
SIZES: Mapping[str, tuple[int, ...]] = {"layers": (2, 12, 24, 4, 2), "embed_dims": (96, 192, 384, 768, 1536)}
HEAD = 32  # width of one of attention
NORM_EPS = 1e-5  # of layer norms and batch norms: no setting
MAX_SIDE = 64  # tokens


def _read(config: Mapping[str, Any]) -> ModelConfig:
    parsed = parse_parts("FastVlmConfig", config, TEXT_FAMILIES, ("timm_wrapper",))
    text = text_config_of(parsed)
    count = parsed.image_seq_length
    side = math.isqrt(count) if isinstance(count, int) and 1 <= count <= MAX_SIDE**2 else 0
    if not side or side * side != count:
        raise CheckpointError(
            f"config.json: image_seq_length is {count!r:.40}, not the tokens of a square image, of up to {MAX_SIDE} x "
            f"{MAX_SIDE}; correct config.json"
        )
    return ModelConfig(
        text=text,
        vision=_tower(parsed.vision_config, side),
        feature_layers=(1,),
        select="full",
        projector_activation=parsed.projector_hidden_act,
        projector_bias=bool(parsed.multimodal_projector_bias),
        image_token_id=image_token_of(parsed, text),
        layout=Single(count),
    )


def _tower(config: Any, side: int) -> VisionConfig:
    """The tower that gives `side` x `side` tokens."""
    name = str(config.architecture)
    given = dict(config.model_args or {})
    if name.partition(".")[0] != TOWER:
        raise UnsupportedModelError(f"the vision tower {name!r:.60} is not supported in FastVLM; vtx exports {TOWER}")
    if given.pop("inference_mode", None) is not True or not given.keys() <= SIZES.keys():
        raise UnsupportedModelError(
            f"model_args {config.model_args!r:.80} of the vision tower are not supported; vtx exports towers with "
            f"inference_mode true, whose branches are merged, and no other settings than {', '.join(SIZES)}"
        )
    blocks, widths = (_numbers(given, key, most) for key, most in zip(SIZES, (MAX_LAYERS, MAX_WIDTH), strict=True))
    hidden = 2 * widths[-1]
    stated = getattr(config, "hidden_size", None)
    uneven = any(wide % before for before, wide in pairwise(widths)) or any(n % HEAD for n in widths[-ATTENDING:])
    if uneven or stated != hidden:
        raise CheckpointError(
            f"config.json: the vision tower's embed_dims are {list(widths)} and its hidden_size {stated!r:.20}; each "
            f"of the first must be a multiple of the one before, the last two of {HEAD}, and hidden_size twice the "
            "last; correct config.json"
        )
    patch = STEM << len(widths) - 1
    return VisionConfig(
        family="fastvit",
        layers=1,
        hidden=hidden,
        ffn=4 * widths[-1],
        heads=widths[-1] // HEAD,
        image=side * patch,
        patch=patch,
        eps=NORM_EPS,
        activation="gelu",
        stage_blocks=blocks,
        stage_widths=widths,
    )


def _numbers(settings: dict[str, Any], key: str, most: int) -> tuple[int, ...]:
    """The tower's sizes of this name, one a stage. Raises CheckpointError."""
    numbers = settings.get(key, SIZES[key])
    count = len(SIZES[key])
    listed = isinstance(numbers, list | tuple) and len(numbers) == count
    if not listed or not all(type(number) is int and 1 <= number <= most for number in numbers):
        raise CheckpointError(
            f"config.json: {key} of the vision tower is {numbers!r:.60}, not {count} numbers from 1 to {most}; "
            "correct config.json"
        )
    return tuple(numbers)


FAMILY = Family(
    model_type="fast_vlm",
    architecture="FastVlmForConditionalGeneration",
    read=_read,
    processors=ONE_PIECE,
    tensors=((r"^(model\.)?vision_tower\.timm_model\.", "vision."),),
)
