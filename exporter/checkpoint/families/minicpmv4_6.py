"""MiniCPM-V 4.6: Qwen3.5's decoder, and a SigLIP tower that makes one patch of four between its blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from vtx.exporter.checkpoint.config import (
    ModelConfig,
    VisionConfig,
    check_known,
    check_layers,
    check_values,
    image_token_of,
    parse,
    part_of,
    tower_of,
)
from vtx.exporter.checkpoint.family import SIGLIP_DEFAULTS, Family, ImageProcessor
from vtx.exporter.checkpoint.fields import check_patches, size
from vtx.exporter.checkpoint.text_config import text_config_of
from vtx.runtime.bundle.spec.model_spec import MERGED
from vtx.runtime.errors import BundleError, CheckpointError
from vtx.runtime.prompt.text import Text
from vtx.runtime.prompt.tokenizer import encode
from vtx.runtime.vision.layouts.slices import MARKS, Slices

NORM_EPS = 1e-6  # of the projector's norm: no setting
MODE, MODES = "downsample_mode", ("16x", "4x")  # patches of a token
SIDE, MOST, PATCH = 448, 9, 14  # of the image processor by default
SQUARE = ([MERGED] * 2, (MERGED,) * 2, None)


def _read(config: Mapping[str, Any]) -> ModelConfig:
    text_part, vision_part = part_of(config, "text_config"), part_of(config, "vision_config")
    check_known("text model", str(text_part.get("model_type", "qwen3_5_text")), ("qwen3_5_text",))
    check_known("vision tower", str(vision_part.get("model_type", "minicpmv4_6_vision")), ("minicpmv4_6_vision",))
    for part in (text_part, vision_part):
        check_layers(part)
    known = {"merge_kernel_size": SQUARE, "merger_times": (1, None), "drop_vision_last_layer": (False, None)}
    check_values(config, "a MiniCPM-V 4.6", known | {MODE: (*MODES, None)})
    check_values(vision_part, "a MiniCPM-V 4.6", {"window_kernel_size": SQUARE})
    parsed = parse("MiniCPMV4_6Config", config)
    text, tower = text_config_of(parsed, three_part=False), tower_of(parsed.vision_config, "siglip")
    after = parsed.insert_layer_id
    if type(after) is not int or not 0 <= after < tower.layers:
        raise CheckpointError(
            f"config.json: insert_layer_id is {after!r:.40}, not the number of a block of the tower, 0 to "
            f"{tower.layers - 1}; correct config.json"
        )
    tower = replace(
        tower, shuffle=MERGED, position_grid=tower.grid, post_norm=True, naflex=True, nearest=True,
        merged_after=after + 1 if parsed.downsample_mode == "16x" else None,
    )  # fmt: skip
    layout = Slices(tower.patch, tower.square, max(SIDE, tower.patch * tower.square), MOST, True)
    return ModelConfig(
        text=text, vision=_seeing(tower, layout), feature_layers=(tower.layers,), select="full",
        projector_activation="gelu", projector_bias=True, image_token_id=image_token_of(parsed, text), layout=layout,
        projector_norm_eps=NORM_EPS, projector_hidden=tower.hidden * MERGED**2,
    )  # fmt: skip


def _seeing(tower: VisionConfig, layout: Slices) -> VisionConfig:
    """The tower with the size of a square slice."""
    return replace(tower, image=layout.side // layout.unit * layout.unit)


def _adjust(config: ModelConfig, processor: Mapping[str, Any]) -> ModelConfig:
    """Set the image processor's slices; its patches, and how many a token has, must be the tower's."""
    vision, mode = config.vision, MODES[config.vision.merged_after is None]
    check_patches({"patch_size": PATCH, MODE: MODES[0], **processor}, {"patch_size": vision.patch, MODE: mode})
    flags = [processor.get(name, True) for name in ("slice_mode", "use_image_id")]
    if not all(isinstance(flag, bool) for flag in flags):
        raise CheckpointError("the image processor's slice_mode and use_image_id must be true or false")
    values = {"scale_resolution": SIDE, "max_slice_nums": MOST}
    given = SimpleNamespace(**{name: processor.get(name, value) for name, value in values.items()})
    side, most = (size(given, name, 1 << 14, "the image processor") for name in values)
    try:
        layout = Slices(vision.patch, vision.square, side, most if flags[0] else 1, flags[1])
    except BundleError as e:
        raise CheckpointError(f"the image processor's scale_resolution and max_slice_nums: {e}") from e
    return replace(config, layout=layout, vision=_seeing(vision, layout))


def _check(text: Text) -> None:
    """Raise CheckpointError if the tokenizer has not the tokens that transformers' processor puts around images."""
    missing = [mark for mark in MARKS if len(encode(text.tokenizer, mark, add_special_tokens=False).ids) != 1]
    if missing:
        raise CheckpointError(
            f"the tokenizer has no token {', '.join(missing)}, which stand around images in a prompt of MiniCPM-V 4.6; "
            "download it again"
        )


FAMILY = Family(
    model_type="minicpmv4_6", architecture="MiniCPMV4_6ForConditionalGeneration", read=_read,
    processors=(ImageProcessor("MiniCPMV4_6ImageProcessor", {**SIGLIP_DEFAULTS, "resample": 3}, own_size=True),),
    tensors=(
        (r"^model\.merger\.mlp\.0\.pre_norm\.", "projector.norm."),
        (r"^model\.merger\.mlp\.0\.", "projector."),
    ),
    adjust=_adjust, check=_check, downsampling=MODES,
)  # fmt: skip
