"""MiniCPM-V 4.6: Qwen3.5's decoder, and a SigLIP tower that makes one patch of four between its blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from vtx.exporter.checkpoint.config import (
    ModelConfig,
    VideoConfig,
    check_values,
    image_token_of,
    parse_parts,
    part_of,
    tower_of,
)
from vtx.exporter.checkpoint.family import SIGLIP_DEFAULTS, Family, ImageProcessor
from vtx.exporter.checkpoint.fields import check_patches, size
from vtx.exporter.checkpoint.text_config import text_config_of
from vtx.runtime.errors import BundleError, CheckpointError, UnsupportedModelError
from vtx.runtime.prompt.text import Text
from vtx.runtime.prompt.tokenizer import encode
from vtx.runtime.vision.layouts.sliced_frames import SlicedFrames
from vtx.runtime.vision.layouts.slices import MARKS, Slices
from vtx.runtime.vision.limits import MAX_SAMPLED_FRAMES
from vtx.tools.model.vision import MERGED, VisionConfig

NORM_EPS = 1e-6  # of the projector's norm: no setting
MODE = "downsample_mode"  # patches of a token
MODES = ("16x", "4x")
SIDE = 448  # of the image processor by default
MOST = 9
PATCH = 14
FRAMES = 128  # of a video by default
SQUARE = ([MERGED] * 2, (MERGED,) * 2, None)


def _read(config: Mapping[str, Any]) -> ModelConfig:
    known = {"merge_kernel_size": SQUARE, "merger_times": (1, None), MODE: (*MODES, None)}
    check_values(config, "a MiniCPM-V 4.6", known)
    check_values(part_of(config, "vision_config"), "a MiniCPM-V 4.6", {"window_kernel_size": SQUARE})
    parsed = parse_parts("MiniCPMV4_6Config", config, ("qwen3_5_text",))
    text = text_config_of(parsed, three_part=False)
    tower = tower_of(parsed.vision_config, "siglip")
    after = parsed.insert_layer_id
    if type(after) is not int or not 0 <= after < tower.layers:
        raise CheckpointError(
            f"config.json: insert_layer_id is {after!r:.40}, not the number of a block of the tower, 0 to "
            f"{tower.layers - 1}; correct config.json"
        )
    tower = replace(
        tower,
        shuffle=MERGED,
        position_grid=tower.grid,
        post_norm=True,
        naflex=True,
        nearest=True,
        merged_after=after + 1 if parsed.downsample_mode == "16x" else None,
    )
    layout = Slices(tower.patch, tower.square, max(SIDE, tower.patch * tower.square), MOST, True)
    token = None
    if parsed.video_token_id is not None:
        token = image_token_of(parsed, text, "video")
    frames = SlicedFrames(layout, min(FRAMES, MAX_SAMPLED_FRAMES))
    return ModelConfig(
        text=text,
        vision=_seeing(tower, layout),
        feature_layers=(tower.layers,),
        select="full",
        projector_activation="gelu",
        projector_bias=True,
        image_token_id=image_token_of(parsed, text),
        layout=layout,
        projector_norm_eps=NORM_EPS,
        projector_hidden=tower.hidden * MERGED**2,
        video=None if token is None else VideoConfig(token, frames, "full"),
    )


def _seeing(tower: VisionConfig, layout: Slices) -> VisionConfig:
    """The tower with the size of a square slice."""
    return replace(tower, image=layout.side // layout.unit * layout.unit)


def _adjust(config: ModelConfig, processor: Mapping[str, Any]) -> ModelConfig:
    """Set the image processor's slices; its patches, and how many a token has, must be the tower's."""
    vision = config.vision
    assumed = config.layout
    assert isinstance(assumed, Slices)
    numbered = _flag(processor, "use_image_id", "image")
    layout = _slices(replace(assumed, numbered=numbered), processor, "image")
    video = config.video
    if video is not None:  # transformers' processor numbers videos if the image processor says so
        assert isinstance(video.layout, SlicedFrames)
        frames = replace(video.layout, slices=replace(video.layout.slices, numbered=numbered))
        video = replace(video, layout=frames)
    return replace(config, layout=layout, vision=_seeing(vision, layout), video=video)


def _adjust_video(frames: SlicedFrames, processor: Mapping[str, Any]) -> SlicedFrames:
    """Set the slices of the video processor's file, and how many frames it samples."""
    if (stacked := processor.get("stack_frames", 1)) != 1:
        raise UnsupportedModelError(
            f"the video processor's stack_frames {stacked!r:.40} is not supported: vtx shows each frame by itself; set "
            "it to 1"
        )
    if processor.get("do_sample_frames", True) is not True:
        raise UnsupportedModelError("the video processor's do_sample_frames must be true: vtx samples frames")
    given = SimpleNamespace(max_num_frames=processor.get("max_num_frames", FRAMES))
    most = size(given, "max_num_frames", 1 << 24, "the video processor")
    return SlicedFrames(_slices(frames.slices, processor, "video"), min(most, MAX_SAMPLED_FRAMES))


def _slices(assumed: Slices, processor: Mapping[str, Any], kind: str) -> Slices:
    """Slices as a processor's file has them; its patches, and how many a token has, must be those of `assumed`."""
    mode = MODES[assumed.merge == MERGED]
    check_patches({"patch_size": PATCH, MODE: MODES[0], **processor}, {"patch_size": assumed.patch, MODE: mode}, kind)
    values = {"scale_resolution": SIDE, "max_slice_nums": MOST}
    given = SimpleNamespace(**{name: processor.get(name, value) for name, value in values.items()})
    side, most = (size(given, name, 1 << 14, f"the {kind} processor") for name in values)
    try:
        return replace(assumed, side=side, most=most if _flag(processor, "slice_mode", kind) else 1)
    except BundleError as e:
        raise CheckpointError(f"the {kind} processor's scale_resolution and max_slice_nums: {e}") from e


def _flag(processor: Mapping[str, Any], name: str, kind: str) -> bool:
    value = processor.get(name, True)
    if not isinstance(value, bool):
        raise CheckpointError(f"the {kind} processor's {name} is {value!r:.40}; it must be true or false")
    return value


def _check(text: Text) -> None:
    """Raise CheckpointError if the tokenizer has not the tokens that transformers' processor puts around images."""
    missing = [mark for mark in MARKS if len(encode(text.tokenizer, mark, add_special_tokens=False).ids) != 1]
    if missing:
        raise CheckpointError(
            f"the tokenizer has no token {', '.join(missing)}, which stand around images in a prompt of MiniCPM-V 4.6; "
            "download it again"
        )


FAMILY = Family(
    model_type="minicpmv4_6",
    architecture="MiniCPMV4_6ForConditionalGeneration",
    read=_read,
    processors=(ImageProcessor("MiniCPMV4_6ImageProcessor", {**SIGLIP_DEFAULTS, "resample": 3}, own_size=True),),
    tensors=(
        (r"^model\.merger\.mlp\.0\.pre_norm\.", "projector.norm."),
        (r"^model\.merger\.mlp\.0\.", "projector."),
    ),
    adjust=_adjust,
    check=_check,
    downsampling=MODES,
    adjust_video=_adjust_video,
    video_processor=ImageProcessor("MiniCPMV4_6VideoProcessor", {**SIGLIP_DEFAULTS, "resample": 3}, own_size=True),
)
